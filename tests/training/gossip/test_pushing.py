"""Push-sum: the mass is conserved to the last bit, and that of dead ranks is known by name."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.ranks import Ended

from gpucoll.errors import ArgumentError, ArgumentTypeError, MismatchError, PeerLostError
from gpucoll.training.gossip import PushSum, push_sum, pushing

WHOLE = 1 << 40
"""A weight that stays an int."""


def targets(step, rank, n):
    """Return to whom a rank pushes in a step: any number of others, drawn by all ranks alike."""
    random = np.random.default_rng([step, rank])
    others = [other for other in range(n) if other != rank]
    return random.permutation(others)[: random.integers(0, n)].tolist()


def first_x(rank):
    return np.random.default_rng(rank).integers(-(10**12), 10**12, 5)


def oracle(n, steps):
    """Return the x and w of all ranks after each step, by Python's ints."""
    xs, ws = [first_x(rank).tolist() for rank in range(n)], [WHOLE] * n
    states = [(xs, ws)]
    for step in range(steps):
        pushed = [targets(step, rank, n) for rank in range(n)]
        parts = [[v // (len(to) + 1) for v in x] for x, to in zip(xs, pushed, strict=True)]
        given = [w // (len(to) + 1) for w, to in zip(ws, pushed, strict=True)]
        xs = [
            [v - p * len(to) for v, p in zip(x, part, strict=True)]
            for x, part, to in zip(xs, parts, pushed, strict=True)
        ]
        ws = [w - part * len(to) for w, part, to in zip(ws, given, pushed, strict=True)]
        for rank, to in enumerate(pushed):
            for other in to:
                xs[other] = [v + p for v, p in zip(xs[other], parts[rank], strict=True)]
                ws[other] += given[rank]
        states.append((xs, ws))
    return states


@pytest.mark.parametrize("n", [1, 2, 5])
def test_each_step_is_the_oracles(ranks, n):
    steps = 8

    def on_each(comm):
        x, seen = first_x(comm.rank), []
        w: float = WHOLE
        for step in range(steps):
            x, w = push_sum(comm, x, w, targets(step, comm.rank, n))
            seen.append((x.tolist(), w))
        return seen

    results = ranks.call(n, on_each)

    total = sum(first_x(rank) for rank in range(n)).tolist()
    for step, (xs, ws) in enumerate(oracle(n, steps)[1:]):
        assert [result[step] for result in results] == list(zip(xs, ws, strict=True))
        assert np.sum(xs, axis=0).tolist() == total
        assert sum(ws) == n * WHOLE


@pytest.mark.ranks(4)
def test_every_rank_comes_to_the_mean(comm):
    state = PushSum(comm, np.array([float(comm.rank), 1.0]))

    for step in range(60):
        state.push(to=(comm.rank + 2 ** (step % 2)) % 4)

    assert state.mean.tolist() == [1.5, 1.0]  # by halves alone: exact
    assert state.weights == (1.0,) * 4
    assert state.steps == 60


@pytest.mark.ranks(3)
def test_floats_are_conserved_up_to_rounding(comm):
    x, w = np.full(3, 1.0 + comm.rank), 1.0
    for step in range(20):
        others = [other for other in range(3) if other != comm.rank][: 1 + step % 2]
        assert push_sum(comm, x, w, others, out=x)[0] is x
        w = float(push_sum(comm, np.zeros(1), w, others)[1])
    # a step rounds what a rank has, at most 6, by a division, a product, a difference and two sums
    allowed = 20 * 3 * 5 * 6 * np.finfo(float).eps
    assert abs(comm.all_reduce(x) - 6.0).max() < allowed
    assert abs(comm.all_reduce(w) - 3.0) < allowed


# --- losses ---------------------------------------------------------------------------------------


def push_until_lost(comm, deaths, steps):
    """Push, dying in a given step; go on with the survivors. Return what is seen after each loss.

    A death is (step, how many of its messages the rank has sent).
    """
    n, names, seen = comm.world_size, tuple(range(comm.world_size)), []
    state = PushSum(comm, first_x(comm.rank), WHOLE)
    while state.steps < steps:
        me, step = names[comm.rank], state.steps
        to = [names.index(other) for other in targets(step, me, n) if other in names]
        try:
            if me in deaths and step == deaths[me][0]:
                die_after(deaths[me][1], state, to)
            state.push(to)
        except PeerLostError:
            comm = comm.shrink()
            lost = state.resume(comm)
            lost = {names[rank]: w for rank, w in lost.items()}
            names = tuple(names[former] for former in comm.former_ranks)
            seen.append((state.steps, lost, names, state.x.tolist(), state.w, state.weights))
    result = state.x.tolist(), state.w, seen
    comm.barrier()
    comm.close()
    return result


def die_after(messages, state, to):
    def some_of(comm, x, sources, destinations, tag, timeout_s):
        del sources, timeout_s
        for rank in destinations[:messages]:
            comm.send(x, rank, tag, synchronous=True)
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(pushing, "exchange", some_of):
        state.push(to)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("sent", [0, 1, 2, 3])
@pytest.mark.parametrize("victim", [0, 3])
def test_the_mass_of_a_killed_rank_is_named(rank_server, victim, sent):
    n, fatal, steps = 5, 4, 9
    with rank_server.fork(n) as pool:
        pool.start(push_until_lost, {victim: (fatal, sent)}, steps)
        answers = pool.collect()

    assert isinstance(answers[victim], Ended)
    results = [answer.result for answer in answers if not isinstance(answer, Ended)]
    names = tuple(rank for rank in range(n) if rank != victim)
    (resumed,) = {result[2][0][0] for result in results}
    if sent < len(
        targets(fatal, victim, n)
    ):  # else all may have what it pushed, and count the step
        assert resumed == fatal
    xs, ws = oracle(n, fatal + 1)[resumed]
    for rank, (_, _, seen) in zip(names, results, strict=True):
        ((_, lost, names_seen, x, w, weights),) = seen
        assert lost == {victim: ws[victim]}
        assert names_seen == names
        assert (x, w) == (xs[rank], ws[rank])
        assert weights == tuple(ws[name] for name in names)
    total = sum(first_x(rank) for rank in range(n))
    left_x = np.sum([x for x, _, _ in results], axis=0)
    assert (left_x + xs[victim]).tolist() == total.tolist()
    assert sum(w for _, w, _ in results) + ws[victim] == n * WHOLE


def test_two_losses_one_after_the_other(rank_server):
    n, steps = 5, 9
    with rank_server.fork(n) as pool:
        pool.start(push_until_lost, {1: (2, 1), 4: (6, 0)}, steps)
        answers = pool.collect()

    results = [answers[rank].result for rank in (0, 2, 3)]
    first, second = zip(*(seen for _, _, seen in results), strict=True)
    assert {(step, tuple(lost)) for step, lost, *_ in first} == {(2, (1,))}
    assert {(step, tuple(lost)) for step, lost, *_ in second} == {(6, (4,))}
    lost = first[0][1][1] + second[0][1][4]
    assert sum(w for _, w, _ in results) + lost == n * WHOLE


# --- bad input ------------------------------------------------------------------------------------

BAD: dict[str, Any] = {
    "not there": (np.ones(2), 1.0, [3], "to names rank 3; there are ranks 0 to 2"),
    "itself": (np.ones(2), 1.0, 1, "to names rank 1 itself"),
    "twice": (np.ones(2), 1.0, [0, 2, 0], "to names rank 0 twice"),
    "word": (np.ones(2), 1.0, ["0"], "to must name ranks by ints; got '0'"),
    "none": (np.ones(2), 1.0, None, "to must be a rank or several; got None"),
    "w": (np.ones(2), np.nan, [0], "w must be a finite number; got nan"),
    "w None": (np.ones(2), None, [0], "w must be a finite number; got None"),
    "list": ([1.0, 1.0], 1.0, [0], "x must be an array that can be computed with; got list"),
    "unsigned": (np.ones(2, "u4"), 1.0, [0], "x has dtype uint32; push_sum works on"),
    "shape": (np.ones(3), 1.0, [0], r"float64 of shape \(3,\)"),
    "dtype": (np.ones(2, "f4"), 1.0, [0], r"float32 of shape \(2,\)"),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_of_one_rank_are_an_error_on_all(comm, name):
    x, w, to, text = BAD[name] if comm.rank == 1 else (np.ones(2), 1.0, [1], BAD[name][3])

    with pytest.raises((ArgumentError, ArgumentTypeError, MismatchError), match=text):
        push_sum(comm, x, w, to)

    assert comm.all_reduce(1) == 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "out", [np.ones(3), np.ones(2, "f4"), [0, 0], np.broadcast_to(np.ones(1), 2)], ids=str
)
def test_an_out_that_does_not_fit(comm, out):
    with pytest.raises((ArgumentTypeError, MismatchError), match="out must be a writable array"):
        push_sum(comm, np.ones(2), 1.0, [], out=out if comm.rank else None)
    assert comm.all_reduce(1) == 2


@pytest.mark.ranks(2)
def test_resume_needs_what_shrink_returned(comm):
    state = PushSum(comm, np.ones(2))
    with pytest.raises(ArgumentError, match="needs the communicator that shrink returned"):
        state.resume(comm)
    assert state.w == 1
