"""The Work of a message that was started with ``async_op=True``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gpucoll.backends.protocol import MessageRequest, Transfers
from gpucoll.calls.message import Message, received_message
from gpucoll.calls.work import Work
from gpucoll.config import check_timeout_s
from gpucoll.errors import ArgumentTypeError, DeadlineError, GpucollError, StateError
from gpucoll.transport.shared.words import Kind

if TYPE_CHECKING:
    from gpucoll.calls.messages import MessageQueue

_SEND, _TAKE = int(Kind.SEND), int(Kind.TAKE)
_R = TypeVar("_R", covariant=True)
Steps = Generator[list[MessageRequest], None, Any]
"""The steps of a call: yields requests to wait for, and returns the call's result."""


class MessageWork(Work[_R]):
    """A send or receive that was started with ``async_op=True``.

    It owns its array until it is done: the program may not use the array before. It progresses
    whenever a message of its communicator is started, waited for or queried, whatever collectives
    do. A message larger than 64 KiB progresses even without that, in a compiled thread. `wait`
    raises a failure; `Communicator.check` and `close` raise failures that were never inspected.
    """

    def __init__(
        self,
        queue: MessageQueue,
        name: str,
        transfers: Transfers | None,
        steps: Steps | None,
        result: object = None,
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
        """The callbacks to call at the end."""
        self._received: MessageRequest | None = None

    # --- as users see it --------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> _R:
        """Wait until the message was sent or received; return the result, or raise the error.

        Parameters
        ----------
        timeout_s : float, optional
            How long to wait here, in seconds. The message has its own deadline and goes on.
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
        """Return whether the message has ended, well or not. Progresses messages; never waits."""
        return self._is_done or self._look()

    def exception(self) -> BaseException | None:
        """Return the error; None if there is none or the message goes on. Does not wait."""
        if self.done():
            self._was_seen = True
        return self._error

    @property
    def message(self) -> Message | None:
        """Source, tag, count and dtype of what was received; None before that, and for a send."""
        if not self.done() or self._error is not None or self._received is None:
            return None
        return received_message(self._received)

    def add_done_callback(self, function: Callable[[MessageWork[_R]], object]) -> None:
        """Call ``function(work)`` when the message is done; at once if it already is.

        The function is called in the thread that finds the message done: one that waits, queries,
        starts another message, or checks or closes the communicator; or a thread of gpucoll. It
        should be short, and may start further messages. Its exceptions go to
        ``sys.unraisablehook``.
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
        """Take back a receive for which no message has come, or a send not yet visible.

        Returns
        -------
        bool
            Whether the message was taken back: the Work is then done, and its result is
            meaningless. Otherwise the message goes on, or is already done.
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
        """Call the callbacks, once."""
        with self._owner.lock:
            functions, self._received_by = self._received_by, ()
        if functions:
            self._owner.call_back(self, functions)

    def __repr__(self) -> str:
        if not self._is_done:
            return f"<Work {self._name}: not done>"
        state = "done" if self._error is None else f"failed: {type(self._error).__name__}"
        return f"<Work {self._name}: {state}>"

    # --- progress ---------------------------------------------------------------------------------

    def begin(self, transfers: Transfers, steps: Steps) -> None:
        """Start a message that a group has collected."""
        self._transfers, self._steps = transfers, steps

    @property
    def takes(self) -> bool:
        """Whether it receives a message whose size and dtype it does not know."""
        transfers = self._transfers
        return transfers is not None and transfers.requests[0].kind == _TAKE

    def go_on(self) -> bool:
        """Progress as far as messages have come, without looking for more; return whether done."""
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

    def settle(self, result: object, error: BaseException | None) -> None:
        """Note how the message ended, and release what it owned."""
        self._result, self._error = result, error
        self._is_done = True  # first: a waiting thread looks at this without the lock
        self._transfers = self._steps = None
        self._owner.forget(self)

    def abandon(self) -> None:
        """Release the memory of a message whose communicator is closed, without touching data."""

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
        if timeout_s != 0:  # 0 means: look only
            check_timeout_s(timeout_s, may_be_endless=True)  # the message has its own deadline
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.go_on():
            transfers = self._transfers
            left_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
            if transfers is None:
                if self._is_done:
                    continue  # another thread has just ended it
                raise StateError(f"{self._name} begins at the end of group(): wait after the group")
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
        """Note the failure of the whole communicator as this Work's, unless it is complete."""
        with self._owner.lock:
            if not self._is_done and not (self._transfers and self._transfers.is_over()):
                self.settle(None, error)

    def _check_process(self) -> None:
        if os.getpid() != self._owner.process:
            raise StateError(f"{self._name} belongs to the process that this one was forked from")
