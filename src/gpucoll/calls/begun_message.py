"""The Work of a message that a compiled entry has started, with as few Python objects as needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gpucoll.backends.protocol import Transfers
from gpucoll.calls.given import AnyInput
from gpucoll.calls.message import Message, received_message
from gpucoll.calls.message_work import MessageWork
from gpucoll.calls.messages import MessageQueue

_R = TypeVar("_R", covariant=True)


def begun(
    queue: MessageQueue, name: str, row: bytearray | AnyInput, result: object
) -> BegunMessage[Any]:
    """Return the Work of a message that a compiled entry has started.

    Parameters
    ----------
    queue : MessageQueue
        Keeps the Work until it ends.
    name : str
        The method that has started it.
    row : bytearray or array
        The memory of the row; the array itself if it was sent already.
    result : object
        What `wait` returns.
    """
    work: BegunMessage[Any] = BegunMessage()
    work._owner = queue
    work._name = name
    work._row = row
    work._result = result
    if type(row) is not bytearray:
        work._is_done = True
        return work
    pending = queue.pending
    pending[work] = None
    if queue.called or len(pending) >= queue.sweep_at:
        queue.look_at_others()
    return work


class BegunMessage(MessageWork[_R]):
    """A `MessageWork` whose row is in memory that the entry has allocated.

    A plain `wait` runs in compiled code. Every other use (`done`, a time limit, callbacks,
    failures) works as for any `MessageWork`, through transfers that are made when they are needed.
    """

    _owner: MessageQueue
    _row: bytearray | AnyInput
    # Class attributes, because each attribute that an instance sets costs 20 ns.
    _error: BaseException | None = None
    _is_done = False
    _was_seen = False
    _received_by: Sequence[Callable[[Any], object]] = ()
    _steps = None
    _received = None
    _made: Transfers | None = None

    __init__ = object.__init__  # `begun` sets the attributes: a Python ``__init__`` costs 0.1 us

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
                self.go_on()  # it runs the callbacks
            else:
                self._is_done = True
                self._owner.pending.pop(self, None)
        self._was_seen = True
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[no-any-return]

    def abandon(self) -> None:
        """Release the memory of a message whose communicator is closed, without touching data."""
        self._owner.host_messages.let_go_begun(self._row)

    def settle(self, result: object, error: BaseException | None) -> None:
        """Note how the message ended, and release what it owned."""
        self.abandon()
        super().settle(result, error)

    @property
    def message(self) -> Message | None:
        """Source, tag, count and dtype of what was received; None before that, and for a send."""
        if not self.done() or self._error is not None or self._name != "recv":
            return None
        return received_message(self._owner.host_messages.ended(self._row))
