"""Connect the leaders of the hosts: each to its neighbours, the lower-numbered host first."""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from gpucoll import config
from gpucoll.errors import AuthenticationError, GpucollError, RendezvousDeadlineError
from gpucoll.group.world.connector import Answer, Connector
from gpucoll.group.world.links import Links
from gpucoll.transport.tcp.connection import SealedConnection, spelled
from gpucoll.transport.tcp.credentials import Credentials
from gpucoll.transport.tcp.handshake import encode_purpose

if TYPE_CHECKING:
    import ssl

    from gpucoll.transport.tcp.tls_relay import TlsRelay

MOST_BYTES: Final = 1 << 32
"""Limit of a message between leaders."""
_SLICE_S: Final = 0.02
_BEGIN: Final = b"\1"
"""The first byte that the connecting leader sends over an unsealed connection."""
_all: weakref.WeakSet[Ends] = weakref.WeakSet()


def purpose_of(group: str) -> bytes:
    """Return the purpose of a group's links, for the handshake."""
    return encode_purpose("link", group)


class Connecting:
    """Makes the connections of one leader, of one purpose.

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
        self._given = credentials, purpose, MOST_BYTES
        self._own_address = own_address
        self._made: dict[int, SealedConnection] = {}
        """By host: connections whose introduction is complete."""

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
        connector = Connector(
            self._here, self._addresses, *self._given, listener, self._answer, self._own_address
        )
        for host in self._addresses:
            if host > self._here:
                connector.want(host)
        try:
            while len(self._made) < len(self._addresses):
                look()
                if time.monotonic() > deadline:
                    raise self._late(connector)
                poll = select.poll()
                connector.register(poll)
                ready = {fd for fd, _ in poll.poll(1000 * _SLICE_S)}
                for host, connection, _ in connector.handle(ready):
                    self._made[host] = connection
            return self._made
        except BaseException:
            for connection in self._made.values():
                connection.close()
            raise
        finally:
            connector.close()

    def _answer(self, introduction: bytes) -> Answer:
        host = int(introduction)
        if host >= self._here or host not in self._addresses or host in self._made:
            raise ValueError("a host that is not expected")
        return Answer(host)

    def _late(self, connector: Connector) -> RendezvousDeadlineError:
        missing = [host for host in self._addresses if host not in self._made]
        found = []
        for host in missing:
            address = spelled(tuple(self._addresses[host]))
            why = connector.trouble.get(
                host, "it did not come" if host < self._here else "no answer"
            )
            found.append(f"{self._names[host]} at {address} ({why})")
        return RendezvousDeadlineError(
            f"the ranks have met, but {self._names[self._here]} has no connection with "
            f"{', '.join(found)}: does a firewall between the hosts allow TCP between ranks, and "
            f"is that the right interface ({config.INTERFACES})?{connector.turned_away}"
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
        from gpucoll.transport.tcp.tls import is_in_kernel
        from gpucoll.transport.tcp.tls_relay import TlsRelay

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


class Ends:
    """One leader's connections of one purpose, over which plain bytes go once they are open.

    Parameters
    ----------
    here : int
        This host's number.
    names : tuple of str
        What errors call the hosts.
    credentials : Credentials
        By which leaders authenticate each other; with certificates the sockets are of TLS.
    purpose : bytes
        The connections' purpose, for the handshake.
    are_plain : bool
        Whether compiled code uses the sockets: TLS is then behind them.

    Attributes
    ----------
    sockets : dict
        The open connections by host and lane, in the order of opening.
    """

    def __init__(
        self,
        here: int,
        names: tuple[str, ...],
        credentials: Credentials,
        purpose: bytes,
        *,
        are_plain: bool = False,
    ) -> None:
        self._here = here
        self._names = names
        self._given = credentials, purpose
        self._plain = PlainEnds() if are_plain else None
        self.sockets: dict[tuple[int, int], socket.socket] = {}
        _all.add(self)

    def open(
        self,
        listener: socket.socket,
        addresses: Mapping[int, Any],
        look: Callable[[], None],
        deadline: float,
        *,
        lane: int = 0,
        own_address: str = "",
    ) -> tuple[int, int] | None:
        """Open connections, as the other leaders do; if one ended again, return its host and errno.

        After any failure all connections are closed.

        Parameters
        ----------
        listener : socket
            This leader's listening socket.
        addresses : mapping of int to (str, int)
            By host, where its leader listens.
        look : callable
            Called again and again while waiting; raises if the wait is in vain.
        deadline : float
            As `time.monotonic` counts.
        lane : int
            Number of the connection between the same two leaders.
        own_address : str
            Address of the interface to connect from, if it matters.

        Raises
        ------
        RendezvousDeadlineError
            A host could not be reached in time.
        """
        made: dict[int, SealedConnection] = {}
        host = self._here
        try:
            task = Connecting(self._here, self._names, addresses, *self._given, own_address)
            made = task.connect(listener, look, deadline)
            for host, connection in sorted(made.items()):
                end = unsealed(connection, host > self._here, look)
                self.sockets[host, lane] = end if self._plain is None else self._plain.of(end)
        except BaseException as error:
            for connection in made.values():
                connection.close()
            self.close()
            is_own = isinstance(error, GpucollError) and not isinstance(error, AuthenticationError)
            if made and not is_own and isinstance(error, (OSError, AuthenticationError)):
                return host, getattr(error, "errno", 0) or 0
            raise
        return None

    def close(self) -> None:
        """Close the open connections; whoever needs them opens them again."""
        for end in self.sockets.values():
            end.close()
        self.sockets = {}

    def end(self) -> None:
        """Close the open connections, after what was written has been sent."""
        self.close()
        if self._plain is not None:
            self._plain.close()


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


def _after_fork() -> None:
    # A child that outlives its parent would keep the connections open, and other hosts would not
    # notice the parent's end.
    for ends in list(_all):
        ends.close()


os.register_at_fork(after_in_child=_after_fork)
