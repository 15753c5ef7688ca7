"""The queue of asynchronous calls by itself: what Python runs, without ranks."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import Any

import pytest
from tests.waiting import until

from gpucoll.calls import work_queue
from gpucoll.calls.work import Work
from gpucoll.calls.work_queue import WorkQueue
from gpucoll.errors import (
    AbortedError,
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    GpucollError,
    PeerLostError,
    StateError,
)
from gpucoll.transport.shared.layout import Abort


class Alone:
    """A group that runs nothing, and counts why Python alone may start calls."""

    rank, world_size = 0, 1
    needs_settling = is_closed = is_forked = was_told = is_in_use = is_aborted = False
    was_interrupted = is_in_collective = False

    def __init__(self):
        self.n_reasons = 0
        self.failure: GpucollError | None = None

    def hold(self, n_reasons):
        self.n_reasons = n_reasons

    def abort(self, code=Abort.REQUESTED):
        self.is_aborted = True
        self.was_interrupted = code == Abort.INTERRUPTED

    def end_calls(self):
        return True

    def abort_error(self):
        return AbortedError("interrupted" if self.was_interrupted else "given up")

    def raise_if_aborted(self):
        if self.is_aborted:
            self.failure = self.failure or self.abort_error()
            raise self.failure


@pytest.fixture
def group():
    return Alone()


@pytest.fixture
def queue(group):
    made = WorkQueue(group)
    yield made
    made.end()
    assert made._thread is None or not made._thread.is_alive()
    assert not group.is_in_use


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
    until(lambda: group.n_reasons == 0)  # the queue's thread says so after the call's end


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


def test_a_work_waits_no_longer_than_asked_and_then_goes_on(queue):
    go_on = threading.Event()
    work = queue.submit(lambda: go_on.wait(20), "a call", lambda: True)

    with pytest.raises(DeadlineError, match=r"a call was not done after 0.01 s .* it goes on"):
        work.wait(0.01)
    assert not work.done()
    assert work.exception() is None
    go_on.set()
    assert work.wait(20) is True


def test_what_has_not_ended_when_it_stops_is_given_up(group, queue):
    """As all ranks are told: the call that runs notices, the one behind it never begins."""
    ran: list[int] = []

    def run():
        until(lambda: group.is_aborted)
        raise group.abort_error()

    work = queue.submit(run, "a call")
    behind = queue.submit(lambda: ran.append(1), "another")
    with pytest.raises(DeadlineError, match="2 asynchronous calls had not ended"):
        queue.stop(0.01)
    for given_up in (work, behind):
        with pytest.raises(AbortedError):
            given_up.wait(20)
    queue.end()
    assert not ran
    assert not queue._thread.is_alive()
    assert group.n_reasons == 0


def test_who_does_not_notice_the_end_keeps_the_memory(group, queue, monkeypatch):
    """A call that hangs in somebody else's code; nobody waits for it for ever."""
    monkeypatch.setattr(work_queue, "ENDING_S", 0.01)
    goes_on = threading.Event()
    queue.submit(lambda: goes_on.wait(20), "a call")
    until(lambda: queue._turn.locked())
    queue.end()
    assert group.is_in_use
    group.is_in_use = False
    goes_on.set()
    queue._thread.join(20)


def interrupted():
    raise KeyboardInterrupt


def test_an_interrupt_is_raised_once(queue):
    """By whoever ran the call; its Work says what became of it, and close says nothing."""
    with queue.held():  # by who waits, not by the queue's own thread
        work = queue.submit(interrupted, "a call")
        with pytest.raises(KeyboardInterrupt):
            work.wait()
    queue.raise_unseen()
    with pytest.raises(AbortedError, match="interrupted"):
        work.wait()
    queue.stop(20)
    queue.raise_unseen()


def test_a_call_whose_end_was_interrupted_is_not_made_again(group, queue, monkeypatch):
    made: list[int] = []
    with queue.held():
        work = queue.submit(lambda: made.append(1), "a call")
        with monkeypatch.context() as patched:
            patched.setattr(queue, "_end", lambda *_: interrupted())
            with pytest.raises(KeyboardInterrupt):
                work.wait()
        with pytest.raises(AbortedError, match="interrupted"):
            work.wait()
    assert made == [1]
    assert group.is_aborted  # whether it has taken place is not known here


def test_a_failure_is_raised_by_one_call_only(group, queue):
    """What has broken the communicator ends all that is pending: the first to say so is enough."""
    group.failure = PeerLostError("rank 1 is gone")

    def fail():
        raise group.failure

    with queue.held():
        works = [queue.submit(fail, "a call") for _ in range(3)]
    queue.stop(20)
    with pytest.raises(PeerLostError):
        works[1].wait()
    queue.raise_unseen()


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
