"""Calls of a kind that was made before: posted and enqueued in one compiled step.

The issuer's way of a call is to post, to record an event, to enqueue and to record another one,
each of them a call out of Python. Where that comes down to one signature and one function of the
library's, compiled code does all of it (`gpucoll.backends.gpu.enqueue_entry`); whatever is not as
usual it leaves to the issuer.
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
    """One function of the library's, called with two addresses, settings, communicator, stream."""

    address: int
    settings: Sequence[int]
    poll: int
    """Address of what says of a communicator whether it is still busy with such a call."""
    in_progress: int
    """The code by which that says so."""
    settle: Callable[[int], None]
    """Raises what a code of the function's means, once it is final."""


class Handled(Protocol):
    """What has the library's communicator."""

    handle: int
    """0 once it is gone."""


class CompiledCall:
    """One kind of call, ready but for its addresses and its stream.

    Parameters
    ----------
    issuer : Issuer
        Whose calls.
    name : str
        What the user called.
    signature : Signature
        What is posted.
    function : Function
        What is enqueued.
    connection : Handled
        On which communicator.
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
        """Put the call on a stream; None: nothing was done, it is for the issuer.

        The device need not be current.

        Parameters
        ----------
        source, destination : int
            Addresses of memory on the GPU.
        stream : int
            Where it runs.
        leader : int
            The stream on which what is there now comes first; or the same one.
        keep : object
            What must live until it is done.
        timeout_s : float, optional
            How long it may take from its start on; None: the communicator's default.
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
        """Do what the compiled step has not; raise what went wrong there."""
        step, code = result >> 32, result & 0xFFFFFFFF
        device = self.issuer.device
        if step == Step.GONE:
            self.issuer.raise_failure()
        with device:
            if step != Step.CALL:
                device.check(code, "record an event")
            self._settle(code)  # it may only be in progress
            with self.issuer.in_driver():
                device.check(device.record_event(end, stream), "record an event")
