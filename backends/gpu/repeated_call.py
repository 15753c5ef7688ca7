"""Repeated calls of a known kind that consist of more than one function.

They are checked and signed once. Their launches are kept by the arrays' addresses, because a
program passes the same arrays again and again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.gpu.in_flight import IssuedCall, StreamCall
from gpucoll.backends.gpu.protocol import GpuBackend
from gpucoll.backends.protocol import Request

_MOST = 64
"""How many pairs of addresses are kept for one kind of call."""


class RepeatedCall:
    """One kind of call, complete except for its arrays and its stream.

    Parameters
    ----------
    connected : GpuBackend
        Makes the calls.
    name : str
        The name of the user's call.
    request : Request
        An example of the kind, with one input and one output.
    is_own : bool
        Whether the output belongs to the user: see `StreamCall`.
    """

    def __init__(self, connected: GpuBackend, name: str, request: Request, is_own: bool) -> None:
        self.issuer = connected.issuer
        self._connected = connected
        self._name = name
        self._is_own = is_own
        self._request = request._replace(
            source=_without_owner(request.source), destination=_without_owner(request.destination)
        )
        self._signatures = connected.signatures([request])
        self._launches: dict[tuple[int, int], Any] = {}

    def issue(
        self,
        source: int,
        destination: int,
        stream: int,
        leader: int,
        keep: Any,
        timeout_s: float | None = None,
    ) -> IssuedCall:
        """Put the call on a stream; see `gpucoll.backends.gpu.compiled_call.CompiledCall.issue`."""
        launches = self._launches.get((source, destination))
        if launches is None:
            launches = self._prepare(source, destination)
        call = StreamCall(
            self._name, self._signatures, launches, stream, keep, self._is_own, timeout_s
        )
        if stream != leader:
            call.stream = leader
            self._connected.refuse_capture(call)
            call.stream, call.is_awaited = stream, True
            self.issuer.follow(stream, leader)
        return self._connected.issue(call)

    def _prepare(self, source: int, destination: int) -> Any:
        given, out = self._request.source, self._request.destination
        assert given is not None
        assert out is not None
        request = self._request._replace(
            source=replace(given, address=source), destination=replace(out, address=destination)
        )
        if len(self._launches) >= _MOST:
            self._launches.clear()
        made = self._launches[source, destination] = self._connected.launches([request], ())
        return made


def _without_owner(buffer: Buffer | None) -> Buffer | None:
    return None if buffer is None else replace(buffer, owner=None)
