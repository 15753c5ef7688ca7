"""PairwiseAverage: sums are conserved, nobody waits for a stopped rank, a lost one is an error."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
from tests.ranks import Ended
from tests.shrinking import die
from tests.waiting import is_stopped, until

from gpucoll.errors import (
    AbortedError,
    ArgumentError,
    ArgumentTypeError,
    MismatchError,
    PeerLostError,
    StateError,
)
from gpucoll.training.gossip import PairwiseAverage, consensus, push_sum, topology

ENOUGH = 30
"""Averages after which a rank has seen its partners often."""


def step_until(average, x, is_over, change=None):
    """Make steps until the condition holds, with a deadline."""
    state = [x]

    def once():
        state[0] = average.step(state[0] if change is None else change(state[0]))
        return is_over()

    until(once)
    return state[0]


def step_together(comm, average, x, change=None):
    """Make steps until every rank of `comm` has made enough averages, at its own pace."""
    before = average.averages
    x = step_until(average, x, lambda: average.averages - before >= ENOUGH, change)
    all_have = comm.all_reduce(1, async_op=True)
    x = step_until(average, x, all_have.done, change)
    all_have.wait()
    return x


# --- what comes out -------------------------------------------------------------------------------


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("size", [1, 1000, 200_000])
@pytest.mark.parametrize("dtype", ["int64", "int8"])
def test_integers_are_conserved_to_the_last_bit(ranks, dtype, size):
    def on_each(comm):
        before = np.random.default_rng(comm.rank).integers(-30, 30, size).astype(dtype)
        with PairwiseAverage(comm, before) as average:
            x = average.finish(step_together(comm, average, before.copy()))
            assert average.unanswered == ()
        return before.astype(int), x

    results = ranks.call(4, on_each)

    assert {x.dtype.name for _, x in results} == {dtype}
    total = sum(before for before, _ in results)
    assert (sum(x.astype(int) for _, x in results) == total).all()
    spread = np.ptp([x for _, x in results], axis=0)
    assert spread.max() <= 4  # equal up to the remainders of halving


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(
    "made", [None, topology.ring(4), topology.one_peer_exponential(4)], ids=str
)
def test_floats_come_to_the_mean(ranks, made):
    def on_each(comm):
        x = np.full(5, 2.0**comm.rank)
        with PairwiseAverage(comm, x, topology=made, seed=3) as average:
            before = consensus(comm, x)
            x = step_together(comm, average, x)
            x = average.finish(x)
            return before, consensus(comm, x), x.mean(), average.averages

    results = ranks.call(4, on_each)

    averages = sum(made for *_, made in results) / 2
    allowed = 8 * averages * np.finfo(float).eps  # two roundings in each average, of at most 8
    assert abs(sum(mean for _, _, mean, _ in results) - 15) < allowed
    for before, after, _, made_here in results:
        assert made_here >= ENOUGH
        assert after < before / 100


def test_a_rank_may_change_its_array_between_an_offer_and_the_answer(ranks):
    def on_each(comm):
        added = [0]

        def change(x):
            added[0] += 1
            return x + 1

        x = np.zeros(3, int)
        with PairwiseAverage(comm, x) as average:
            x = average.finish(step_together(comm, average, x, change))
        return added[0], x

    results = ranks.call(3, on_each)

    assert (sum(x for _, x in results) == sum(added for added, _ in results)).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("values", [(3, 8), (-8, 3), (0.0, 5.0)], ids=str)
def test_offers_that_cross_are_one_average(comm, values, size):
    x = np.full(size, values[comm.rank])
    with PairwiseAverage(comm, x) as average:
        x = average.step(x)
        comm.barrier()  # both have offered, and neither has seen the other's offer
        x = step_until(average, x, lambda: average.averages > 0)
        x = average.finish(x)
    assert np.ptp(x) == 0
    both = sorted(comm.all_gather(x[0]).tolist())
    assert sum(both) == sum(values)
    assert both[1] - both[0] == (0 if isinstance(values[0], float) else 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex64", "int16"])
def test_out_and_what_is_returned(comm, dtype):
    import ml_dtypes  # noqa: F401  (bfloat16)

    x = np.array([4.0 * comm.rank]).astype(dtype)
    pushed = push_sum(comm, x, 1.0, 1 - comm.rank)[0]
    assert (pushed.dtype, pushed.tolist()) == (x.dtype, [2])
    with PairwiseAverage(comm, x) as average:
        while not average.averages:
            assert average.step(x, out=x) is x
        assert average.finish(x, out=x) is x
        assert comm.all_reduce(x).tolist() == [4]
        with pytest.raises(StateError, match="is finished: make a new one"):
            average.step(x)


@pytest.mark.ranks(1)
def test_one_rank_alone(comm):
    x = np.arange(3.0)
    with PairwiseAverage(comm, x) as average:
        assert average.step(x) is x
        assert average.finish(x) is x
    average.close()


def test_between_hosts(hosts):
    def on_each(comm):
        x = np.full(30_000, 4 * comm.rank)
        with PairwiseAverage(comm, x) as average:
            return average.finish(step_together(comm, average, x))

    assert (sum(hosts.call("aab", on_each)) == 12).all()


# --- ranks that are stopped or lost ---------------------------------------------------------------

kept: dict[str, Any] = {}
"""In a rank: what it has between two calls."""
VICTIM, STEPS = 1, 400


def work_beside_a_stopped_rank(seat, size, placed=None):
    """Make steps; the victim stops itself, and the others go on for many averages and steps."""
    comm = kept["comm"] = seat.init()
    x = np.full(size, 1_000_003 * comm.rank)
    average = kept["average"] = PairwiseAverage(comm, x)
    pid = comm.all_gather(os.getpid())[VICTIM]
    others = comm.split(int(comm.rank == VICTIM))
    x = step_together(comm, average, x)
    if comm.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGSTOP)
        others.close()
        kept["x"] = x
        return None
    until(lambda: is_stopped(pid))
    steps, made, quiet, longest_quiet = average.steps, average.averages, 0, 0
    while average.steps - steps < STEPS:
        x = average.step(x)
        is_fresh = any(average.steps == offer.step for offer in average._offers.values())
        waits_only_for_it = average.unanswered == (VICTIM,)
        quiet = quiet + 1 if waits_only_for_it and not is_fresh else 0
        longest_quiet = max(quiet, longest_quiet)
    x = kept["x"] = step_together(others, average, x)
    others.close()
    return average.steps - steps, average.averages - made, longest_quiet, average.unanswered


def finish_and_add(seat):
    comm, average = kept.pop("comm"), kept.pop("average")
    x = average.finish(kept.pop("x"))
    late = average.unanswered
    average.close()
    total = comm.all_reduce(x)
    comm.close()
    return total, late


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("size", [100_000, 1])
def test_nobody_waits_for_a_stopped_rank(rank_server, size):
    n = 4
    others = [rank for rank in range(n) if rank != VICTIM]
    with rank_server.fork(n) as pool:
        pool.start(work_beside_a_stopped_rank, size, gives="seat")
        victim = pool.ranks[VICTIM].pid
        try:
            results = [answer.result for answer in pool.collect(only=others)]
            assert is_stopped(victim)  # and the others have made all of their steps
        finally:
            until(lambda: is_stopped(victim))
            os.kill(victim, signal.SIGCONT)
        pool.collect(only=[VICTIM])
        totals = pool.call(finish_and_add, gives="seat")

    for steps, averages, longest_quiet, unanswered in results:
        assert steps >= STEPS
        assert averages >= ENOUGH
        assert longest_quiet <= 8  # its patience: what the stopped rank has cost
        assert set(unanswered) <= {*range(n)}
    for total, late in totals:
        assert (total == 1_000_003 * (0 + 1 + 2 + 3)).all()
        assert late == ()


def average_for_long(comm, size):
    x = np.random.default_rng(comm.rank).integers(-(10**6), 10**6, size)
    before = comm.all_reduce(x)
    with PairwiseAverage(comm, x) as average:
        for _ in range(6):
            x = step_together(comm, average, x, lambda x: x[::-1].copy())
        x = average.finish(x)
    return before.sum(), x.sum()


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("size", [1, 2000, 100_000])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_are_stopped_at_random_moments(rank_server, seed, size):
    draw = random.Random(seed)
    with rank_server.fork(4) as pool:
        pool.start(average_for_long, size)
        for _ in range(40):
            victim = draw.choice(pool.ranks).pid
            os.kill(victim, signal.SIGSTOP)
            time.sleep(draw.uniform(0, 0.01))  # any moment will do
            os.kill(victim, signal.SIGCONT)
        results = pool.results()

    assert {before for before, _ in results} == {sum(after for _, after in results)}


def lose_a_partner(comm):
    """Make steps until the killed rank is noticed; go on with a new object of the survivors."""
    x = np.full(1000, 10 * comm.rank)
    average = PairwiseAverage(comm, x)
    x = step_together(comm, average, x)
    if comm.rank == VICTIM:
        die()
    with pytest.raises(PeerLostError, match=f"rank {VICTIM}"):
        step_until(average, x, lambda: False)
    average.close()
    left = comm.shrink()
    with PairwiseAverage(left, x) as average:
        before = left.all_reduce(x)
        x = average.finish(step_together(left, average, x))
        after = left.all_reduce(x)
    left.close()
    return (before == after).all()


def test_a_killed_partner_is_an_error_and_not_a_wait(rank_server):
    with rank_server.fork(3) as pool:
        pool.start(lose_a_partner)
        answers = pool.collect()

    assert isinstance(answers[VICTIM], Ended)
    assert all(answer.result for answer in answers if not isinstance(answer, Ended))


def leave_a_stopped_partner(comm, makes_offers):
    """Finish and close while a partner is stopped; the partner learns that the others are gone."""
    x = np.full(100_000, 10 * comm.rank)
    pid = comm.all_gather(os.getpid())[VICTIM]
    average = PairwiseAverage(comm, x)
    if comm.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises((PeerLostError, AbortedError)):
            step_until(average, x, lambda: False)
        average.close()
        return None
    until(lambda: is_stopped(pid))
    if makes_offers:
        x = step_until(average, x, lambda: VICTIM in average.unanswered)
    average.finish(x, timeout_s=0.2)
    late = average.unanswered
    average.close()
    if comm.rank == 0:
        os.kill(pid, signal.SIGCONT)
    return late


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("makes_offers", [False, True])
def test_finish_ends_without_a_stopped_partner(ranks, makes_offers):
    late = (VICTIM,) if makes_offers else ()
    assert ranks.call(2, leave_a_stopped_partner, makes_offers) == [late, None]


# --- bad input ------------------------------------------------------------------------------------


class OnGpu(np.ndarray):
    __cuda_array_interface__ = None


BAD: dict[str, Any] = {
    "list": ([1.0, 1.0], {}, "x must be an array that can be computed with; got list"),
    "unsigned": (np.ones(2, "u4"), {}, "x has dtype uint32; PairwiseAverage works on"),
    "gpu": (np.ones(2).view(OnGpu), {}, "x lies on a GPU: average a copy on the host"),
    "ranks": (np.ones(2), {"topology": topology.ring(4)}, "the topology is of 4 ranks"),
    "matrix": (np.ones(2), {"topology": np.eye(3)}, "must be one of gossip.topology; got ndarray"),
    "patience": (np.ones(2), {"patience": -1}, "patience must be an int from 0 up; got -1"),
    "shape": (np.ones(3), {}, r"float64 of shape \(3,\)"),
    "dtype": (np.ones(2, "f4"), {}, r"float32 of shape \(2,\)"),
    "other": (np.ones(2), {"topology": topology.ring(3)}, "topology"),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_of_one_rank_are_an_error_on_all(comm, name):
    x, given, text = BAD[name] if comm.rank == 1 else (np.ones(2), {}, BAD[name][2])

    with pytest.raises((ArgumentError, ArgumentTypeError, MismatchError), match=text):
        PairwiseAverage(comm, x, **given)

    assert comm.all_reduce(1) == 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("x", [np.ones(3), np.ones(2, "f4"), [1.0, 1.0]], ids=str)
def test_steps_take_what_the_object_was_made_for(comm, x):
    with PairwiseAverage(comm, np.ones(2)) as average:
        with pytest.raises((ArgumentError, ArgumentTypeError), match="PairwiseAverage on rank"):
            average.step(x)
        assert average.steps == 0
        average.finish(np.ones(2))
