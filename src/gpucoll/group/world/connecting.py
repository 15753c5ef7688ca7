"""Connect the leaders of the hosts: each to its neighbours, the lower-numbered host first."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from gpucoll import config
from gpucoll.errors import AuthenticationError, RendezvousDeadlineError
from gpucoll.group.world.links import Links
from gpucoll.transport.tcp.connection import SealedConnection, accept_unknown, spelled
from gpucoll.transport.tcp.credentials import Credentials
from gpucoll.transport.tcp.handshake import Role, encode_purpose
from gpucoll.transport.tcp.socket_options import tune_socket

if TYPE_CHECKING:
    import ssl

    from gpucoll.transport.tcp.tls_relay import TlsRelay

MOST_BYTES: Final = 1 << 32
"""Limit of a message between leaders."""
_SLICE_S: Final = 0.02
_MOST_UNKNOWN: Final = 64
"""Limit of connections whose other end has not identified itself; the oldest makes room."""
_AGAIN_S: Final = 0.5
"""Pause between two tries to connect."""
_BEGIN: Final = b"\1"
"""The first byte that the connecting leader sends over an unsealed connection."""


def purpose_of(group: str) -> bytes:
    """Return the purpose of a group's links, for the handshake."""
    return encode_purpose("link", group)


class Connecting:
    """Makes the links of one leader.

    Parameters
    ----------
    here : int
        This host's number.
    names : tuple of str
        What errors call the hosts.
    addresses : mapping of int to (str, int)
        By neighbour, where its leader listens.
    credentials : Credentials
        By which leaders authenticate each other.
    purpose : bytes
        The connections' purpose, for the handshake.
    own_address : str
        Address of the interface to connect from; empty: the one that leads to the other host.
    """

    def __init__(
        self,
        here: int,
        names: tuple[str, ...],
        addresses: Mapping[int, Any],
        credentials: Credentials,
        purpose: bytes,
        own_address: str = "",
    ) -> None:
        self._here = here
        self._names = names
        self._addresses = addresses
        self._credentials = credentials
        self._purpose = purpose
        self._own_address = own_address
        self._made: dict[int, SealedConnection] = {}
        """By host: connections whose introduction is complete."""
        self._coming: dict[int, SealedConnection] = {}
        """By descriptor: connections from hosts that have not yet told which host they are."""
        self._going: dict[int, tuple[int, socket.socket]] = {}
        """By descriptor: connections in progress, and the host at the other end."""
        self._asked: dict[int, SealedConnection] = {}
        """By host: connections that are open, but whose other end has not answered yet."""
        self._next_try = dict.fromkeys((host for host in addresses if host > here), 0.0)
        self._trouble: dict[int, str] = {}
        self._turned_away = ""
        """The last connection that was refused, and why."""

    def run(
        self, listener: socket.socket, bell_fd: int, look: Callable[[], None], deadline: float
    ) -> Links:
        """Connect to all neighbours; return the links.

        Raises
        ------
        RendezvousDeadlineError
            A neighbour could not be reached in time.
        """
        made = self.connect(listener, look, deadline)
        return Links(self._here, len(self._names), made, bell_fd)

    def connect(
        self, listener: socket.socket, look: Callable[[], None], deadline: float
    ) -> dict[int, SealedConnection]:
        """Connect to all neighbours; return the connections by host. Raises as `run` does.

        Only the introduction has been received over each of them.
        """
        listener.setblocking(False)
        try:
            while len(self._made) < len(self._addresses):
                look()
                if time.monotonic() > deadline:
                    raise self._late()
                self._turn(listener)
            return self._made
        except BaseException:
            for connection in [*self._made.values(), *self._asked.values()]:
                connection.close()
            raise
        finally:
            for connection in self._coming.values():
                connection.close()
            for _, end in self._going.values():
                end.close()

    def _turn(self, listener: socket.socket) -> None:
        """Wait a moment, and handle what has happened."""
        now = time.monotonic()
        for host, moment in list(self._next_try.items()):
            if now >= moment:
                del self._next_try[host]
                self._connect(host)
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        for fd in self._going:
            poll.register(fd, select.POLLOUT)
        for connection in [*self._coming.values(), *self._asked.values()]:
            events = connection.events if connection.is_sending else 0
            poll.register(connection, select.POLLIN | events)
        ready = {fd for fd, _ in poll.poll(1000 * _SLICE_S)}
        for fd in ready & self._going.keys():
            self._connected(*self._going.pop(fd))
        for host, connection in list(self._asked.items()):
            if connection.fileno() in ready:
                self._hear_answer(host, connection)
        for fd in ready & self._coming.keys():
            self._hear(fd)
        if listener.fileno() in ready:
            accept_unknown(listener, self._coming, _MOST_UNKNOWN, self._connection)

    # --- going to others --------------------------------------------------------------------------

    def _connect(self, host: int) -> None:
        address, port = self._addresses[host]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        end = socket.socket(family, socket.SOCK_STREAM)
        tune_socket(end)
        end.setblocking(False)
        try:
            if self._own_address:
                end.bind((self._own_address, 0))
            number = end.connect_ex((address, port))
        except OSError as error:  # this host's address is gone
            number = error.errno or 0
        if number not in (0, errno.EINPROGRESS):
            end.close()
            self._fail(host, os.strerror(number))
            return
        self._going[end.fileno()] = host, end

    def _connected(self, host: int, end: socket.socket) -> None:
        number = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            end.close()
            self._fail(host, os.strerror(number))
            return
        try:
            connection = self._connection(end, Role.CONNECTS)
        except OSError as error:
            end.close()
            self._fail(host, str(error))
            return
        self._asked[host] = connection
        self._do(host, lambda: connection.send(f"{self._here}".encode()))

    def _hear_answer(self, host: int, connection: SealedConnection) -> None:
        """Take the other leader's confirmation that it expects this one."""

        def hear() -> None:
            connection.flush()
            if connection.receive() is not None:
                del self._asked[host]
                self._made[host] = connection

        self._do(host, hear)

    def _do(self, host: int, step: Callable[[], None]) -> None:
        try:
            step()
        except (OSError, AuthenticationError) as error:
            self._asked.pop(host).close()
            self._fail(host, str(error))

    def _fail(self, host: int, why: str) -> None:
        self._trouble[host] = why
        self._next_try[host] = time.monotonic() + _AGAIN_S

    def _connection(self, end: socket.socket, role: Role) -> SealedConnection:
        return SealedConnection(end, self._credentials, role, self._purpose, MOST_BYTES)

    # --- others come ------------------------------------------------------------------------------

    def _hear(self, fd: int) -> None:
        connection = self._coming[fd]
        try:
            connection.flush()
            message = connection.receive()
            if message is None:
                return
            host = int(message)
            if host >= self._here or host not in self._addresses or host in self._made:
                raise ValueError("a host that is not expected")
            connection.send(b"welcome")
        except (OSError, AuthenticationError, ValueError) as error:
            self._turned_away = f" Turned away: {connection.peer} {error}."
            self._coming.pop(fd).close()
            return
        del self._coming[fd]
        self._made[host] = connection

    # --- errors -----------------------------------------------------------------------------------

    def _late(self) -> RendezvousDeadlineError:
        missing = [host for host in self._addresses if host not in self._made]
        found = []
        for host in missing:
            address = spelled(tuple(self._addresses[host]))
            why = self._trouble.get(host, "it did not come" if host < self._here else "no answer")
            found.append(f"{self._names[host]} at {address} ({why})")
        return RendezvousDeadlineError(
            f"the ranks have met, but {self._names[self._here]} has no connection with "
            f"{', '.join(found)}: does a firewall between the hosts allow TCP between ranks, and "
            f"is that the right interface ({config.INTERFACES})?{self._turned_away}"
        )


class PlainEnds:
    """Makes sockets that compiled code can use of those that TLS may have wrapped."""

    def __init__(self) -> None:
        self._relay: TlsRelay | None = None

    def of(self, end: socket.socket) -> socket.socket:
        """Return a socket whose plain bytes go over `end`, which belongs to this object then."""
        if type(end) is socket.socket:
            return end
        # Without TLS none of this is loaded.
        from gpucoll.transport.tcp.tls_relay import TlsRelay
        from gpucoll.transport.tcp.tls_socket import is_in_kernel

        secured = cast("ssl.SSLSocket", end)
        if is_in_kernel(secured):
            return secured
        if self._relay is None:
            self._relay = TlsRelay()
        return self._relay.put_behind(secured)

    def close(self) -> None:
        """Send what has been written, for a few seconds at most, and end."""
        if self._relay is not None:
            self._relay.close()


def unsealed(connection: SealedConnection, begins: bool, look: Callable[[], None]) -> socket.socket:
    """Return the socket of a new connection, over which plain bytes go from here on.

    Parameters
    ----------
    connection : SealedConnection
        The connection, whose introduction is complete.
    begins : bool
        Whether this end sends the first byte, for which the other end waits. Without it, bytes that
        follow might be taken for the introduction's.
    look : callable
        Called again and again while waiting; raises if the wait is in vain.
    """
    end = connection.detach()
    # A leader that reads nothing for a long time is late, not lost: the links tell the two apart.
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
    if begins:
        connection.send_unsealed(_BEGIN)  # a new connection has room for it
        return end
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while (came := connection.receive_unsealed(1)) is None:
        poll.poll(1000 * _SLICE_S)
        look()
    if came != _BEGIN:
        raise ConnectionError("the other end is gone")
    return end
