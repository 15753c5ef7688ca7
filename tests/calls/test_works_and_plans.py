"""Asynchronous calls and plans, alone and among plain calls."""

from __future__ import annotations

import itertools

import numpy as np
import pytest


@pytest.mark.ranks(3)
def test_a_plan_is_called_again_and_again(comm):
    x, out = np.empty(100), np.empty(100)
    plan = comm.plan_all_reduce(x, "max", out=out)
    assert plan.out is out
    for turn in range(200):
        x[:] = turn * (comm.rank + 1)
        assert plan() is out
        assert out[-1] == turn * comm.world_size
    own = comm.plan_all_reduce(x)
    assert own() is own.out
    assert own.out is not x


@pytest.mark.ranks(2)
def test_works(comm):
    x = np.ones(1000)
    work = comm.all_reduce(x, async_op=True)
    assert repr(work).startswith("<Work all_reduce")
    result = work.wait()
    sent = comm.broadcast(x * comm.rank, root=1, async_op=True)
    assert repr(work) == "<Work all_reduce: done>"
    assert work.done()
    assert work.exception() is None
    assert work.wait() is result
    assert result[0] == 2.0
    assert sent.wait(10)[0] == 1.0
    assert comm.all_reduce(5, async_op=True).wait() == 10


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.ranks(2, 3, 4)
def test_ranks_may_go_different_ways(comm, is_shared):
    """Each rank makes the same calls in a way of its own."""
    ways = itertools.cycle(
        ["plain", "plan", "asynchronous", "in place", "new"][comm.rank :]
        + ["plain", "plan", "asynchronous", "in place", "new"][: comm.rank]
    )
    for turn in range(40):
        count = (3, 300, 3000, 20_000)[turn % 4]
        x = comm.empty(count) if is_shared and (turn + comm.rank) % 3 else np.empty(count, "f4")
        out = comm.empty(count) if is_shared and turn % 2 else np.empty(count, "f4")
        x[:] = turn + comm.rank
        way = next(ways)
        if way == "plain":
            result = comm.all_reduce(x, out=out)
        elif way == "plan":
            result = comm.plan_all_reduce(x, out=out)()
        elif way == "asynchronous":
            result = comm.all_reduce(x, out=out, async_op=True).wait()
        elif way == "in place":
            result = comm.all_reduce(x, out=x)
        else:
            result = comm.all_reduce(x)
        first = turn * comm.world_size + comm.world_size * (comm.world_size - 1) // 2
        assert (result == first).all(), (turn, way)


@pytest.mark.ranks(2, 3)
def test_blocking_calls_wait_for_their_turn(comm):
    """They queue behind asynchronous ones; all take effect in the order issued."""
    P = comm.world_size  # noqa: N806
    x = np.full(5000, 1.0)
    works = [comm.all_reduce(x, out=x, async_op=True) for _ in range(10)]
    blocking = comm.all_reduce(x, "avg")
    assert blocking[0] == P**10
    assert all(work.done() for work in works)
    works[0].synchronize()
    comm.barrier()
    small = np.ones(3)
    more = [comm.all_reduce(small, out=small, async_op=True) for _ in range(50)]
    plan = comm.plan_all_reduce(small, out=small)
    plan()
    assert more[-1].wait() is small
    assert small[0] == float(P) ** 51
