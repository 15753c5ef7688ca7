"""Repeated calls of a known kind: posted and enqueued in one compiled step.

For an ordinary call the issuer posts, records an event, enqueues and records another event, and
each of these leaves Python once. If the call consists of one signature and one function of the
library, compiled code does all four (`gpucoll.backends.gpu.enqueue_entry`). It leaves any unusual
case to the issuer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from gpucoll.backends.gpu.enqueue_entry import enqueuer
from gpucoll.backends.gpu.enqueue_words import Step
from gpucoll.backends.gpu.in_flight import IssuedCall
from gpucoll.backends.gpu.issuer import MOST_IN_FLIGHT, Issuer
from gpucoll.backends.gpu.signature import Signature
from gpucoll.group.host.enqueued import SEQUENCE
from gpucoll.transport.shared.layout import Abort


class Function(NamedTuple):
    """A library's function, called with two addresses, settings, communicator and stream."""

    address: int
    settings: Sequence[int]
    poll: int
    """Address of the function that reports whether a communicator is busy with such a call."""
    in_progress: int
    """The code with which it reports that."""
    settle: Callable[[int], None]
    """Raises the error for a code of the function, once the code is final."""


class Handled(Protocol):
    """The owner of the library's communicator."""

    handle: int
    """The communicator's handle; 0 once it is released."""


class CompiledCall:
    """One kind of call, complete except for its addresses and its stream.

    Parameters
    ----------
    issuer : Issuer
        Issues the calls.
    name : str
        The name of the user's call.
    signature : Signature
        What is posted.
    function : Function
        What is enqueued.
    connection : Handled
        The communicator on which it is called.
    """

    def __init__(
        self,
        issuer: Issuer,
        name: str,
        signature: Signature,
        function: Function,
        connection: Handled,
    ) -> None:
        self.issuer = issuer
        self._name = name
        self._settle = function.settle
        self._connection = connection
        calls, block = issuer.calls, signature.block
        self._enqueue, words = enqueuer(
            issuer.driver_table,
            block,
            function.address,
            function.settings,
            function.poll,
            function.in_progress,
        )
        self._keep = signature, words
        self._words, self._group, self._in_flight = calls.words, issuer.group, issuer.in_flight
        self._lock, self._events, self._known = (
            issuer.lock,
            issuer.streams.events,
            issuer.streams.known,
        )

    def issue(
        self,
        source: int,
        destination: int,
        stream: int,
        leader: int,
        keep: Any,
        timeout_s: float | None = None,
    ) -> IssuedCall | None:
        """Put the call on a stream; None: nothing was done, the issuer must issue it.

        The device need not be current.

        Parameters
        ----------
        source, destination : int
            Addresses of memory on the GPU.
        stream : int
            The stream on which it runs.
        leader : int
            The call waits for the work that is on this stream now; may be the same stream.
        keep : object
            Objects that must live until the call is done.
        timeout_s : float, optional
            Time limit, counted from its start on the GPU; None: the communicator's default.
        """
        with self._lock:
            events, known, handle = self._events, self._known, self._connection.handle
            if (
                stream not in known
                or leader not in known
                or len(events) < 2
                or self._in_flight.count >= MOST_IN_FLIGHT
                or not handle
            ):
                return None
            before = self._words[SEQUENCE]
            start, end = events.pop(), events.pop()
            issued = None
            try:
                result = self._enqueue(source, destination, handle, stream, leader, start, end)
                if result:
                    if result >> 32 == Step.NOTHING:
                        events += start, end
                        return None
                    self._finish(result, stream, end)
                limit_s = self._group.timeout_s if timeout_s is None else timeout_s
                issued = IssuedCall(before + 1, self._name, stream, limit_s, keep, start, end)
                self._in_flight.add(issued)
            except BaseException as error:
                if issued is None:
                    events += start, end
                if self._words[SEQUENCE] != before:
                    self.issuer.give_up(Abort.BACKEND, self._group.rank, None, error)
                raise
        self.issuer.wake()
        return issued

    def _finish(self, result: int, stream: int, end: int) -> None:
        """Complete a call that the compiled step left unfinished; raise the error if it failed."""
        step, code = result >> 32, result & 0xFFFFFFFF
        device = self.issuer.device
        if step == Step.GONE:
            self.issuer.raise_failure()
        with device:
            if step != Step.CALL:
                device.check(code, "record an event")
            self._settle(code)  # the call may merely be in progress
            with self.issuer.in_driver():
                device.check(device.record_event(end, stream), "record an event")
