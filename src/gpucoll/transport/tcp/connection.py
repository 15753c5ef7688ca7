"""A TCP connection between two processes of a job: the handshake, then sealed messages.

If the job has certificates, all of it is inside TLS.

Nothing here waits, so a rank can serve several connections, and no other end can hold it up.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpucoll.errors import AuthenticationError
from gpucoll.transport.tcp.credentials import Credentials
from gpucoll.transport.tcp.handshake import ClosedEarlyError, Handshake, Role
from gpucoll.transport.tcp.one_sided_tls import is_tls_greeting, send_alert
from gpucoll.transport.tcp.sealed import Opening, Seal
from gpucoll.transport.tcp.socket_options import tune_socket

if TYPE_CHECKING:
    from gpucoll.transport.tcp.tls import TlsSocket

_AT_ONCE_BYTES = 1 << 18


def spelled(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return a socket's address in its usual notation."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class SealedConnection:
    """One end of a connection.

    Parameters
    ----------
    end : socket
        The socket, connected or about to be; belongs to this object from here on.
    credentials : Credentials
        The job's credentials.
    role : Role
        Which end this is.
    purpose : bytes
        The connection's purpose, by `handshake.encode_purpose`.
    most_bytes : int
        Limit of a message from the other end.
    """

    def __init__(
        self,
        end: socket.socket,
        credentials: Credentials,
        role: Role,
        purpose: bytes,
        most_bytes: int,
    ) -> None:
        end.setblocking(False)
        self.peer = spelled(end.getpeername())
        """The address of the other end."""
        self._end: socket.socket | TlsSocket = end
        self._securing: TlsSocket | None = None
        """The same socket while TLS is being set up; else None."""
        self._most_bytes = most_bytes
        self._begins_with = credentials.secret, role, purpose
        self._waiting: deque[bytes] = deque()
        """Messages to send once the other end is authenticated."""
        self._sending = bytearray()
        self._seal: Seal | None = None
        self._opening: Opening | None = None
        self._received: deque[bytes] = deque()
        if credentials.tls is None:
            self._begin_handshake(b"")
        else:
            self._end = self._securing = credentials.tls.socket(end, role)

    def _begin_handshake(self, binding: bytes) -> None:
        """Begin the handshake, bound to the connection's purpose and the TLS below."""
        secret, role, purpose = self._begins_with
        self._handshake = Handshake(secret, role, purpose + binding)
        self._sending += self._handshake.start()

    def _is_secured(self) -> bool:
        """Go on with setting up TLS, if it is used; return whether that is complete."""
        if self._securing is None:
            return True
        if not self._securing.proceed():
            return False
        self._begin_handshake(self._securing.binding())
        self._securing = None
        return True

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._end.fileno()

    @property
    def is_known(self) -> bool:
        """Whether the other end has proved that it knows the secret."""
        return self._seal is not None

    @property
    def is_sending(self) -> bool:
        """Whether there is unsent data."""
        return bool(self._sending or self._waiting or self._securing)

    @property
    def unsent_bytes(self) -> int:
        """How much data the system has not taken yet."""
        return len(self._sending)

    @property
    def events(self) -> int:
        """The events to poll for while it `is_sending`."""
        if self._securing is not None:
            return self._securing.wants
        return select.POLLOUT if self._sending else select.POLLIN

    @property
    def own_address(self) -> str:
        """The address of this end's interface."""
        return str(self._end.getsockname()[0])

    def send(self, message: bytes) -> None:
        """Send a message, or as much of it as the other end takes now; OSError: it is gone."""
        if self._seal is None:
            self._waiting.append(message)
        else:
            self._sending += self._seal.seal(message)
        self.flush()

    def flush(self) -> None:
        """Send the unsent data that the other end takes now.

        Raises
        ------
        OSError
            The other end is gone.
        AuthenticationError
            The other end may not take part.
        """
        if not self._is_secured():
            return
        try:
            self._write()
        except OSError:
            if self._seal is None:
                self._take()  # a message may explain why
            raise
        if self._seal is None and self._waiting:
            self._take()

    def receive(self) -> bytes | None:
        """Read what has come; return the next message once it is complete.

        Raises
        ------
        OSError
            The other end is gone.
        AuthenticationError
            The other end may not take part, or a message did not arrive as it was sent.
        """
        if not self._is_secured():
            return None
        while not self._received:
            if not self._take():
                return None
        return self._received.popleft()

    def _write(self) -> None:
        while self._sending:
            try:
                sent = self._end.send(self._sending[:_AT_ONCE_BYTES], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            del self._sending[:sent]

    def _take(self) -> bool:
        """Read some of what has come; return whether there was anything."""
        wanted = _AT_ONCE_BYTES if self._opening is not None else self._handshake.n_wanted
        try:
            data = self._end.recv(wanted)
        except BlockingIOError:
            return False
        if not data:
            if self._seal is None:
                raise ClosedEarlyError(str(self._handshake.closed()))
            raise ConnectionError("the other end is gone")
        if self._opening is not None:
            self._received += self._opening.take(data)
            return True
        try:
            self._sending += self._handshake.take(data)
        except AuthenticationError:
            if is_tls_greeting(data) and isinstance(self._end, socket.socket):
                send_alert(self._end)
            raise
        if self._handshake.is_done:
            self._begin()
        self._write()
        return True

    def _begin(self) -> None:
        """Switch to sealed messages."""
        self._seal = Seal(self._handshake.send_key)
        self._opening = Opening(self._handshake.receive_key, self._most_bytes)
        while self._waiting:
            self._sending += self._seal.seal(self._waiting.popleft())
        if getattr(self._end, "n_pending", 0):  # a poll would not show it
            self._received += self._opening.take(self._end.recv(_AT_ONCE_BYTES))

    def close(self) -> None:
        """Close the socket."""
        self._end.close()

    def send_unsealed(self, data: bytes) -> None:
        """Send a few plain bytes, which the other end must be waiting for."""
        self._end.send(data, socket.MSG_NOSIGNAL)

    def receive_unsealed(self, n_bytes: int) -> bytes | None:
        """Return what the other end sends by `send_unsealed`; None: not yet; empty: it is gone."""
        try:
            return self._end.recv(n_bytes)
        except BlockingIOError:
            return None

    def detach_with_seals(self) -> tuple[socket.socket, Seal, Opening]:
        """Return the socket as `detach` does, with the seal and the opening of frames over it."""
        end = self.detach()
        assert self._seal is not None
        assert self._opening is not None
        return end, self._seal, self._opening

    def detach(self) -> socket.socket:
        """Return the socket, for any use from here on; with TLS, it is an `SSLSocket`.

        It must be called only after a message has announced this to the other end, and before
        anything else has come.
        """
        if self._received or (self._opening is not None and self._opening.holds_part):
            raise AuthenticationError("sent more than was asked for")
        return self._end if isinstance(self._end, socket.socket) else self._end.detach()


def accept_unknown(
    listener: socket.socket,
    coming: dict[int, SealedConnection],
    most: int,
    connection_of: Callable[[socket.socket, Role], SealedConnection],
) -> None:
    """Accept one connection, if there is one, whose other end is not authenticated yet.

    Parameters
    ----------
    listener : socket
        The listening socket, not blocking.
    coming : dict
        By descriptor, the connections that are not authenticated yet, oldest first; the new one is
        added.
    most : int
        How many are kept; the oldest makes room.
    connection_of : callable
        Makes a connection; OSError: the other end is gone already.
    """
    try:
        end, _ = listener.accept()
    except OSError:
        return
    try:
        tune_socket(end)
        connection = connection_of(end, Role.ACCEPTS)
    except OSError:
        end.close()
        return
    if len(coming) >= most:
        coming.pop(next(iter(coming))).close()
    coming[connection.fileno()] = connection
