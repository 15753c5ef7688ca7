"""The queue of asynchronous calls by itself."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from gpucoll.calls.work import Work, WorkQueue
from gpucoll.errors import StateError


def test_a_thread_that_cannot_start_leaves_the_queue_empty(monkeypatch):
    counts: list[int] = []
    queue = WorkQueue(counts.append)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            queue.submit(lambda: 1, "first")

    assert not queue.is_busy
    assert queue.submit(lambda: 2, "second").wait(10.0) == 2
    queue.stop(10.0)
    assert counts[-1] == 0


def test_the_queue_lets_go_of_a_result(monkeypatch):
    class Result:
        pass

    gone = threading.Event()
    queue = WorkQueue(lambda count: None)

    def make():
        result = Result()
        monkeypatch.setattr(Result, "__del__", lambda self: gone.set(), raising=False)
        return result

    work = queue.submit(make, "call")
    assert isinstance(work.wait(10.0), Result)
    del work

    assert gone.wait(10.0)
    queue.stop(10.0)


def test_a_forked_child_does_not_wait_for_the_parents_work():
    work = Work(lambda: None, "call")
    child = os.fork()
    if child == 0:
        try:
            work.wait()
        except StateError:
            os._exit(7)
        os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_waits_for_no_lock_of_its_parent():
    queue = WorkQueue(lambda count: None)
    is_locked, goes_on = threading.Event(), threading.Event()

    def keep_the_lock():
        with queue._condition:
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
