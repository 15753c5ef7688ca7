"""Asynchronous calls: a `Work` for the user, a queue with one thread for the communicator."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from gpucoll.config import check_timeout_s
from gpucoll.errors import ArgumentTypeError, DeadlineError, StateError

_R = TypeVar("_R", covariant=True)
_Task = Callable[[], Any]


class Work(Generic[_R]):
    """A call that was started with ``async_op=True``.

    It owns input and output until it is done: neither may be touched before. A failed Work that
    nobody waits for is raised at the communicator's next call, or at close.
    """

    def __init__(self, task: Callable[[], _R], name: str) -> None:
        self._task = task
        self._name = name
        self._finished = threading.Event()
        self._result: _R
        self._error: BaseException | None = None
        self._was_seen = False
        self._process = os.getpid()

    def wait(self, timeout_s: float | None = None) -> _R:
        """Wait until the call is done and return its result, or raise its error.

        Parameters
        ----------
        timeout_s : float, optional
            How long to wait here, in seconds; the call itself has its own deadline and goes on.
            Default: until the call's deadline has ended it.
        """
        if os.getpid() != self._process and not self._finished.is_set():
            raise StateError(f"{self._name} belongs to the process that this one was forked from")
        if timeout_s != 0:  # which only looks
            check_timeout_s(timeout_s, may_be_endless=True)  # the call has its own deadline
        limit_s = None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)
        if not self._finished.wait(limit_s):
            raise DeadlineError(
                f"{self._name} was not done after {timeout_s:g} s of waiting for its Work; "
                "it goes on"
            )
        self._was_seen = True
        if self._error is not None:
            raise self._error
        return self._result

    def synchronize(self) -> None:
        """Certify that the call has succeeded; on the host the same as `wait`."""
        self.wait()

    def done(self) -> bool:
        """Return whether the call has ended, well or not. Does not wait."""
        return self._finished.is_set()

    def exception(self) -> BaseException | None:
        """Return the call's error; None while it runs or where it went well. Does not wait."""
        if self._finished.is_set():
            self._was_seen = True
        return self._error

    def _run(self) -> None:
        try:
            self._result = self._task()
        except BaseException as error:
            self._error = error
        finally:
            del self._task  # lets go of the arrays
            self._finished.set()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        del self._task
        self._finished.set()

    def __reduce__(self) -> Any:
        raise ArgumentTypeError("a Work belongs to its process and cannot be pickled")

    def __repr__(self) -> str:
        if not self._finished.is_set():
            return f"<Work {self._name}: not done>"
        state = "done" if self._error is None else f"failed: {type(self._error).__name__}"
        return f"<Work {self._name}: {state}>"


_queues: weakref.WeakSet[WorkQueue] = weakref.WeakSet()


class WorkQueue:
    """Runs calls in the order issued, in a thread that exists from the first of them on.

    Parameters
    ----------
    on_change : callable
        Called with the number of works that are waiting, running, or failed without being seen.
    """

    def __init__(self, on_change: Callable[[int], None]) -> None:
        self._on_change = on_change
        self._condition = threading.Condition()
        self._waiting: deque[Work[Any]] = deque()
        self._unfinished = 0
        self._failed: list[Work[Any]] = []
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._last: Work[Any] | None = None
        self._n_held = 0
        _queues.add(self)

    def submit(
        self, task: _Task, name: str, on_work: Callable[[Work[Any]], None] | None = None
    ) -> Work[Any]:
        """Queue a task and return its Work, which `on_work` gets before the task can run."""
        work = Work(task, name)
        if on_work is not None:
            on_work(work)
        with self._condition:
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="gpucoll", daemon=True)
                thread.start()  # may fail: nothing is queued then
                self._thread = thread
            self._waiting.append(work)
            self._last = work
            self._unfinished += 1
            self._tell()
            self._condition.notify_all()
        return work

    @property
    def is_busy(self) -> bool:
        """Whether a task is waiting or running."""
        return self._unfinished > 0

    def is_last(self, work: Work[Any] | None) -> bool:
        """Return whether nothing was queued after this work, which has not ended."""
        return work is not None and work is self._last

    def complete(self, work: Work[Any]) -> None:
        """End a Work that was not queued itself, by its task."""
        work._run()
        self._note_failure(work)

    def fail(self, work: Work[Any], error: BaseException) -> None:
        """End a Work that was not queued itself, with an error."""
        work._fail(error)
        self._note_failure(work)

    def hold(self, is_held: bool) -> None:
        """Keep compiled entries from running calls at once, or let them again: see `group`."""
        with self._condition:
            self._n_held = int(is_held)
            self._tell()

    def _note_failure(self, work: Work[Any]) -> None:
        if work._error is not None:
            with self._condition:
                self._failed.append(work)
                self._tell()

    def raise_unseen(self) -> None:
        """Raise the first failure that nobody has asked for; forget the others."""
        with self._condition:
            failed = [work for work in self._failed if not work._was_seen]
            self._failed = []
            self._tell()
        if failed:
            failed[0].wait()

    def stop(self, timeout_s: float) -> None:
        """Wait until every task has ended, and end the thread; DeadlineError where one has not."""
        limit_s = min(timeout_s, threading.TIMEOUT_MAX)
        with self._condition:
            ended = self._condition.wait_for(lambda: self._unfinished == 0, limit_s)
            self._is_stopping = True
            self._condition.notify_all()
        if not ended:
            raise DeadlineError(f"{self._unfinished} asynchronous calls had not ended at close")
        if self._thread is not None:
            self._thread.join()

    def let_go(self) -> None:
        """End the thread when every task has ended, without waiting for it."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify_all()

    def _tell(self) -> None:
        self._on_change(self._unfinished + len(self._failed) + self._n_held)

    def _serve(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._is_stopping)
                if not self._waiting:
                    return
                work = self._waiting.popleft()
            work._run()
            with self._condition:
                self._unfinished -= 1
                if self._last is work:
                    self._last = None
                if work._error is not None:
                    self._failed.append(work)
                self._tell()
                self._condition.notify_all()
            del work  # its result belongs to the user alone now


def _forget_in_child() -> None:
    """Let a forked child drop what it cannot use: the parent's thread may hold the lock there."""
    for queue in list(_queues):
        queue._condition = threading.Condition()


os.register_at_fork(after_in_child=_forget_in_child)
