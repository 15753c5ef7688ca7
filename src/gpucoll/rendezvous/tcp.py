"""Let ranks of several hosts meet at rank 0's TCP port; each proves that it knows the secret."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time

from gpucoll.errors import AuthenticationError, RendezvousError
from gpucoll.rendezvous import frames
from gpucoll.rendezvous.addresses import join_address, split_address
from gpucoll.rendezvous.endpoint import TurnedAwayError
from gpucoll.rendezvous.frames import INTRODUCTION_BYTES, Message
from gpucoll.rendezvous.meeting_points import HandedPoint, MeetingPoint
from gpucoll.topology.interfaces import check_not_link_local, own_address
from gpucoll.transport.tcp.connection import SealedConnection
from gpucoll.transport.tcp.credentials import Credentials, job_tls
from gpucoll.transport.tcp.handshake import ClosedEarlyError, Role, encode_purpose
from gpucoll.transport.tcp.secret import missing_secret_error
from gpucoll.transport.tcp.socket_options import tune_socket

__all__ = ["TROUBLES", "TcpConnection", "TcpEndpoint", "listen_at"]

_BACKLOG = 4096
_CONNECTING_S = 2.0
"""How long one attempt to connect may take: a host that drops packets never answers."""
_SLICE_S = 0.02
_NO_ANSWER = errno.ETIMEDOUT
TROUBLES = {
    errno.ECONNREFUSED: "nobody listens there, or a firewall rejects it",
    errno.ETIMEDOUT: "no answer: is the host up, and does a firewall drop packets to it?",
    errno.EHOSTUNREACH: "no way there from this host: is it the right interface?",
    errno.ENETUNREACH: "no way there from this host: is it the right interface?",
}
"""Possible causes of a connection that cannot be made."""


class TcpConnection:
    """A connection that carries the messages of a meeting."""

    def __init__(self, connection: SealedConnection) -> None:
        self._connection = connection
        self.peer = connection.peer

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._connection.fileno()

    @property
    def is_known(self) -> bool:
        """Whether the other end has been authenticated."""
        return self._connection.is_known

    @property
    def is_sending(self) -> bool:
        """Whether there is unsent data."""
        return self._connection.is_sending

    @property
    def events(self) -> int:
        """The events to poll for while it `is_sending`."""
        return self._connection.events

    def send(self, message: bytes, fds: list[int] | None = None) -> None:
        """Send an encoded message, or as much of it as the other end takes now."""
        assert not fds, "no descriptors go between hosts"
        try:
            self._connection.send(message)
        except ClosedEarlyError as error:
            raise TurnedAwayError(str(error)) from None

    def flush(self) -> None:
        """Send what the other end takes now; OSError: the other end is gone."""
        try:
            self._connection.flush()
        except ClosedEarlyError as error:
            raise TurnedAwayError(str(error)) from None

    def receive(self) -> tuple[Message, list[int]] | None:
        """Return the next message once it is complete; None until the peer is authenticated."""
        try:
            message = self._connection.receive()
        except ClosedEarlyError as error:
            raise TurnedAwayError(str(error)) from None
        return None if message is None else (frames.decode_whole(message), [])

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()


class TcpEndpoint:
    """Rank 0's port, at the place that the meeting point provides.

    Parameters
    ----------
    point : MeetingPoint
        Provides rank 0's address.
    secret : bytes or None
        The job's secret; None: the meeting point provides it, or there is none.
    what : str
        Identifies the meeting: the same on all of its ranks, and different for every other meeting.
    who : str
        This rank, for messages.

    Raises
    ------
    ArgumentError
        Certificates are set, but cannot be used.
    """

    def __init__(self, point: MeetingPoint, secret: bytes | None, what: str, who: str) -> None:
        self._point = point
        self._secret = secret
        self._purpose = encode_purpose("meeting", what)
        self._who = who
        self._tls = job_tls(who)
        if self._tls is None and isinstance(point, HandedPoint):
            self._tls = point.credentials.tls  # even if the variables have changed since
        self._trouble = ""
        self._is_published = False
        self._connecting: tuple[str, socket.socket, float] | None = None
        """The address, the socket, and when it began to connect."""

    @property
    def secret(self) -> bytes:
        """The job's secret; AuthenticationError: there is none."""
        secret = self._secret or self._point.secret()
        if secret is None:
            raise missing_secret_error(self._who)
        return secret

    @property
    def credentials(self) -> Credentials:
        """By which the job's ranks authenticate each other; AuthenticationError: no secret."""
        return Credentials(self.secret, self._tls)

    def listen(self, who: str) -> socket.socket:
        """Return rank 0's listening socket, and publish its address."""
        _ = self.secret
        if isinstance(self._point, HandedPoint) and self._point.listener is not None:
            return self._point.listener
        place = self._point.listen_at() or (self.own_address(), 0)
        listener = listen_at(*place, f"{who} cannot listen at the meeting point", _BACKLOG)
        try:
            self._point.publish(join_address(*listener.getsockname()[:2]))
        except BaseException:
            listener.close()
            raise
        self._is_published = True
        return listener

    def own_address(self) -> str:
        """Return this host's address on the chosen interface, or on the one towards rank 0."""
        return own_address(self._point.leads_to())

    def accept(self, end: socket.socket, n_fds: int) -> TcpConnection:
        """Return a connection whose other end is not authenticated yet."""
        tune_socket(end)
        try:
            return TcpConnection(self._connection(end, Role.ACCEPTS, INTRODUCTION_BYTES))
        except OSError:  # the peer is gone already
            raise AuthenticationError("a peer connected and left") from None

    def _connection(self, end: socket.socket, role: Role, most_bytes: int) -> SealedConnection:
        return SealedConnection(end, self.credentials, role, self._purpose, most_bytes + 8)

    def connect(self, most_bytes: int, most_fds: int) -> TcpConnection | None:
        """Return a connection to rank 0."""
        if self._connecting is None:
            self._begin()
        if self._connecting is None:
            return None
        address, end, since = self._connecting
        poll = select.poll()
        poll.register(end, select.POLLOUT)
        is_over = bool(poll.poll(1000 * _SLICE_S))
        if not is_over and time.monotonic() - since < _CONNECTING_S:
            return None  # before calling again, the caller checks for signals and its deadline
        self._connecting = None
        try:
            number = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if is_over else _NO_ANSWER
            if number:
                raise OSError(number, os.strerror(number))
            return TcpConnection(self._connection(end, Role.CONNECTS, most_bytes))
        except OSError as error:
            end.close()
            self._note(address, error)
            return None
        except BaseException:
            end.close()
            raise

    def _begin(self) -> None:
        """Begin to connect to rank 0, if its address is known."""
        address = self._point.find()
        if address is None:
            trouble = self._point.trouble
            self._trouble = f" {trouble}." if trouble else f" No rank is at {self._point.text} yet."
            return
        host, port = split_address(address)
        end = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            tune_socket(end)
            end.setblocking(False)
            number = end.connect_ex((host, port))
        except BaseException:
            end.close()
            raise
        if number in (0, errno.EINPROGRESS):
            self._connecting = address, end, time.monotonic()
        else:
            end.close()
            self._note(address, OSError(number, os.strerror(number)))

    def _note(self, address: str, error: OSError) -> None:
        reason = error.strerror or str(error)
        hint = TROUBLES.get(error.errno or 0)
        self._trouble = f" Connecting to {address}: {reason}{f' ({hint})' if hint else ''}."

    def trouble(self) -> str:
        """Return why the last attempts to connect failed."""
        return self._trouble

    def close(self) -> None:
        """Remove what was published, and give up connecting."""
        if self._connecting is not None:
            self._connecting[1].close()
            self._connecting = None
        if self._is_published:
            self._is_published = False
            self._point.withdraw()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listen_at(host: str, port: int, what: str, backlog: int = 64) -> socket.socket:
    """Return a socket that listens at one address of this host only.

    Raises
    ------
    RendezvousError
        The socket cannot listen; `what` begins the sentence. Or the address is a link-local one of
        IPv6.
    """
    check_not_link_local(host)
    listener = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            with contextlib.suppress(OSError):
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        tune_socket(listener)
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        taken = " Another job, or another program, has the port: choose a free one."
        remedy = taken if error.errno == errno.EADDRINUSE else ""
        raise RendezvousError(
            f"{what}, {join_address(host, port)}: {error.strerror}.{remedy}"
        ) from error
    return listener
