"""Asynchronous calls and plans, alone and among plain calls."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.messages import until

from gpucoll.calls.work import Work, WorkQueue
from gpucoll.errors import ArgumentError, ArgumentTypeError, DeadlineError, MismatchError


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


@pytest.mark.parametrize("limit_s", [float("inf"), 1e30, 0])
def test_a_work_waits_as_long_as_asked(limit_s):
    queue = WorkQueue(lambda count: None)
    work = queue.submit(lambda: 5, "a call")
    queue.stop(float("inf"))
    assert work.wait(limit_s) == 5


@pytest.mark.parametrize(
    ("limit_s", "kind"),
    [("1", ArgumentTypeError), (-1, ArgumentError), (float("nan"), ArgumentError)],
)
def test_a_work_refuses_what_is_no_time(limit_s, kind):
    go_on = threading.Event()
    queue = WorkQueue(lambda count: None)
    work = queue.submit(lambda: go_on.wait(20), "a call")
    with pytest.raises(kind, match="timeout_s must be"):
        work.wait(limit_s)
    go_on.set()
    queue.stop(20)


@pytest.mark.ranks(2)
def test_a_failure_that_comes_while_the_next_call_waits_is_raised_by_that_call(comm):
    """On every rank by the same call, however late the failure is there."""
    queue = comm._queue
    if comm.rank == 1:  # here the asynchronous call begins when the next one waits behind it
        queue.submit(lambda: until(lambda: len(queue._waiting) == 2), "the one before")
    work = comm.all_reduce(np.ones(2 + comm.rank), async_op=True)
    if comm.rank == 0:  # here it has failed before the next one
        queue.submit(lambda: None, "the one after").wait(20)
    with pytest.raises(MismatchError, match=r"rank 1 called all_reduce\(op=sum, float64, shape"):
        comm.all_reduce(np.full(1, 7.0))
    assert work.done()
    assert comm.all_reduce(1) == 2


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
