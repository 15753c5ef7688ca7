"""The Work of a message that a compiled entry has begun: no more is made than who waits needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gpucoll.backends.protocol import Transfers
from gpucoll.calls.message import Message, received_message
from gpucoll.calls.message_work import MessageWork
from gpucoll.calls.messages import MessageQueue

_R = TypeVar("_R", covariant=True)


class BegunMessage(MessageWork[_R]):
    """A `MessageWork` whose row lies in memory that the entry has made.

    Whoever waits for it alone does so in compiled code. All else (`done`, a time limit, callbacks,
    failures) goes the way of every `MessageWork`, through transfers that are made then.
    """

    # On the class, since each that an instance is given costs 20 ns.
    _error: BaseException | None = None
    _is_done = False
    _was_seen = False
    _received_by: Sequence[Callable[[Any], object]] = ()
    _steps = None
    _received = None
    _made: Transfers | None = None

    def __init__(self, queue: MessageQueue, name: str, row: bytearray, result: Any) -> None:
        self._owner: MessageQueue = queue
        self._name = name
        self._row = row
        self._result = result

    @property
    def _transfers(self) -> Transfers | None:
        if self._made is None and not self._is_done:
            self._made = self._owner.host_messages.begun(self._row)
        return self._made

    @_transfers.setter
    def _transfers(self, made: Transfers | None) -> None:
        self._made = made

    def wait(self, timeout_s: float | None = None) -> _R:
        """Wait until the message was sent or received: see `MessageWork.wait`."""
        if not self._is_done:
            if timeout_s is not None or self._owner.wait_begun(self._row):
                self._wait(timeout_s)
            elif self._received_by:
                self.go_on()  # which calls back
            else:
                self._is_done = True
                self._owner.forget_begun(self)
        self._was_seen = True
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[no-any-return]

    def abandon(self) -> None:
        """Keep nothing alive any more: the communicator is closed, and nothing is touched."""
        self._owner.host_messages.let_go_begun(self._row)

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Note how it ended, and let go of what it owned."""
        self.abandon()
        super().settle(result, error)

    @property
    def message(self) -> Message | None:
        """What was received: source, tag, count and dtype; None before that, and of a send."""
        if not self.done() or self._error is not None or self._name != "recv":
            return None
        return received_message(self._owner.host_messages.ended(self._row))
