"""Asynchronous calls and plans, alone and among plain calls."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from gpucoll.errors import DeadlineError
from gpucoll.work import Work, WorkQueue


def plan_often(comm):
    x, out = np.empty(100), np.empty(100)
    plan = comm.plan_all_reduce(x, "max", out=out)
    right = plan.out is out
    for turn in range(200):
        x[:] = turn * (comm.rank + 1)
        right = right and plan() is out and out[-1] == turn * comm.world_size
    own = comm.plan_all_reduce(x)
    return right, own() is own.out, own.out is not x


def test_a_plan_is_called_again_and_again(ranks):
    assert ranks.call(3, plan_often) == [(True, True, True)] * 3


def follow_works(comm):
    x = np.ones(1000)
    work = comm.all_reduce(x, async_op=True)
    text_before = repr(work)
    result = work.wait()
    sent = comm.broadcast(x * comm.rank, root=1, async_op=True)
    return (
        text_before.startswith("<Work all_reduce"),
        repr(work),
        work.done(),
        work.exception(),
        result[0],
        work.wait() is result,
        sent.wait(10)[0],
        comm.all_reduce(5, async_op=True).wait(),
    )


def test_works(ranks):
    expected = (True, "<Work all_reduce: done>", True, None, 2.0, True, 1.0, 10)
    assert ranks.call(2, follow_works) == [expected] * 2


def test_a_work_waits_no_longer_than_asked_and_then_goes_on():
    go_on = threading.Event()
    pending: list[int] = []
    queue = WorkQueue(pending.append)
    work = queue.submit(lambda: go_on.wait(20), "a call")

    with pytest.raises(DeadlineError, match=r"a call was not done after 0.01 s .* it goes on"):
        work.wait(0.01)
    assert not work.done()
    assert work.exception() is None
    with pytest.raises(DeadlineError, match="1 asynchronous calls had not ended"):
        queue.stop(0.01)
    go_on.set()
    assert work.wait(20) is True
    assert queue._thread is not None
    queue._thread.join(20)
    assert pending[0] == 1
    assert pending[-1] == 0


def test_a_queue_runs_in_order_and_keeps_a_failure_that_nobody_saw():
    order: list[Any] = []
    queue = WorkQueue(lambda count: None)

    def fail():
        order.append("fail")
        raise KeyError("lost")

    works = [queue.submit(partial(order.append, place), "") for place in range(20)]
    failing = queue.submit(fail, "f")
    last = queue.submit(lambda: "last", "l")

    assert isinstance(last, Work)
    assert last.wait(20) == "last"
    assert order == [*range(20), "fail"]
    assert all(work.done() for work in works)
    with pytest.raises(KeyError, match="lost"):
        queue.raise_unseen()
    queue.raise_unseen()
    assert repr(failing) == "<Work f: failed: KeyError>"
    queue.stop(20)


def mix_ways(comm, is_shared):
    """Each rank makes the same calls in a way of its own."""
    ways = itertools.cycle(
        ["plain", "plan", "asynchronous", "in place", "new"][comm.rank :]
        + ["plain", "plan", "asynchronous", "in place", "new"][: comm.rank]
    )
    results = []
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
        results.append(bool((result == first).all()))
    return results


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_may_go_different_ways(ranks, world_size, is_shared):
    for results in ranks.call(world_size, mix_ways, is_shared):
        assert all(results)


def pile_up(comm):
    """Blocking calls queue behind asynchronous ones; all take effect in the order issued."""
    x = np.full(5000, 1.0)
    works = [comm.all_reduce(x, out=x, async_op=True) for _ in range(10)]
    blocking = comm.all_reduce(x, "avg")
    done = [work.done() for work in works]
    works[0].synchronize()
    comm.barrier()
    small = np.ones(3)
    more = [comm.all_reduce(small, out=small, async_op=True) for _ in range(50)]
    plan = comm.plan_all_reduce(small, out=small)
    plan()
    return blocking[0], all(done), more[-1].wait() is small, small[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_blocking_calls_wait_for_their_turn(ranks, world_size):
    P = world_size  # noqa: N806
    for blocking, all_done, is_same, last in ranks.call(world_size, pile_up):
        assert (blocking, all_done, is_same) == (P**10, True, True)
        assert last == float(P) ** 51
