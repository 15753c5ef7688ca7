"""The Work: a user's handle of an asynchronous call."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from gpucoll.config import check_timeout_s
from gpucoll.errors import ArgumentTypeError, DeadlineError

if TYPE_CHECKING:
    import asyncio

_R = TypeVar("_R", covariant=True)
_callbacks_lock = threading.Lock()


class Queue(Protocol):
    """The queue that runs the calls of works."""

    def run_until(self, work: Work[object]) -> None:
        """Run calls until this one has ended, or until another thread has run it."""

    def sleep_until(self, work: Work[object], limit_s: float) -> bool:
        """Wait at most `limit_s` for a call that others run; return whether it has ended."""

    def poll(self, work: Work[object]) -> bool:
        """Return whether a call has ended. Does not wait."""

    def watch(self, work: Work[object]) -> None:
        """Let a thread of the queue find the end of a call."""


class Work(Generic[_R]):
    """A call that was started with ``async_op=True``.

    It owns input and output until it is done: the program may use neither before. `wait` raises the
    call's failure; the communicator's `check` and `close` raise failures that were never inspected.

    Works can be awaited (``await work``, in asyncio), watched by selectors (`fileno`), and waited
    for together: `gpucoll.wait_any`, `gpucoll.wait_all`.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_error",
        "_finish",
        "_is_done",
        "_keep",
        "_name",
        "_queue",
        "_result",
        "_was_seen",
        "number",
    )

    def __init__(
        self,
        queue: Queue,
        name: str,
        finish: Callable[[], object] | None,
        result: object = None,
        keep: object = None,
    ) -> None:
        self._queue = queue
        self._name = name
        self._finish = finish
        """Makes the result, once, after the call has ended."""
        self._result: Any = result
        self._keep = keep
        """An object to keep alive until the call has ended."""
        self._error: BaseException | None = None
        self._is_done = self._was_seen = False
        self._callbacks: list[Callable[[Any], object]] | None = None
        self.number = 0
        """Its number among the calls that compiled code runs; 0 if Python runs it."""

    def wait(self, timeout_s: float | None = None) -> _R:
        """Wait until the call is done and return its result, or raise its error.

        May be repeated, even after the communicator's `close`: every wait has the same outcome.

        Parameters
        ----------
        timeout_s : float, optional
            How long to wait here, in seconds. The call has its own deadline and goes on.
            Default: until the call's deadline has ended it.

        Raises
        ------
        DeadlineError
            The call was not done after `timeout_s`, or the call's own deadline has passed.
        MismatchError, PeerLostError, AbortedError
            The error of the call.
        """
        if not self._is_done:
            if timeout_s is None:
                self._queue.run_until(self)
            else:
                self._wait_at_most(timeout_s)
        self._was_seen = True
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[no-any-return]

    def _wait_at_most(self, timeout_s: float) -> None:
        if timeout_s != 0:  # 0 means: look only
            check_timeout_s(timeout_s, may_be_endless=True)  # the call has its own deadline
        if not self._queue.sleep_until(self, min(timeout_s, threading.TIMEOUT_MAX)):
            raise DeadlineError(
                f"{self._name} was not done after {timeout_s:g} s of waiting for its Work; "
                "it goes on"
            )

    def synchronize(self) -> None:
        """Certify that the call has succeeded; for host arrays the same as `wait`."""
        self.wait()

    def done(self) -> bool:
        """Return whether the call has ended, well or not. Does not wait."""
        return self._is_done or self._queue.poll(self)

    def exception(self) -> BaseException | None:
        """Return the call's error; None if there is none or the call still runs. Does not wait."""
        if self.done():
            self._was_seen = True
        return self._error

    def add_done_callback(self, function: Callable[[Work[_R]], object]) -> None:
        """Call ``function(work)`` when the call has ended, well or not.

        If it already has, the function is called at once, in this thread. Otherwise it is called in
        the thread that finds the call ended: one that waits for it, or for a later call, or one of
        gpucoll. The function should be short. It may start further calls, but must not wait for
        any. Its exceptions go to ``sys.unraisablehook`` and affect nothing else.
        """
        if not callable(function):
            raise ArgumentTypeError(f"add_done_callback needs a function; got {function!r}")
        with _callbacks_lock:
            self._callbacks = [*(self._callbacks or ()), function]
        if not self._has_ended():
            self._watch()
        if self._has_ended():
            self.call_back()

    def _has_ended(self) -> bool:
        """Return whether the end of the call was seen."""
        return self._is_done

    def _watch(self) -> None:
        """Let a thread of the queue find the end of the call."""
        self._queue.watch(self)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the call has ended.

        For ``selectors``, ``poll`` and ``loop.add_reader``; nothing need be read from it. The first
        call of this method opens the descriptor, every later call returns the same one, and the
        Work closes it. Raises OSError if the process has too many open files.
        """
        return _descriptors.of(self)

    def __await__(self) -> Generator[object, None, _R]:
        """Wait in an asyncio task, while other tasks run."""
        if not self.done():
            import asyncio

            loop = asyncio.get_running_loop()
            ended = loop.create_future()

            def note(work: Work[object]) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_set, ended)

            self.add_done_callback(note)
            yield from ended
        return self.wait()

    # --- for the queue ----------------------------------------------------------------------------

    def end(self, error: BaseException | None = None) -> None:
        """Note how the call has ended, with an error or without; release what was kept for it."""
        if self._is_done:
            return
        finish, self._finish = self._finish, None
        if error is None and finish is not None:
            try:
                self._result = finish()
            except BaseException as raised:
                error = raised
        self._error = error
        self._keep = None
        self._is_done = True

    def call_back(self) -> None:
        """Call the callbacks, once."""
        with _callbacks_lock:
            callbacks, self._callbacks = self._callbacks, None
        for function in callbacks or ():
            _call_back(function, self)

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError("a Work belongs to its process and cannot be pickled")

    def __repr__(self) -> str:
        if not self._is_done:
            return f"<Work {self._name}: not done>"
        state = "done" if self._error is None else f"failed: {type(self._error).__name__}"
        return f"<Work {self._name}: {state}>"


def _call_back(function: Callable[[Work[object]], object], work: Work[object]) -> None:
    try:
        function(work)
    except Exception as error:
        raised: Any = SimpleNamespace(
            exc_type=type(error),
            exc_value=error,
            exc_traceback=error.__traceback__,
            err_msg=f"Exception ignored in the callback of {work!r}",
            object=function,
        )
        sys.unraisablehook(raised)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Descriptors:
    """The descriptors of those few works that have one."""

    def __init__(self) -> None:
        self._by_work: weakref.WeakKeyDictionary[Work[Any], int] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, work: Work[object]) -> int:
        with self._lock:
            if work in self._by_work:
                return self._by_work[work]
            # os.eventfd is not in Python's own stubs of every platform, nor on every platform.
            reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._by_work[work] = reading
        weakref.finalize(work, os.close, reading)
        end = _WriteEnd(writing)
        work.add_done_callback(lambda _: end.close())
        return reading


class _WriteEnd:
    """The write end of a pipe: closing it makes the read end readable."""

    def __init__(self, descriptor: int) -> None:
        self._finalize = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        self._finalize()


_descriptors = _Descriptors()
