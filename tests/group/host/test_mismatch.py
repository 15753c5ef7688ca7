"""Ranks that do not make the same call: every one is told who passed what.

They can go on where all raise that in the very call; else the communicator is broken.
"""

from __future__ import annotations

import re

import ml_dtypes  # noqa: F401
import numpy as np
import pytest
from tests.collective_cases import SMALL_TUNING

import gpucoll
from gpucoll.errors import AbortedError, MismatchError
from gpucoll.group.host.group import HostGroup
from gpucoll.transport.shared.words import Context, State
from gpucoll.types import ReduceOp

ODD = 1
LARGE = 300_000
"""Of so many elements a rooted call waits for all."""


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


# name -> (what the odd rank calls, what the others call, what the message says of each)
DIFFERENCES = {
    "shape": (
        lambda comm: comm.all_reduce(zeros(2, 3)),
        lambda comm: comm.all_reduce(zeros(3, 2)),
        ("all_reduce(op=sum, float32, shape (2, 3))", "shape (3, 2)"),
    ),
    "count": (
        lambda comm: comm.all_reduce(zeros(5)),
        lambda comm: comm.all_reduce(zeros(4)),
        ("shape (5,)", "shape (4,)"),
    ),
    "count of staged arrays": (
        lambda comm: comm.all_reduce(zeros(50_000)),
        lambda comm: comm.all_reduce(zeros(40_000)),
        ("shape (50000,)", "shape (40000,)"),
    ),
    "small and large": (
        lambda comm: comm.all_reduce(zeros(3)),
        lambda comm: comm.all_reduce(zeros(40_000)),
        ("shape (3,)", "shape (40000,)"),
    ),
    "a scalar and an array of one": (
        lambda comm: comm.all_reduce(1.5),
        lambda comm: comm.all_reduce(zeros(1, dtype="float64")),
        ("shape ()", "shape (1,)"),
    ),
    "fifth dimension": (
        lambda comm: comm.all_reduce(zeros(1, 1, 1, 1, 2)),
        lambda comm: comm.all_reduce(zeros(1, 1, 1, 1, 3)),
        ("shape (1, 1, 1, 1, ...)", "shape (1, 1, 1, 1, ...)"),
    ),
    "dtype": (
        lambda comm: comm.all_reduce(zeros(4)),
        lambda comm: comm.all_reduce(zeros(4, dtype="int32")),
        ("float32", "int32"),
    ),
    "half dtype": (
        lambda comm: comm.all_reduce(zeros(4, dtype="float16")),
        lambda comm: comm.all_reduce(zeros(4, dtype="bfloat16")),
        ("float16", "bfloat16"),
    ),
    "op": (
        lambda comm: comm.all_reduce(zeros(4), "max"),
        lambda comm: comm.all_reduce(zeros(4), "sum"),
        ("op=max", "op=sum"),
    ),
    "factor": (
        lambda comm: comm.all_reduce(zeros(4), ReduceOp.scaled_sum(0.5)),
        lambda comm: comm.all_reduce(zeros(4), ReduceOp.scaled_sum(0.25)),
        ("op=scaled_sum(0.5)", "op=scaled_sum(0.25)"),
    ),
    "collective": (
        lambda comm: comm.barrier(),
        lambda comm: comm.all_reduce(zeros(4)),
        ("barrier()", "all_reduce(op=sum, float32, shape (4,))"),
    ),
    "broadcast and all_reduce": (
        lambda comm: comm.broadcast(zeros(4), root=0),
        lambda comm: comm.all_reduce(zeros(4)),
        ("broadcast(float32, shape (4,), root=0)", "all_reduce(op=sum, float32, shape (4,))"),
    ),
    "objects": (
        lambda comm: comm.gather_object(1),
        lambda comm: comm.all_gather_object(1),
        ("gather_object", "all_gather_object"),
    ),
    "object root": (
        lambda comm: comm.broadcast_object(1, root=1),
        lambda comm: comm.broadcast_object(1, root=0),
        ("root=1", "root=0"),
    ),
    "plan": (
        lambda comm: comm.plan_all_reduce(zeros(4))(),
        lambda comm: comm.plan_all_reduce(zeros(5))(),
        ("shape (4,)", "shape (5,)"),
    ),
    "symmetric": (
        lambda comm: comm.all_reduce(comm.empty(40_000)),
        lambda comm: comm.all_reduce(comm.empty(30_000)),
        ("shape (40000,)", "shape (30000,)"),
    ),
    "split and duplicate": (
        lambda comm: comm.split(0),
        lambda comm: comm.duplicate(),
        ("split", "duplicate"),
    ),
    "asynchronous": (
        lambda comm: comm.all_reduce(zeros(4), async_op=True).wait(),
        lambda comm: comm.all_reduce(zeros(6), async_op=True).wait(),
        ("shape (4,)", "shape (6,)"),
    ),
}


def told(comm, call):
    """Return what this rank is told: in the call or, where it had left that, at its next."""
    try:
        call(comm)
        comm.barrier()
    except MismatchError as error:
        return str(error)
    raise AssertionError(f"rank {comm.rank} was told nothing")


def afterwards(comm):
    """Return the sum over all ranks that the communicator gives.

    Where it is broken, every call says so until all ranks have shrunk it: "broken", and the sum
    that the new one gives.
    """
    try:
        return comm.all_reduce(comm.rank + 1)
    except MismatchError:
        for call in (comm.barrier, comm.check):
            with pytest.raises(MismatchError, match="The communicator is broken"):
                call()
        with comm.shrink() as whole:
            assert whole.world_size == comm.world_size
            return "broken", whole.all_reduce(comm.rank + 1)


def goes_on(world_size, is_broken=False):
    """Return what `afterwards` returns on every rank."""
    total = world_size * (world_size + 1) // 2
    return ("broken", total) if is_broken else total


def call_differently(comm, name):
    """Return this rank's error, and what the communicator gives afterwards."""
    odd, usual, _ = DIFFERENCES[name]
    return told(comm, odd if comm.rank == ODD else usual), afterwards(comm)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_every_rank_is_told(ranks, name, world_size):
    replies = ranks.call(world_size, call_differently, name)

    of_odd, of_others = DIFFERENCES[name][2]
    is_broken = name == "broadcast and all_reduce"  # its root need not wait for the others
    for rank, (message, after) in enumerate(replies):
        assert after == goes_on(world_size, is_broken)
        assert f"This is rank {rank} of {world_size}" in message
        assert re.search(rf"rank {ODD} called [^;]*{re.escape(of_odd)}", message), message
        others = "rank 0" if world_size == 2 else "ranks 0, 2"
        assert re.search(rf"{others} called [^;]*{re.escape(of_others)}", message), message


def nothing_is_written(comm):
    out = np.full(5000 + (comm.rank == ODD), 7, np.float32)
    x = np.ones_like(out)
    with pytest.raises(MismatchError):
        comm.all_reduce(x, out=out)
    return bool((out == 7).all() and (x == 1).all())


@pytest.mark.parametrize("tuning", [{}, SMALL_TUNING])
def test_nothing_is_written_out_of_place(ranks, tuning):
    assert ranks.call(3, nothing_is_written, environment=tuning) == [True] * 3


# --- broadcast ----------------------------------------------------------------------------------


def two_roots(comm, count, is_shared):
    x = comm.empty(count) if is_shared else np.empty(count, np.float32)
    x[...] = comm.rank
    message = told(comm, lambda comm: comm.broadcast(x, root=1 if comm.rank == 1 else 0))
    return message, afterwards(comm)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("count", [0, 1, 1000, LARGE])
def test_a_broadcast_with_two_roots(ranks, world_size, count, is_shared):
    replies = ranks.call(world_size, two_roots, count, is_shared, timeout_s=4)

    for message, after in replies:
        assert after == goes_on(world_size, count < LARGE)
        assert re.search(r"rank 1 called broadcast\([^;]*root=1\)", message), message


def no_root(comm, count):
    root = (comm.rank + 1) % comm.world_size
    return told(comm, lambda comm: comm.broadcast(np.zeros(count), root)), afterwards(comm)


@pytest.mark.parametrize("count", [1, LARGE])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_broadcast_that_everyone_expects_from_another(ranks, world_size, count):
    replies = ranks.call(world_size, no_root, count, timeout_s=4)

    after = goes_on(world_size, count < LARGE)
    assert all(found == after and "root=1" in message for message, found in replies)


def late_news(comm, calls_between):
    """The root of small broadcasts leaves before its readers come with something else."""
    x = np.zeros(3)

    def call(comm):
        comm.broadcast(x if comm.rank == 0 else np.zeros(4), root=0)
        for _ in range(calls_between):
            comm.broadcast(x, root=0)

    return told(comm, call), afterwards(comm)


@pytest.mark.parametrize("calls_between", [0, 1, 3, 4, 9])
def test_a_root_that_had_left_is_told_later(ranks, calls_between):
    replies = ranks.call(3, late_news, calls_between, timeout_s=5)

    told_where = [re.findall(r"This is rank \d of 3, ([^.]*)\.", message) for message, _ in replies]
    assert told_where[1:] == [["in that call"]] * 2
    assert told_where[0][0].endswith(", which did not take place")
    for message, after in replies:
        assert after == goes_on(3, is_broken=True)
        assert "rank 0 called broadcast(float64, shape (3,), root=0)" in message


# --- again and again ----------------------------------------------------------------------------


def differ_repeatedly(comm, turns):
    for turn in range(turns):
        with pytest.raises(MismatchError):
            comm.all_reduce(np.zeros(3 + (comm.rank == turn % comm.world_size)))
    total = comm.all_reduce(np.arange(100_000) + comm.rank)
    return int(total[0]), comm.all_reduce_object([comm.rank], list.__add__)


@pytest.mark.parametrize("world_size", [2, 4])
def test_many_mismatches_in_a_row(ranks, world_size):
    everyone = list(range(world_size))

    for total, objects in ranks.call(world_size, differ_repeatedly, 40):
        assert (total, objects) == (sum(everyone), everyone)


def differ_among_pending(comm):
    outs = [np.zeros(4) for _ in range(6)]
    works = []
    for place, out in enumerate(outs):
        x = np.ones(5) if place == 2 and comm.rank == 0 else np.ones(4)
        works.append(comm.all_reduce(x, async_op=True, out=None if place == 2 else out))
    with pytest.raises(MismatchError):
        works[2].wait()
    for place in (0, 1, 3, 4, 5):
        works[place].wait()
    return [out.tolist() for out in outs], comm.all_reduce(1)


def test_a_mismatch_among_pending_calls_fails_that_one(ranks):
    for outs, total in ranks.call(3, differ_among_pending):
        assert outs == [[3.0] * 4] * 2 + [[0.0] * 4] + [[3.0] * 4] * 3
        assert total == 3


def differ_unseen(comm):
    comm.all_reduce(np.zeros(3 + (comm.rank == 0)), async_op=True)
    comm.all_reduce(1)
    with pytest.raises(MismatchError):
        comm.check()
    return comm.all_reduce(1)


def test_a_failure_that_nobody_waited_for_is_raised_by_check(ranks):
    assert ranks.call(3, differ_unseen) == [3] * 3


def test_structured_dtypes_of_one_size_are_different(ranks):
    def differ(comm):
        fields = [("a", "i4"), ("b", "f4")] if comm.rank else [("a", "f4"), ("b", "i4")]
        told(comm, lambda comm: comm.broadcast(np.zeros(3, fields)))
        return afterwards(comm)

    assert ranks.call(2, differ) == [goes_on(2, is_broken=True)] * 2


def test_a_call_of_another_thread_that_has_just_ended_leaves_nothing_to_settle(monkeypatch):
    """Whoever came to a call then took new numbers, which no other rank did."""
    with gpucoll.init(rank=0, world_size=1) as comm:
        group = comm._group
        assert isinstance(group, HostGroup)
        sequence = int(group.context[Context.sequence])

        def end(group):
            group.context[Context.state] = State.IDLE
            return False

        group.context[Context.state] = State.BUSY
        monkeypatch.setattr(HostGroup, "is_running", property(end))
        group.check_usable()

        assert int(group.context[Context.sequence]) == sequence


def test_a_call_that_has_not_noticed_yet_that_it_was_given_up_is_no_other_threads(monkeypatch):
    """The process was stopped: its compiled thread has not run since."""
    with gpucoll.init(rank=0, world_size=1) as comm:
        group = comm._group
        assert isinstance(group, HostGroup)
        monkeypatch.setattr(group.started_calls(), "settle", lambda: False)
        comm.abort()
        group.context[Context.state] = State.BUSY
        with pytest.raises(AbortedError):
            group.check_usable()
        group.context[Context.state] = State.NEEDS_PYTHON
        monkeypatch.undo()
