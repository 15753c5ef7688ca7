"""The kit by which processes of different hosts connect: it connects, proves, names and answers.

Links, small calls, large arrays and messages all make their connections with it, each for a purpose
of its own. The handshake authenticates both ends. Then the end that has connected tells its number,
and the other end answers.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from gpucoll.errors import AuthenticationError, GpucollError
from gpucoll.transport.tcp.connection import SealedConnection, accept_unknown
from gpucoll.transport.tcp.credentials import Credentials
from gpucoll.transport.tcp.handshake import Role
from gpucoll.transport.tcp.socket_options import tune_socket

WELCOME: Final = b"welcome"
"""The answer that accepts a connection."""
_MOST_UNKNOWN: Final = 64
"""Limit of connections whose other end has not identified itself; the oldest makes room."""
_AGAIN_S: Final = 0.5
"""Pause between two tries to connect."""


class Made(NamedTuple):
    """A connection that both ends have accepted.

    Attributes
    ----------
    number : int
        The other end's number.
    connection : SealedConnection
        The connection, over which only the introduction has gone.
    has_connected : bool
        Whether this end has connected.
    """

    number: int
    connection: SealedConnection
    has_connected: bool


class Answer(NamedTuple):
    """What to answer to an introduction: a number if the connection is accepted, and a message."""

    number: int | None
    message: bytes = WELCOME


class Connector:
    """Connects one process to others by their numbers. No method waits.

    Parameters
    ----------
    number : int
        This process's number.
    addresses : mapping of int to (str, int)
        By number, where the others listen.
    credentials : Credentials
        By which both ends authenticate each other.
    purpose : bytes
        The connections' purpose, for the handshake.
    most_bytes : int
        Limit of a message over them.
    listener : socket
        Where the others connect; the caller keeps it.
    answer : callable
        Returns the `Answer` to an introduction; ValueError or GpucollError: it is turned away.
    own_address : str
        Address of the interface to connect from; empty: the one that leads to the other end.
    """

    def __init__(
        self,
        number: int,
        addresses: Mapping[int, Any],
        credentials: Credentials,
        purpose: bytes,
        most_bytes: int,
        listener: socket.socket,
        answer: Callable[[bytes], Answer],
        own_address: str = "",
    ) -> None:
        listener.setblocking(False)
        self._number = number
        self._addresses = addresses
        self._credentials = credentials
        self._purpose = purpose
        self._most_bytes = most_bytes
        self._listener = listener
        self._answer = answer
        self._own_address = own_address
        self._wanted: dict[int, float] = {}
        """By number: when to try next to connect."""
        self._going: dict[int, tuple[int, socket.socket]] = {}
        """By descriptor: connections in progress, and the number at the other end."""
        self._asked: dict[int, SealedConnection] = {}
        """By number: connections that are open, but whose other end has not answered yet."""
        self._coming: dict[int, SealedConnection] = {}
        """By descriptor: connections whose other end has not yet told its number."""
        self.began: dict[int, float] = {}
        """By number: when the last try to connect began."""
        self.trouble: dict[int, str] = {}
        """By number: why the last try to connect failed, until one succeeds."""
        self.turned_away = ""
        """The last connection that was refused, and why."""

    @property
    def is_connecting(self) -> bool:
        """Whether a connection is wanted that is not open yet."""
        return bool(self._wanted or self._going or self._asked or self._coming)

    def want(self, number: int) -> None:
        """Begin to connect, and try again until that succeeds or `give_up` is called."""
        self._wanted[number] = 0.0

    def is_going(self, number: int) -> bool:
        """Return whether this end is connecting, and the other end has not accepted yet."""
        return any(to == number for to, _ in self._going.values())

    def is_asked(self, number: int) -> bool:
        """Return whether the other end has accepted, and not answered yet."""
        return number in self._asked

    def is_trying(self, number: int) -> bool:
        """Return whether this end is to connect, or has begun."""
        return number in self._wanted or number in self._asked or self.is_going(number)

    def give_up(self, number: int) -> None:
        """Give up connecting to this number."""
        self._wanted.pop(number, None)
        if (connection := self._asked.pop(number, None)) is not None:
            connection.close()
        for fd, (to, end) in list(self._going.items()):
            if to == number:
                del self._going[fd]
                end.close()

    def register(self, poll: select.poll) -> None:
        """Register all events that `handle` must be called for."""
        poll.register(self._listener, select.POLLIN)
        for fd in self._going:
            poll.register(fd, select.POLLOUT)
        for connection in (*self._coming.values(), *self._asked.values()):
            events = connection.events if connection.is_sending else 0
            poll.register(connection, select.POLLIN | events)

    def handle(self, ready: set[int]) -> Iterator[Made]:
        """Handle the events of these descriptors; yield each connection once it is open.

        The caller notes it before it goes on: another one with the same number may have come.
        """
        now = time.monotonic()
        for number in [number for number, moment in self._wanted.items() if now >= moment]:
            del self._wanted[number]
            self._connect(number)
        for fd in ready & self._going.keys():
            self._connected(*self._going.pop(fd))
        for number, connection in list(self._asked.items()):
            if connection.fileno() in ready and self._hear_answer(number, connection):
                yield Made(number, connection, True)
        for fd in ready & self._coming.keys():
            connection = self._coming[fd]
            if (known := self._hear(fd, connection)) is not None:
                yield Made(known, connection, False)
        if self._listener.fileno() in ready:
            accept_unknown(self._listener, self._coming, _MOST_UNKNOWN, self.connection)

    def connection(self, end: socket.socket, role: Role) -> SealedConnection:
        """Return a socket as a connection of this purpose; the handshake begins."""
        return SealedConnection(end, self._credentials, role, self._purpose, self._most_bytes)

    # --- going to others --------------------------------------------------------------------------

    def _connect(self, number: int) -> None:
        self.began[number] = time.monotonic()
        address, port = self._addresses[number]
        end = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            tune_socket(end)
            end.setblocking(False)
            if self._own_address:
                end.bind((self._own_address, 0))
            failed = end.connect_ex((address, port))
        except OSError as error:  # this host's address is gone
            failed = error.errno or errno.EADDRNOTAVAIL
        if failed not in (0, errno.EINPROGRESS):
            end.close()
            self._fail(number, os.strerror(failed))
        else:
            self._going[end.fileno()] = number, end

    def _connected(self, number: int, end: socket.socket) -> None:
        try:
            check_connected(end)
            self._asked[number] = self.connection(end, Role.CONNECTS)
            self._asked[number].send(f"{self._number}".encode())
        except (OSError, AuthenticationError) as error:
            if (connection := self._asked.pop(number, None)) is not None:
                connection.close()
            end.close()
            self._fail(number, spelled_error(error))

    def _hear_answer(self, number: int, connection: SealedConnection) -> bool:
        """Take the other end's answer; return whether it has accepted the connection."""
        try:
            connection.flush()
            answer = connection.receive()
            if answer is None:
                return False
            if answer == WELCOME:
                del self._asked[number]
                self.trouble.pop(number, None)
                return True
            self._fail(number, "its own connection did not come")
        except (OSError, AuthenticationError) as error:
            self._fail(number, spelled_error(error))
        self._asked.pop(number).close()
        return False

    def _fail(self, number: int, why: str) -> None:
        self.trouble[number] = why
        self._wanted[number] = time.monotonic() + _AGAIN_S

    # --- others come ------------------------------------------------------------------------------

    def _hear(self, fd: int, connection: SealedConnection) -> int | None:
        """Answer the other end's introduction; return its number if it is accepted."""
        number = None
        try:
            connection.flush()
            introduction = connection.receive()
            if introduction is None:
                return None
            number, message = self._answer(introduction)
            connection.send(message)
        except (OSError, GpucollError, ValueError) as error:
            self.turned_away = f" Turned away: {connection.peer} {error}."
            number = None
        del self._coming[fd]
        if number is None:
            connection.close()
        else:
            self.trouble.pop(number, None)
        return number

    def close(self) -> None:
        """Close everything that is not open yet."""
        for connection in (*self._coming.values(), *self._asked.values()):
            connection.close()
        for _, end in self._going.values():
            end.close()
        for table in (self._coming, self._going, self._asked, self._wanted):
            table.clear()


def check_connected(end: socket.socket) -> None:
    """Raise the OSError with which connecting failed, if it failed."""
    if number := end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(number, os.strerror(number))


def spelled_error(error: OSError | AuthenticationError) -> str:
    """Return why a connection has failed."""
    return getattr(error, "strerror", None) or str(error)
