"""The queue of asynchronous calls by itself: what Python runs, without ranks."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import Any

import pytest

from gpucoll.calls.work import Work
from gpucoll.calls.work_queue import WorkQueue
from gpucoll.errors import ArgumentError, ArgumentTypeError, DeadlineError, StateError


class Alone:
    """A group that runs nothing, and counts why Python alone may start calls."""

    failure = None
    needs_settling = False

    def __init__(self):
        self.n_reasons = 0

    def hold(self, n_reasons):
        self.n_reasons = n_reasons


@pytest.fixture
def group():
    return Alone()


@pytest.fixture
def queue(group):
    return WorkQueue(group)


def returns(value: Any) -> tuple[Any, ...]:
    """Return what `submit` takes for a call that gives `value`."""
    return (lambda: None, "a call", lambda: value)


def test_a_thread_that_cannot_start_leaves_the_queue_empty(group, queue, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            queue.submit(*returns(1))

    assert not queue.is_busy
    assert queue.submit(*returns(2)).wait(10.0) == 2
    queue.stop(10.0)
    assert group.n_reasons == 0


def test_the_queue_lets_go_of_a_result(queue, monkeypatch):
    class Result:
        pass

    gone = threading.Event()

    def make():
        result = Result()
        monkeypatch.setattr(Result, "__del__", lambda self: gone.set(), raising=False)
        return result

    work = queue.submit(lambda: None, "call", make)
    assert isinstance(work.wait(10.0), Result)
    del work

    assert gone.wait(10.0)
    queue.stop(10.0)


def test_a_forked_child_does_not_wait_for_the_parents_work(queue):
    work: Any = Work(queue, "call", None)
    child = os.fork()
    if child == 0:
        try:
            work.wait()
        except StateError:
            os._exit(7)
        os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_waits_for_no_lock_of_its_parent(queue):
    is_locked, goes_on = threading.Event(), threading.Event()

    def keep_the_lock():
        with queue._changed:
            is_locked.set()
            goes_on.wait(10.0)

    thread = threading.Thread(target=keep_the_lock)
    thread.start()
    is_locked.wait(10.0)
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # ends a child that waits
        queue.let_go()
        os._exit(7)
    goes_on.set()
    thread.join()

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_work_waits_no_longer_than_asked_and_then_goes_on(group, queue):
    go_on = threading.Event()
    work = queue.submit(lambda: go_on.wait(20), "a call", lambda: True)

    with pytest.raises(DeadlineError, match=r"a call was not done after 0.01 s .* it goes on"):
        work.wait(0.01)
    assert not work.done()
    assert work.exception() is None
    with pytest.raises(DeadlineError, match="1 asynchronous calls had not ended"):
        queue.stop(0.01)
    assert group.n_reasons == 1
    go_on.set()
    assert work.wait(20) is True
    queue._thread.join(20)
    assert group.n_reasons == 0


@pytest.mark.parametrize("limit_s", [float("inf"), 1e30, 0])
def test_a_work_waits_as_long_as_asked(queue, limit_s):
    work: Any = queue.submit(*returns(5))
    queue.stop(float("inf"))
    assert work.wait(limit_s) == 5


@pytest.mark.parametrize(
    ("limit_s", "kind"),
    [("1", ArgumentTypeError), (-1, ArgumentError), (float("nan"), ArgumentError)],
)
def test_a_work_refuses_what_is_no_time(queue, limit_s, kind):
    go_on = threading.Event()
    work = queue.submit(lambda: go_on.wait(20), "a call")
    with pytest.raises(kind, match="timeout_s must be"):
        work.wait(limit_s)
    go_on.set()
    queue.stop(20)


def test_a_queue_runs_in_order_and_keeps_a_failure_that_nobody_saw(queue):
    order: list[Any] = []

    def fail():
        order.append("fail")
        raise KeyError("lost")

    works = [queue.submit(partial(order.append, place), "") for place in range(20)]
    failing = queue.submit(fail, "f")
    last = queue.submit(lambda: None, "l", lambda: "last")

    assert last.wait(20) == "last"
    assert order == [*range(20), "fail"]
    assert all(work.done() for work in works)
    with pytest.raises(KeyError, match="lost"):
        queue.raise_unseen()
    queue.raise_unseen()
    assert repr(failing) == "<Work f: failed: KeyError>"
    queue.stop(20)


def test_what_runs_is_run_by_whoever_waits_where_nobody_does(queue):
    """Else by the queue's own thread: by nobody twice."""
    threads: list[int] = []
    works = [queue.submit(lambda: threads.append(threading.get_ident()), "") for _ in range(50)]
    for work in works:
        work.wait(20)
    assert len(threads) == 50
    assert set(threads) <= {threading.get_ident(), queue._thread.ident}
    queue.stop(20)


def test_what_is_held_begins_at_the_end_of_that(queue):
    order = []
    with queue.held():
        work = queue.submit(lambda: order.append("started"), "a call")
        with pytest.raises(DeadlineError):
            work.wait(0.01)
        order.append("held")
    work.wait(20)
    assert order == ["held", "started"]
    queue.stop(20)


def test_a_failing_finish_is_the_calls_failure(queue):
    def finish():
        raise ValueError("no room")

    work = queue.submit(lambda: None, "a call", finish)
    with pytest.raises(ValueError, match="no room"):
        work.wait(20)
    with pytest.raises(ValueError, match="no room"):
        work.wait()
    queue.stop(20)
