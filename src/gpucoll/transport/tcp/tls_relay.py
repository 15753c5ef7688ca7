"""Plain sockets that lead through TLS, for compiled code, which can use only plain sockets.

A TLS connection that OpenSSL encrypts, and not the kernel, is put behind a pair of sockets of this
process. The user of one of them is served by a thread, which forwards data in both directions. Data
goes over TLS in chunks, each after its length. A length of 0 announces that nothing follows, as
`shutdown` does on a plain socket; TLS itself can only end both directions at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections import deque
from typing import Final

_CHUNK_BYTES: Final = 256 << 10
_LENGTH: Final = struct.Struct("<I")
_TURNS: Final = 64
"""How often one connection is served before the others have their turn."""
_LEAVING_S: Final = 5.0
"""How long data in transit may take when everything is closed."""
_WAITS: Final = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
_NOTHING: Final = memoryview(b"")
_all: weakref.WeakSet[TlsRelay] = weakref.WeakSet()


class _Connection:
    """One TLS connection, and the socket in front of it."""

    def __init__(self, secured: ssl.SSLSocket, inner: socket.socket) -> None:
        self.secured, self.inner = secured, inner
        self._out, self._in = _NOTHING, _NOTHING
        """Data for TLS, in chunks with their lengths, and data for the inner socket."""
        self._came = bytearray()
        """The received part of a length."""
        self._left_bytes = 0
        self._is_out_over = self._is_in_over = False
        self._is_inner_gone = False

    @property
    def is_sent(self) -> bool:
        """Whether all written data has been sent, and its end announced."""
        return self._is_out_over and not self._out

    @property
    def _is_over(self) -> bool:
        return self.is_sent and (self._is_inner_gone or (self._is_in_over and not self._in))

    def register(self, poll: select.poll) -> None:
        """Register the events that allow progress."""
        reads = not self._in and not self._is_in_over
        poll.register(self.secured, select.POLLIN * reads | select.POLLOUT * bool(self._out))
        if not self._is_inner_gone:
            reads = not self._out and not self._is_out_over
            poll.register(self.inner, select.POLLIN * reads | select.POLLOUT * bool(self._in))

    def go_on(self, events: dict[int, int]) -> bool:
        """Forward what can be forwarded; return whether the connection is still open.

        Parameters
        ----------
        events : dict
            The events from `poll`, by descriptor.
        """
        is_other_gone = events.get(self.secured.fileno(), 0) & (select.POLLHUP | select.POLLERR)
        if events.get(self.inner.fileno(), 0) & (select.POLLHUP | select.POLLERR):
            self._is_inner_gone = True
        try:
            for _ in range(_TURNS):
                if not (self._pass_out() | self._pass_in()):
                    break
        except OSError:  # including TLS errors
            return False
        return not self._is_over and not (is_other_gone and self._is_in_over)

    def _pass_out(self) -> bool:
        if not self._out:
            if self._is_out_over:
                return False
            try:
                data = self.inner.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return False
            self._is_out_over = not data
            self._out = memoryview(_LENGTH.pack(len(data)) + data)
        try:
            n_sent = self.secured.send(self._out)
        except _WAITS:
            return False
        self._out = self._out[n_sent:]
        return True

    def _pass_in(self) -> bool:
        if not self._in:
            if self._is_in_over:
                return False
            try:
                data = self.secured.recv(_CHUNK_BYTES)
            except _WAITS:
                return False
            if not data:
                raise ConnectionError("the other end is gone")
            self._in = memoryview(self._unpacked(data))
        try:
            n_sent = self.inner.send(self._in, socket.MSG_NOSIGNAL) if self._in else 0
        except BlockingIOError:
            return False
        self._in = self._in[n_sent:]
        if self._is_in_over and not self._in:
            self.inner.shutdown(socket.SHUT_WR)
        return True

    def _unpacked(self, data: bytes) -> bytes:
        """Return the data of chunks, without their lengths."""
        parts, at = [], 0
        while at < len(data):
            if self._left_bytes:
                part = data[at : at + self._left_bytes]
                parts.append(part)
                self._left_bytes -= len(part)
                at += len(part)
                continue
            wanted = _LENGTH.size - len(self._came)
            self._came += data[at : at + wanted]
            at += wanted
            if len(self._came) == _LENGTH.size:
                (self._left_bytes,) = _LENGTH.unpack(self._came)
                self._came.clear()
                self._is_in_over |= not self._left_bytes
        return b"".join(parts)

    def close(self) -> None:
        """Close both sockets."""
        self.inner.close()
        self.secured.close()


class TlsRelay:
    """Serves connections in a thread, which the first one starts."""

    def __init__(self) -> None:
        self._bell_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._new: deque[_Connection] = deque()
        self._connections: list[_Connection] = []
        self._stop: float | None = None
        self._thread: threading.Thread | None = None
        _all.add(self)

    def put_behind(self, secured: ssl.SSLSocket) -> socket.socket:
        """Return a plain socket, not blocking, that leads through TLS.

        Parameters
        ----------
        secured : ssl.SSLSocket
            A TLS socket with a complete handshake, not blocking; belongs to this object from here
            on. The other end must use a relay too.
        """
        outer, inner = socket.socketpair()
        for end in (outer, inner):
            end.setblocking(False)
        self._new.append(_Connection(secured, inner))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpucoll-tls", daemon=True)
            self._thread.start()
        self._ring()
        return outer

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell_fd, 1)

    def _run(self) -> None:
        try:
            while not self._is_done():
                self._turn()
        finally:
            self._drop()

    def _is_done(self) -> bool:
        if self._stop is None:
            return False
        if time.monotonic() >= self._stop:
            return True
        return not self._new and all(each.is_sent for each in self._connections)

    def _turn(self) -> None:
        poll = select.poll()
        poll.register(self._bell_fd, select.POLLIN)
        for connection in self._connections:
            connection.register(poll)
        left_s = None if self._stop is None else max(self._stop - time.monotonic(), 0)
        events = dict(poll.poll(None if left_s is None else 1000 * left_s))
        if self._bell_fd in events:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell_fd)
        while self._new:  # a poll does not show data that TLS has already decrypted
            self._connections.append(self._new.popleft())
        for connection in list(self._connections):
            if not connection.go_on(events):
                self._connections.remove(connection)
                connection.close()

    def close(self) -> None:
        """Send written data, for a few seconds at most, and close everything."""
        bell_fd = self._bell_fd
        if bell_fd < 0:
            return
        self._stop = time.monotonic() + _LEAVING_S
        if self._thread is not None:
            self._ring()
            self._thread.join()
        self._bell_fd = -1
        os.close(bell_fd)

    def _drop(self) -> None:
        for connection in (*self._connections, *self._new):
            connection.close()
        self._connections = []
        self._new.clear()


def _after_fork() -> None:
    # A child that outlives its parent would keep the connections open, and other hosts would not
    # notice the parent's end.
    for relay in list(_all):
        relay._drop()


os.register_at_fork(after_in_child=_after_fork)
