"""Run schedules over encrypting connections, from Python, where OpenSSL is available.

`gpucoll.transport.tcp.streams` describes the rows, and which of them are allowed. Compiled code
checks them; the loop over the links is in Python.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Sequence
from typing import Any

from gpucoll.transport.tcp.secure_call import CallEndedError, SecureCall, SecureLink
from gpucoll.transport.tcp.stream_plan import plan_streams
from gpucoll.transport.tcp.stream_words import (
    HEADER_BYTES,
    SCRATCH_BYTES,
    Link,
    Plan,
    State,
    StreamStatus,
)
from gpucoll.transport.tcp.streams import Streams
from gpucoll.transport.tcp.tls import is_in_kernel

__all__ = ["SecureStreams", "secure_streams"]

YIELDS = 20
_AGAIN = int(StreamStatus.AGAIN)


class SecureStreams(Streams):
    """Connections to other ranks that are not plain sockets; used like `Streams`.

    Parameters
    ----------
    connections : sequence of ssl.SSLSocket
        Connected sockets, with a complete handshake, and not blocking; the caller keeps them.
        Objects with the same ``send``, ``recv_into`` and ``fileno`` can be used too. If TLS itself
        fails, the errno of the outcome is EPROTO.
    """

    _loop = plan_streams

    def __init__(self, connections: Sequence[Any]) -> None:
        super().__init__([connection.fileno() for connection in connections])
        whole, base = self._scratch.data, self._scratch.ctypes.data
        self._connections = []
        for connection, address in zip(connections, self._links[:, Link.scratch], strict=True):
            start = int(address) - HEADER_BYTES - base
            memory = whole[start : start + HEADER_BYTES + SCRATCH_BYTES]
            self._connections.append(SecureLink(connection, memory))
        self._call: SecureCall | None = None

    def _proceed(self) -> int:
        if not self._state.begun:
            status = super()._proceed()
            if status != _AGAIN:
                return status
            header = self._state.words[State.header : State.abort].tobytes()
            lists = self._rows.tolist(), self._plan.tolist(), self._state.words.tolist()
            self._call = SecureCall(*lists, header)
            for link, words in zip(self._connections, self._links.tolist(), strict=True):
                link.begin_call(words[Link.send_row], words[Link.receive_row])
        assert self._call is not None
        for word in (State.ready, State.until, State.stops_idle, State.slice_ns):
            self._call.state[word] = int(self._state.words[word])
        try:
            return self._run_slice(self._call)
        finally:
            self._state.first_send = self._call.first_open(Plan.send_done)
            self._state.first_receive = self._call.first_open(Plan.receive_done)

    def _run_slice(self, call: SecureCall) -> int:
        end_ns = time.monotonic_ns() + call.state[State.slice_ns]
        deadline_ns, abort = call.state[State.deadline_ns], call.state[State.abort]
        while True:
            if abort and ctypes.c_int64.from_address(abort).value:
                return StreamStatus.ABORTED
            moved = False
            for number, link in enumerate(self._connections):
                try:
                    moved = self._turn(call, link) or moved
                except CallEndedError as ended:
                    self._state.link, self._state.errno = number, ended.errno
                    return ended.status
            if call.n_open == 0:
                return StreamStatus.DONE
            if moved and call.has_done(call.state[State.until]):
                return _AGAIN
            time_ns = time.monotonic_ns()
            if time_ns >= deadline_ns:
                return StreamStatus.DEADLINE
            if time_ns >= end_ns:
                return _AGAIN
            call.idle = 0 if moved else call.idle + 1
            if not moved:
                if call.state[State.stops_idle]:
                    return _AGAIN
                self._wait(call, min(end_ns, deadline_ns) - time_ns)

    def _turn(self, call: SecureCall, link: SecureLink) -> bool:
        link.wants = 0
        try:
            moved = call.send_some(link)
        except CallEndedError:
            if link.header_came < HEADER_BYTES:  # received data tells more than a closed connection
                try:
                    call.receive_some(link)
                except CallEndedError as found:
                    if found.status == StreamStatus.MISMATCH:
                        raise
            raise
        return call.receive_some(link) or moved

    def _wait(self, call: SecureCall, duration_ns: int) -> None:
        if call.idle <= YIELDS:
            os.sched_yield()
            return
        poll = select.poll()
        for link in self._connections:
            if link.wants:
                poll.register(link.connection, link.wants)
        poll.poll(-(-duration_ns // 1_000_000))


def secure_streams(connections: Sequence[Any]) -> Streams:
    """Return streams over TLS connections: compiled ones if the kernel encrypts all of them.

    Parameters
    ----------
    connections : sequence of ssl.SSLSocket
        See `SecureStreams`.
    """
    if connections and all(is_in_kernel(connection) for connection in connections):
        return Streams([connection.fileno() for connection in connections])
    return SecureStreams(connections)
