"""The Work of a message that was begun with ``async_op=True``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

from gpucoll.backends.protocol import MessageRequest, Transfers
from gpucoll.calls.message import Message, received_message
from gpucoll.calls.work import Work
from gpucoll.config import check_timeout_s
from gpucoll.errors import ArgumentTypeError, DeadlineError, GpucollError, StateError
from gpucoll.transport.shared.words import Kind

_SEND, _TAKE = int(Kind.SEND), int(Kind.TAKE)
_R = TypeVar("_R", covariant=True)
Steps = Generator[list[MessageRequest], None, Any]
"""What a call does: yields the requests to wait for, and returns the call's result."""


class WorkOwner(Protocol):
    """What a `MessageWork` asks of the queue that it belongs to.

    Attributes
    ----------
    process : int
        In which works can go on.
    lock : RLock
        Held while what is known of a Work changes.
    """

    process: int
    lock: Any
    called: dict[MessageWork[Any], None]
    """Works that call somebody back."""
    check_received: Callable[[MessageWork[Any]], None]

    def start(self, requests: list[MessageRequest]) -> Transfers:
        """Begin what comes next in a Work."""

    def forget(self, work: MessageWork[Any]) -> None:
        """Note that a Work has ended."""

    def call_back(
        self, work: MessageWork[Any], functions: Sequence[Callable[[Any], object]]
    ) -> None:
        """Call what wants to know that a Work is done."""

    def watch(self, work: MessageWork[Any]) -> None:
        """Have the end of a Work found by a thread of the library's."""


class MessageWork(Work[_R]):
    """A send or receive that was started with ``async_op=True``.

    It owns its array until it is done: nobody else may touch it before. It makes progress whenever
    any message of its communicator is begun, waited for or asked about, whatever collectives do;
    one of more than 64 KiB while nobody does, too, in a compiled thread. A failure is raised by its
    own `wait`; one that nobody has asked for, by `Communicator.check` and `close`.
    """

    def __init__(
        self,
        queue: WorkOwner,
        name: str,
        transfers: Transfers | None,
        steps: Steps | None,
        result: Any = None,
    ) -> None:
        self._owner = queue
        self._name = name
        self._transfers = transfers
        self._steps = steps
        self._result = result
        self._error: BaseException | None = None
        self._is_done = False
        self._was_seen = False
        self._received_by: Sequence[Callable[[Any], object]] = ()
        """Whom to call at the end."""
        self._received: MessageRequest | None = None

    # --- as users see it --------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> _R:
        """Wait until the message was sent or received; return the result, or raise its error.

        Parameters
        ----------
        timeout_s : float, optional
            How long to wait here, in seconds; the message itself has its own deadline and goes on.
            Default: until that deadline.
        """
        if not self._is_done:
            self._wait(timeout_s)
        self._was_seen = True
        if self._error is not None:
            raise self._error
        result: _R = self._result
        return result

    def synchronize(self) -> None:
        """Certify that the message was sent or received; the same as `wait`."""
        self.wait()

    def done(self) -> bool:
        """Return whether it has ended, well or not. Takes messages a step further; never waits."""
        return self._is_done or self._look()

    def exception(self) -> BaseException | None:
        """Return the error; None while it goes on or where it went well. Does not wait."""
        if self.done():
            self._was_seen = True
        return self._error

    @property
    def message(self) -> Message | None:
        """What was received: source, tag, count and dtype; None before that, and of a send."""
        if not self.done() or self._error is not None or self._received is None:
            return None
        return received_message(self._received)

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Call ``function(work)`` when it is done: at once where it is.

        By the thread that finds it done: one that waits or asks, begins another message, checks or
        closes the communicator, or one of the library's own. So it should be short; it may begin
        further messages. What it raises goes to ``sys.unraisablehook``.
        """
        if not callable(function):
            raise ArgumentTypeError(f"add_done_callback needs a function; got {function!r}")
        with self._owner.lock:
            self._received_by = [*self._received_by, function]
            if not self._is_done:
                self._owner.called[self] = None
        if not self._is_done:
            self._owner.watch(self)
        if self._is_done:
            self.call_back()

    def withdraw(self) -> bool:
        """Take the message back: a receive that nothing has come for, a send that nobody may see.

        Returns
        -------
        bool
            Whether it was: then this is done, and its result means nothing. Otherwise it goes on,
            or is done already.
        """
        self._check_process()
        with self._owner.lock:
            transfers = None if self._is_done else self._transfers
            if transfers is None or not transfers.withdraw():
                return False
            self.settle(None, None)
        self.call_back()
        return True

    def call_back(self) -> None:
        """Call what was to be called at the end, once."""
        with self._owner.lock:
            functions, self._received_by = self._received_by, ()
        if functions:
            self._owner.call_back(self, functions)

    def __repr__(self) -> str:
        if not self._is_done:
            return f"<Work {self._name}: not done>"
        state = "done" if self._error is None else f"failed: {type(self._error).__name__}"
        return f"<Work {self._name}: {state}>"

    # --- going on ---------------------------------------------------------------------------------

    def begin(self, transfers: Transfers, steps: Steps) -> None:
        """Begin what a group has collected."""
        self._transfers, self._steps = transfers, steps

    @property
    def takes(self) -> bool:
        """Whether it receives a message of which it is told neither size nor dtype."""
        transfers = self._transfers
        return transfers is not None and transfers.requests[0].kind == _TAKE

    def go_on(self) -> bool:
        """Go on as far as messages have come, without looking for more; return whether done."""
        queue = self._owner
        with queue.lock:
            while not self._is_done and self._transfers is not None and self._transfers.is_over():
                self._transfers.settle()
                if self._received is None:
                    requests = self._transfers.requests
                    self._received = next((item for item in requests if item.kind != _SEND), None)
                self._take_step()
            if not self._is_done:
                return False
        self.call_back()
        return True

    def _take_step(self) -> None:
        try:
            if self._steps is None:
                self._owner.check_received(self)
                self.settle(self._result, None)
            else:
                self._transfers = self._owner.start(next(self._steps))
        except StopIteration as stop:
            self.settle(stop.value, None)
        except BaseException as error:
            self.settle(None, error)

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Note how it ended, and let go of what it owned."""
        self._result, self._error = result, error
        self._is_done = True  # before the rest goes: who waits looks without the lock
        self._transfers = self._steps = None
        self._owner.forget(self)

    def abandon(self) -> None:
        """Keep nothing alive any more: the communicator is closed, and nothing is touched."""

    def _look(self) -> bool:
        self._check_process()
        transfers = self._transfers
        try:
            if transfers is not None:
                transfers.look()
        except GpucollError as error:
            self._break(error)
        return self.go_on()

    def _wait(self, timeout_s: float | None) -> None:
        self._check_process()
        if timeout_s != 0:  # which only looks
            check_timeout_s(timeout_s, may_be_endless=True)  # the message has its own deadline
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.go_on():
            transfers = self._transfers
            left_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
            if transfers is None:
                if self._is_done:
                    continue  # another thread has just ended it
                raise StateError(f"{self._name} begins at the end of group(): wait after that")
            try:
                is_over = transfers.wait(left_s)
            except GpucollError as error:
                self._break(error)
                continue
            if not is_over and not (left_s and until_s and until_s > time.monotonic()):
                raise DeadlineError(
                    f"{self._name} was not done after {timeout_s:g} s of waiting for its Work; "
                    "it goes on"
                )

    def _break(self, error: GpucollError) -> None:
        """Note the failure of the whole communicator as this Work's, if it is not over."""
        with self._owner.lock:
            if not self._is_done and not (self._transfers and self._transfers.is_over()):
                self.settle(None, error)

    def _check_process(self) -> None:
        if os.getpid() != self._owner.process:
            raise StateError(f"{self._name} belongs to the process that this one was forked from")
