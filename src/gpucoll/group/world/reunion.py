"""Connections between hosts after losses: the rank that speaks for a host reaches all others.

The links belong to leaders, which may be dead. So all ranks of a host hold the socket at which
their first leader listened: as long as one of them lives, the host can be reached at the address
that the others know. A host that refuses a connection has lost all its ranks; one that does not
answer at all cannot be reached. Each end sends only over the connection that it has opened itself.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpucoll.errors import AuthenticationError
from gpucoll.transport.tcp.connection import SealedConnection, accept_unknown
from gpucoll.transport.tcp.credentials import Credentials
from gpucoll.transport.tcp.handshake import Role, encode_purpose
from gpucoll.transport.tcp.socket_options import tune_socket

_MOST_BYTES: Final = 1 << 22
_MOST_COMING: Final = 256
_UNREACHABLE_S: Final = 1.5
"""How long to wait for a host's answer to an attempt to connect.

The host's kernel answers whatever its processes do; a lost packet adds one second.
"""
_AGAIN_S: Final = 0.1
_all: weakref.WeakSet[MeetingPlaces] = weakref.WeakSet()

Message = dict[str, Any]


class MeetingPlaces:
    """The addresses at which the hosts of a group can be reached, whichever of their ranks live.

    Parameters
    ----------
    group : str
        The group's secret name.
    addresses : sequence of (str, int)
        By host, its address.
    listener_fd : int
        This host's listening socket; belongs to this object from here on.
    credentials : Credentials
        By which the hosts authenticate each other.
    """

    def __init__(
        self,
        group: str,
        addresses: Sequence[tuple[str, int]],
        listener_fd: int,
        credentials: Credentials,
    ) -> None:
        self.addresses = [(str(host), int(port)) for host, port in addresses]
        self.listener = socket.socket(fileno=listener_fd)
        self.credentials = credentials
        self.purpose = encode_purpose("shrink", group)
        _all.add(self)

    def close(self) -> None:
        """Close the listening socket."""
        self.listener.close()


class Reunion:
    """The connections of the rank that speaks for its host.

    Parameters
    ----------
    here : int
        This host's number.
    hosts : sequence of int
        The other hosts that are to be reached.
    places : MeetingPlaces
        The addresses of the hosts.
    """

    def __init__(self, here: int, hosts: Sequence[int], places: MeetingPlaces) -> None:
        self._here = here
        self._places = places
        self._listener = places.listener
        self._listener.setblocking(False)
        self._next_try = {host: 0.0 for host in hosts if host != here}
        self._going: dict[int, tuple[int, socket.socket, float]] = {}
        self._out: dict[int, SealedConnection] = {}
        self._coming: dict[int, SealedConnection] = {}
        self.lost: dict[int, str] = {}
        """By host: why it is lost."""

    def tell(self, host: int, message: Mapping[str, Any]) -> None:
        """Send a message to a host if it is connected; if not, it gets the state once it is."""
        connection = self._out.get(host)
        if connection is None:
            return
        try:
            connection.send(json.dumps({**message, "from": self._here}).encode())
        except (OSError, AuthenticationError):
            self._drop(host)

    @property
    def connected(self) -> list[int]:
        """The hosts that can be sent messages."""
        return [*self._out]

    def turn(self, wait_s: float) -> tuple[list[int], list[Message]]:
        """Wait a moment; return the newly connected hosts, and the messages that have come."""
        self._try()
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for fd in self._going:
            poll.register(fd, select.POLLOUT)
        for end in [*self._out.values(), *self._coming.values()]:
            poll.register(end, select.POLLIN | (end.events if end.is_sending else 0))
        ready = {fd for fd, _ in poll.poll(1000 * wait_s)}
        fresh = [host for fd in ready & self._going.keys() if (host := self._connected(fd)) >= 0]
        for host, connection in list(self._out.items()):
            if connection.fileno() in ready:
                self._serve_out(host, connection)
        if self._listener.fileno() in ready:
            accept_unknown(self._listener, self._coming, _MOST_COMING, self._connection)
        found = [message for fd in ready & self._coming.keys() for message in self._hear(fd)]
        return fresh, found

    def _try(self) -> None:
        now = time.monotonic()
        for fd, (host, end, since) in list(self._going.items()):
            if now - since > _UNREACHABLE_S:
                del self._going[fd]
                end.close()
                self.lost[host] = "cannot be reached"
        for host, moment in list(self._next_try.items()):
            if now >= moment and host not in self.lost:
                del self._next_try[host]
                self._connect(host)

    def _connect(self, host: int) -> None:
        address, port = self._places.addresses[host]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        end = socket.socket(family, socket.SOCK_STREAM)
        try:
            tune_socket(end)
            end.setblocking(False)
            number = end.connect_ex((address, port))
        except BaseException:
            end.close()
            raise
        if number not in (0, errno.EINPROGRESS):
            end.close()
            self._fail(host, number)
            return
        self._going[end.fileno()] = host, end, time.monotonic()

    def _connected(self, fd: int) -> int:
        """Handle the end of an attempt to connect; return the host, or -1 after a failure."""
        host, end, _ = self._going.pop(fd)
        number = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if number:
                raise OSError(number, os.strerror(number))
            self._out[host] = self._connection(end, Role.CONNECTS)
        except OSError as error:
            end.close()
            self._fail(host, error.errno or 0)
            return -1
        return host

    def _fail(self, host: int, number: int) -> None:
        if number in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT):
            refused = number == errno.ECONNREFUSED
            self.lost[host] = "nobody is left there" if refused else "cannot be reached"
        self._next_try[host] = time.monotonic() + _AGAIN_S

    def _serve_out(self, host: int, connection: SealedConnection) -> None:
        """Send what is left; only the greeting is received this way."""
        try:
            connection.flush()
            connection.receive()
        except (OSError, AuthenticationError):
            self._drop(host)

    def _drop(self, host: int) -> None:
        self._out.pop(host).close()
        self._next_try[host] = time.monotonic() + _AGAIN_S

    def _connection(self, end: socket.socket, role: Role) -> SealedConnection:
        places = self._places
        return SealedConnection(end, places.credentials, role, places.purpose, _MOST_BYTES)

    def _hear(self, fd: int) -> list[Message]:
        connection, found = self._coming[fd], []
        try:
            connection.flush()
            while (encoded := connection.receive()) is not None:
                found.append(json.loads(encoded))
        except (OSError, AuthenticationError, ValueError):
            self._coming.pop(fd).close()
        return found

    def close(self) -> None:
        """Send unsent data as far as that goes at once, and close the connections."""
        for connection in [*self._out.values(), *self._coming.values()]:
            connection.close()
        for _, end, _ in self._going.values():
            end.close()
        self._out, self._coming, self._going = {}, {}, {}


def _after_fork() -> None:
    # A child that outlives its parent would go on listening, and other hosts would not notice the
    # parent's end.
    for places in list(_all):
        places.close()


os.register_at_fork(after_in_child=_after_fork)
