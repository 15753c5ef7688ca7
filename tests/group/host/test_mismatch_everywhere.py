"""Ranks that differ in any argument of any collective: each is told who passed what, goes on."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import pytest
from tests.collective_cases import COLLECTIVES, ROOTED, SCANS, SMALL_TUNING
from tests.group.host.test_mismatch import ODD, afterwards, goes_on, told
from tests.waiting import until

from gpucoll.errors import MismatchError
from gpucoll.transport.shared.layout import RING
from gpucoll.transport.shared.words import Context
from gpucoll.types import ReduceOp

HINT = "blocks of different sizes need counts="


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


def call(comm, name, x, **given):
    return getattr(comm, name)(x, **given)


def differences(world_size):
    """name -> (collective, what the odd rank passes, what the others pass, what is said of each).

    What is passed: x, and the other arguments.
    """
    n_ranks = world_size
    equal, more, other = [3] * n_ranks, [3] * (n_ranks - 1) + [4], [3, 4, *[3] * (n_ranks - 2)]
    rows: dict[str, Any] = {}
    for name in COLLECTIVES:
        rows[f"{name}: dtype"] = (
            name,
            (zeros(12 * n_ranks, dtype="int32"), {}),
            (zeros(12 * n_ranks), {}),
            (f"{name}(", "int32"),
            (f"{name}(", "float32"),
        )
        rows[f"{name}: length"] = (
            name,
            (zeros(13 * n_ranks), {}),
            (zeros(12 * n_ranks), {}),
            ("shape (13,)" if name == "scatter" else f"shape ({13 * n_ranks},)",),
            ("shape (12,)" if name == "scatter" else f"shape ({12 * n_ranks},)",),
        )
    for name in ("reduce", "scan", "exclusive_scan", "reduce_scatter"):
        ops: tuple[tuple[str, Any, Any], ...] = (
            ("op", "max", "sum"),
            ("factor", ReduceOp.scaled_sum(0.5), ReduceOp.scaled_sum(0.25)),
        )
        for label, odd, usual in ops:
            rows[f"{name}: {label}"] = (
                name,
                (zeros(n_ranks), {"op": odd}),
                (zeros(n_ranks), {"op": usual}),
                (f"op={odd}",),
                (f"op={usual}",),
            )
    for name in ("reduce", "gather", "scatter"):
        rows[f"{name}: root"] = (
            name,
            (zeros(n_ranks), {"root": 1}),
            (zeros(n_ranks), {"root": 0}),
            ("root=1",),
            ("root=0",),
        )
    for name in ("all_gather", "gather"):
        rows[f"{name}: counts"] = (
            name,
            (zeros(3), {"counts": equal}),
            (zeros(3), {"counts": other}),
            (f"counts=[{', '.join(map(str, equal))}]",),
            ("counts=[3, 4",),
        )
        rows[f"{name}: shapes of rows"] = (
            name,
            (zeros(3, 2), {}),
            (zeros(3, 4), {}),
            ("shape (3, 2)",),
            ("shape (3, 4)",),
        )
    for name in ("scatter", "reduce_scatter"):
        rows[f"{name}: counts"] = (
            name,
            (zeros(sum(more)), {"counts": more[::-1]}),
            (zeros(sum(more)), {"counts": more}),
            ("counts=[4, 3",),
            ("counts=[3",),
        )
        rows[f"{name}: with and without counts"] = (
            name,
            (zeros(3 * n_ranks), {"counts": equal}),
            (zeros(3 * n_ranks), {}),
            ("counts=[3, 3",),
            (f"{name}(",),
        )
    return rows


def call_differently(comm, label):
    """Return this rank's error, and what the communicator gives afterwards."""
    name, odd, usual, *_ = differences(comm.world_size)[label]
    x, given = odd if comm.rank == ODD else usual
    return told(comm, lambda comm: call(comm, name, x, **given)), afterwards(comm)


def may_leave(name):
    """Return whether some rank may end a small one before all have arrived."""
    return name in (*ROOTED, *SCANS)


@pytest.mark.soak(quick=12)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("label", differences(2))
def test_every_rank_is_told(ranks, label, world_size):
    name, _, _, of_odd, of_others = differences(world_size)[label]

    # Two ranks that each take themselves for the root wait for each other.
    is_broken = may_leave(name) and (label, world_size) != ("reduce: root", 2)
    for rank, (message, after) in enumerate(ranks.call(world_size, call_differently, label)):
        assert after == goes_on(world_size, is_broken)
        assert f"This is rank {rank} of {world_size}" in message
        others = "ranks? 0(, 2)?"  # of a scatter, rank 2 has another shape to show
        for who, texts in ((f"rank {ODD}", of_odd), (others, of_others)):
            for text in texts:
                assert re.search(rf"{who} called [^;]*{re.escape(text)}", message), message
        counted = name in ("all_gather", "gather", "reduce_scatter", "scatter")
        assert (HINT in message) == counted, message


def other_collective(comm, name, size):
    other = "broadcast" if name == "all_reduce" else "all_reduce"
    x = zeros(size * comm.world_size)
    message = told(comm, lambda comm: call(comm, other if comm.rank == ODD else name, x))
    return message, afterwards(comm)


@pytest.mark.parametrize("size", [0, 2, 50_000])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_another_collective(ranks, name, size):
    for message, after in ranks.call(3, other_collective, name, size, timeout_s=5):
        other = "broadcast" if name == "all_reduce" else "all_reduce"
        is_small = size < 50_000
        assert after == goes_on(3, is_small and (may_leave(name) or may_leave(other)))
        assert f"rank {ODD} called {other}(" in message
        assert f"ranks 0, 2 called {name}(" in message


def nothing_is_written(comm, name, size):
    """Everybody waits for everybody here, so that a mismatch comes before the first byte."""
    n_ranks = comm.world_size
    x = np.ones((size + (comm.rank == ODD)) * n_ranks, np.float32)
    shape = {"all_gather": len(x) * n_ranks, "reduce_scatter": len(x) // n_ranks}.get(name, len(x))
    out = np.full(shape, 7, np.float32)
    with pytest.raises(MismatchError, match="Nothing was written"):
        call(comm, name, x, out=out)
    return bool((out == 7).all() and (x == 1).all()), comm.all_reduce(1)


@pytest.mark.parametrize("tuning", [{}, SMALL_TUNING])
@pytest.mark.parametrize("size", [5, 3000])
@pytest.mark.parametrize(
    "name", ["all_reduce", "all_gather", "all_to_all", "reduce_scatter", *SCANS]
)
def test_nothing_is_written(ranks, name, size, tuning):
    if name in SCANS:
        size *= 10_000  # a small one waits only for whose input it needs: the next test
    replies = ranks.call(3, nothing_is_written, name, size, environment=tuning)

    assert replies == [(True, 3)] * 3


def scan_up_to_the_odd_rank(comm, name):
    x = np.ones(5 + (comm.rank == ODD), np.float32)
    out = np.full(len(x), 7, np.float32)
    if comm.rank < ODD:
        call(comm, name, x, out=out)
        message = told(comm, lambda comm: comm.barrier())
    else:
        message = told(comm, lambda comm: call(comm, name, x, out=out))
    return out[0], message, afterwards(comm)


@pytest.mark.parametrize("name", SCANS)
def test_a_small_scan_ends_where_the_odd_rank_is(ranks, name):
    """Nobody's result has anything of a rank that made another call."""
    for rank, (value, message, after) in enumerate(ranks.call(3, scan_up_to_the_odd_rank, name)):
        assert after == goes_on(3, is_broken=True)
        assert value == ((name == "scan") if rank < ODD else 7)
        assert f"rank {ODD} called {name}(" in message


def has_posted(comm, rank, sequence):
    return comm._group.members.header_word(rank, sequence) & 0xFFFFFFFF == sequence


def sum_of_the_agreeing(comm, x, post):
    """Rank 2 makes another call between the posts of rank 0 and of rank 1, who gets its sum."""
    if comm.rank == 2:
        until(lambda: post(0))
        return comm.broadcast(x, 2)[0]
    if comm.rank == 1:
        until(lambda: post(2))
    return comm.scan(x)[0]


def what_the_root_sent(comm, x, post):
    """Rank 0 makes another call between the root's post and rank 1's reading."""
    if comm.rank == 0:
        until(lambda: post(2))
        return comm.all_reduce(x)[0]
    if comm.rank == 1:
        until(lambda: post(0))
    return comm.broadcast(x, 2)[0]


def call_among_others(comm, calls):
    """Return rank 1's results, from three rounds of the ring: payloads lie elsewhere in each."""
    found = []
    for turn in range(3):
        with comm.duplicate() as part:
            for _ in range(turn * RING):
                part.barrier()
            sequence = int(part._group.context[Context.sequence]) + 1
            x = np.full(100, float(comm.rank + 1))

            def post(rank, part=part, sequence=sequence):
                return has_posted(part, rank, sequence)

            with contextlib.suppress(MismatchError):
                found.append(calls(part, x, post))
                part.barrier()
    return found


@pytest.mark.parametrize(("calls", "result"), [(sum_of_the_agreeing, 3), (what_the_root_sent, 3)])
def test_an_odd_rank_writes_where_nobody_else_does(ranks, calls, result):
    assert ranks.call(3, call_among_others, calls)[1] == [result] * 3


# --- counts of an all_to_all --------------------------------------------------------------------


def conflict(comm, rows, is_shared):
    """Rank 0 sends one row more to the odd rank than that one expects."""
    n_ranks = comm.world_size
    sent = [rows + (comm.rank == 0 and rank == ODD) for rank in range(n_ranks)]
    received = [rows] * n_ranks
    x = comm.empty(sum(sent)) if is_shared else np.empty(sum(sent), "f4")
    out = comm.empty(sum(received)) if is_shared else np.empty(sum(received), "f4")
    x[:], out[:] = 1, 7
    with pytest.raises(MismatchError, match="send_counts and recv_counts must agree"):
        comm.all_to_all(x, send_counts=sent, recv_counts=received, out=out)
    return bool((out == 7).all()), comm.all_reduce(1)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5000])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_send_and_receive_counts_in_conflict(ranks, world_size, rows, is_shared):
    replies = ranks.call(world_size, conflict, rows, is_shared)

    assert replies == [(True, world_size)] * world_size


def conflict_alone(comm):
    with pytest.raises(MismatchError):
        comm.all_to_all(zeros(3), send_counts=[3], recv_counts=[2])
    return comm.all_to_all(zeros(2) + 1, send_counts=[2], recv_counts=[2]).tolist()


def test_send_and_receive_counts_in_conflict_on_one_rank(ranks):
    assert ranks.call(1, conflict_alone) == [[1.0, 1.0]]


def with_and_without_counts(comm):
    x, n_ranks = zeros(2 * comm.world_size), comm.world_size
    given = {"send_counts": [2] * n_ranks, "recv_counts": [2] * n_ranks} if comm.rank == ODD else {}
    message = told(comm, lambda comm: comm.all_to_all(x, **given))
    return message, comm.all_reduce(1)


def test_an_all_to_all_with_and_without_counts(ranks):
    for message, total in ranks.call(3, with_and_without_counts):
        assert total == 3
        assert (
            f"rank {ODD} called all_to_all(float32, shape (6,), send_counts=[2, 2, 2])" in message
        )


def auto_rows_differ(comm):
    """With "auto" different lengths are what was meant; different rows still are not."""
    x = zeros(comm.rank + 1, 2 + (comm.rank == ODD))
    message = told(comm, lambda comm: comm.all_gather(x, counts="auto"))
    return message, comm.all_gather(zeros(comm.rank + 1, 2), counts="auto").shape


def test_rows_of_different_sizes_with_counts(ranks):
    for message, shape in ranks.call(3, auto_rows_differ):
        assert shape == (6, 2)
        assert f"rank {ODD} called all_gather(float32, shape (2, 3)" in message


# --- those who leave before the others come -----------------------------------------------------

LEAVERS = {
    "gather": lambda comm, x: comm.gather(x, 2),
    "reduce": lambda comm, x: comm.reduce(x, root=2),
    "scatter": lambda comm, x: comm.scatter(x, 0),
}


def late_news(comm, name, calls_between):
    """Rank 0 is over with a small rooted call before the others come with something else."""
    right, wrong = zeros(3), zeros(6)

    def act(comm):
        LEAVERS[name](comm, right if comm.rank == 0 else wrong)
        for _ in range(calls_between):
            LEAVERS[name](comm, right)

    return told(comm, act), afterwards(comm)


@pytest.mark.parametrize("calls_between", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("name", LEAVERS)
def test_who_had_left_is_told_later(ranks, name, calls_between):
    for message, after in ranks.call(3, late_news, name, calls_between, timeout_s=5):
        assert after == goes_on(3, is_broken=True)
        assert re.search(rf"rank 0 called {name}\([^;]*float32, shape", message), message
