"""Connections between ranks of different hosts, each opened when a first message needs it.

Each rank listens at a port of its own, and a rank that has something to send connects. If both
ranks of a pair connect at once, the connection of the lower rank stays: that rank refuses the other
one, and the higher rank takes the lower rank's connection in place of its own.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpucoll.errors import AuthenticationError, GpucollError
from gpucoll.transport.tcp.connection import SealedConnection, accept_unknown
from gpucoll.transport.tcp.credentials import Credentials
from gpucoll.transport.tcp.handshake import Role, encode_purpose
from gpucoll.transport.tcp.sealed import Opening, Seal
from gpucoll.transport.tcp.socket_options import tune_socket

if TYPE_CHECKING:
    from gpucoll.transport.tcp.tls_relay import TlsRelay

MOST_BYTES: Final = 1 << 20
"""Limit of a sealed frame between two ranks."""
_MOST_UNKNOWN: Final = 64
"""Limit of connections whose other end has not identified itself; the oldest makes room."""
_AGAIN_S: Final = 0.5
"""Pause between two tries to connect."""
_PATIENCE_S: Final = 2.0
"""How long this rank's own attempt to connect takes precedence over the other rank's."""
WHERE: Final = b"where"
"""Sent, in place of this rank's number, to ask where the other rank stands."""
_MOST_ANSWER_BYTES: Final = 2048
_WELCOME, _COMING = b"welcome", b"coming"
"""Answers: this connection is accepted; or the answering rank's own one is on its way."""


class Pair(NamedTuple):
    """A connection that is open and authenticated.

    Attributes
    ----------
    rank : int
        The rank at the other end.
    end : socket
        The socket, over which anything may go from here on. What the rank that has connected sends
        comes first.
    seal, opening
        The keys of sealed frames.
    has_connected : bool
        Whether this rank has connected.
    """

    rank: int
    end: socket.socket
    seal: Seal
    opening: Opening
    has_connected: bool


class Question:
    """Asks one rank where it stands, over a connection of its own."""

    def __init__(
        self,
        address: tuple[str, int],
        connection_of: Callable[[socket.socket, Role], SealedConnection],
    ) -> None:
        self.text: str | None = None
        """The answer, once it has come."""
        self.trouble = ""
        """Why no answer can come."""
        self._connection_of = connection_of
        self._connection: SealedConnection | None = None
        self._end = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        self._end.setblocking(False)
        self.fd = self._end.fileno()
        self.is_open = self._end.connect_ex(address) in (0, errno.EINPROGRESS)

    def register(self, poll: select.poll) -> None:
        """Register the events that `go_on` waits for."""
        connection = self._connection
        events = select.POLLOUT
        if connection is not None:
            events = select.POLLIN | (connection.events if connection.is_sending else 0)
        poll.register(self.fd, events)

    def go_on(self) -> None:
        """Go on as far as possible without waiting."""
        try:
            if self._connection is None:
                _check_connected(self._end)
                self._connection = self._connection_of(self._end, Role.CONNECTS)
                self._connection.send(WHERE)
            self._connection.flush()
            answer = self._connection.receive()
        except (OSError, AuthenticationError) as error:
            self.is_open, self.trouble = False, _said(error)
            return
        if answer is not None:
            self.text, self.is_open = answer.decode(errors="replace"), False

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
        self._end.close()


def _check_connected(end: socket.socket) -> None:
    """Raise the OSError with which connecting failed, if it failed."""
    if number := end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(number, os.strerror(number))


def _said(error: OSError | AuthenticationError) -> str:
    return getattr(error, "strerror", None) or str(error)


class Pairs:
    """Opens the connections of one rank. No method but `ask` waits.

    All methods but `ask` and `close` are called from one thread.

    Parameters
    ----------
    rank : int
        This rank.
    addresses : sequence of (str, int)
        By rank, the address at which it listens.
    credentials : Credentials
        By which ranks authenticate each other.
    group : str
        The group's secret name.
    listener : socket
        This rank's listening socket; belongs to this object from here on.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[tuple[str, int]],
        credentials: Credentials,
        group: str,
        listener: socket.socket,
    ) -> None:
        listener.setblocking(False)
        self._rank = rank
        self._addresses = addresses
        self._credentials = credentials
        self._purpose = encode_purpose("message", group)
        self._listener = listener
        self._coming: dict[int, SealedConnection] = {}
        """By descriptor: connections from ranks that have not yet told their number."""
        self._going: dict[int, tuple[int, socket.socket]] = {}
        """By descriptor: connections in progress, and the rank at the other end."""
        self._asked: dict[int, SealedConnection] = {}
        """By rank: connections that are open, but whose other end has not answered yet."""
        self._began: dict[int, float] = {}
        """By rank: when the last try to connect began."""
        self._wanted: dict[int, float] = {}
        """By rank: when to try next to connect, for ranks that are not connected."""
        self._known: set[int] = set()
        """The ranks to which there is, or was, a connection."""
        self.answer: Callable[[], str] = str
        """Describes where this rank stands, for a rank that asks over a connection of its own."""
        self.trouble: dict[int, str] = {}
        """By rank: why the last attempt to reach it failed, until one succeeds."""
        self._relay: TlsRelay | None = None

    def want(self, rank: int) -> None:
        """Begin to connect to a rank, unless that has begun."""
        if rank not in self._known and not self._is_trying(rank):
            self._wanted[rank] = 0.0

    def _is_trying(self, rank: int) -> bool:
        is_going = any(to == rank for to, _ in self._going.values())
        return is_going or rank in self._wanted or rank in self._asked

    def _refuses(self, rank: int) -> bool:
        """Return whether a rank that has connected must take this rank's connection instead."""
        if rank < self._rank:
            return False
        is_new = time.monotonic() - self._began.get(rank, 0.0) < _PATIENCE_S
        is_going = any(to == rank for to, _ in self._going.values())
        return rank in self._asked or (is_going and is_new)

    @property
    def is_connecting(self) -> bool:
        """Whether a connection is wanted that is not open yet."""
        return bool(self._wanted or self._going or self._asked or self._coming)

    def register(self, poll: select.poll) -> None:
        """Register all events that `handle` must be called for."""
        poll.register(self._listener, select.POLLIN)
        for fd in self._going:
            poll.register(fd, select.POLLOUT)
        for connection in (*self._coming.values(), *self._asked.values()):
            poll.register(
                connection, select.POLLIN | (connection.events if connection.is_sending else 0)
            )

    def handle(self, ready: set[int]) -> list[Pair]:
        """Handle the events of these descriptors; return the connections that are open now."""
        now, made = time.monotonic(), []
        for rank in [rank for rank, moment in self._wanted.items() if now >= moment]:
            del self._wanted[rank]
            self._connect(rank)
        for fd in ready & self._going.keys():
            self._connected(*self._going.pop(fd))
        for rank, connection in list(self._asked.items()):
            if connection.fileno() in ready and (pair := self._hear_answer(rank, connection)):
                made.append(pair)
        for fd in ready & self._coming.keys():
            if pair := self._hear(fd):
                made.append(pair)
        if self._listener.fileno() in ready:
            accept_unknown(self._listener, self._coming, _MOST_UNKNOWN, self._connection)
        return made

    # --- going to others --------------------------------------------------------------------------

    def _connect(self, rank: int) -> None:
        self._began[rank] = time.monotonic()
        address, port = self._addresses[rank]
        end = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        tune_socket(end)
        end.setblocking(False)
        number = end.connect_ex((address, port))
        if number not in (0, errno.EINPROGRESS):
            end.close()
            self._fail(rank, os.strerror(number))
        else:
            self._going[end.fileno()] = rank, end

    def _connected(self, rank: int, end: socket.socket) -> None:
        try:
            _check_connected(end)
            self._asked[rank] = self._connection(end, Role.CONNECTS)
            self._asked[rank].send(f"{self._rank}".encode())
        except (OSError, AuthenticationError) as error:
            if (connection := self._asked.pop(rank, None)) is not None:
                connection.close()
            end.close()
            self._fail(rank, _said(error))

    def _hear_answer(self, rank: int, connection: SealedConnection) -> Pair | None:
        try:
            connection.flush()
            answer = connection.receive()
            if answer is None:
                return None
            if answer == _WELCOME:
                del self._asked[rank]
                return self._opened(rank, connection, True)
            self._fail(rank, "its own connection did not come")
        except (OSError, AuthenticationError) as error:
            self._fail(rank, _said(error))
        self._asked.pop(rank).close()
        return None

    def _fail(self, rank: int, why: str) -> None:
        self.trouble[rank] = why
        self._wanted[rank] = time.monotonic() + _AGAIN_S

    def _connection(self, end: socket.socket, role: Role) -> SealedConnection:
        return SealedConnection(end, self._credentials, role, self._purpose, MOST_BYTES)

    def _opened(self, rank: int, connection: SealedConnection, has_connected: bool) -> Pair:
        self._known.add(rank)
        self.trouble.pop(rank, None)
        end, seal, opening = connection.detach_with_seals()
        # A rank that reads nothing for a long time is late, not lost: the links tell the two apart.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        if self._credentials.tls is not None:
            end = self._plain(end)
        return Pair(rank, end, seal, opening, has_connected)

    def _plain(self, end: Any) -> socket.socket:
        """Return a socket for compiled code, whose plain bytes go through the TLS socket `end`."""
        # Without TLS none of this is loaded.
        from gpucoll.transport.tcp.tls import is_in_kernel
        from gpucoll.transport.tcp.tls_relay import TlsRelay

        if is_in_kernel(end):
            plain: socket.socket = end
            return plain
        if self._relay is None:
            self._relay = TlsRelay()
        return self._relay.put_behind(end)

    # --- others come ------------------------------------------------------------------------------

    def _hear(self, fd: int) -> Pair | None:
        connection = self._coming[fd]
        try:
            connection.flush()
            message = connection.receive()
            if message is None:
                return None
            if message == WHERE:
                connection.send(self.answer().encode(errors="replace")[:_MOST_ANSWER_BYTES])
                self._coming.pop(fd).close()
                return None
            rank = self._check(int(message))
            if self._refuses(rank):
                connection.send(_COMING)
            else:
                connection.send(_WELCOME)
                del self._coming[fd]
                self._give_up(rank)
                return self._opened(rank, connection, False)
        except (OSError, GpucollError, ValueError):  # not a rank, or this rank is closing
            pass
        self._coming.pop(fd).close()
        return None

    def _check(self, rank: int) -> int:
        if not 0 <= rank < len(self._addresses) or rank == self._rank or rank in self._known:
            raise ValueError("a rank that is not expected")
        return rank

    def _give_up(self, rank: int) -> None:
        """Give up connecting to a rank, because that rank has connected."""
        self._wanted.pop(rank, None)
        if (connection := self._asked.pop(rank, None)) is not None:
            connection.close()
        for fd, (to, end) in list(self._going.items()):
            if to == rank:
                del self._going[fd]
                end.close()

    # --- asking -----------------------------------------------------------------------------------

    def ask(self, ranks: Sequence[int], timeout_s: float) -> dict[int, str]:
        """Return where ranks stand by their own answers, or why they cannot be reached.

        A rank with neither an answer nor a failure in time is left out. Any thread may call this.
        """
        asked = {rank: Question(self._addresses[rank], self._connection) for rank in ranks}
        stop = time.monotonic() + timeout_s
        try:
            while waiting := [each for each in asked.values() if each.is_open]:
                left_s = stop - time.monotonic()
                if left_s <= 0:
                    break
                poll = select.poll()
                for each in waiting:
                    each.register(poll)
                ready = {fd for fd, _ in poll.poll(1000 * left_s)}
                for each in waiting:
                    if each.fd in ready:
                        each.go_on()
            told = {rank: self._told(rank, each) for rank, each in asked.items()}
            return {rank: text for rank, text in told.items() if text}
        finally:
            for each in asked.values():
                each.close()

    def _told(self, rank: int, question: Question) -> str:
        if question.text is not None:
            return question.text
        trouble = question.trouble or self.trouble.get(rank)
        return f"out of reach: {trouble}" if trouble else ""

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close everything that is not open yet, and the listening socket."""
        self._listener.close()
        for connection in (*self._coming.values(), *self._asked.values()):
            connection.close()
        for _, end in self._going.values():
            end.close()
        self._coming, self._going, self._asked, self._wanted = {}, {}, {}, {}
        if self._relay is not None:
            self._relay.close()
