"""Connections between ranks of different hosts, each opened when a first message needs it.

Each rank listens at a port of its own, and a rank that has something to send connects. If both
ranks of a pair connect at once, the connection of the lower rank stays: that rank refuses the other
one, and the higher rank takes the lower rank's connection in place of its own.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from gpucoll.errors import AuthenticationError
from gpucoll.group.world.connecting import PlainEnds
from gpucoll.group.world.connector import Answer, Connector, check_connected, spelled_error
from gpucoll.transport.tcp.connection import SealedConnection
from gpucoll.transport.tcp.credentials import Credentials
from gpucoll.transport.tcp.handshake import Role, encode_purpose
from gpucoll.transport.tcp.sealed import Opening, Seal

MOST_BYTES: Final = 1 << 20
"""Limit of a sealed frame between two ranks."""
_PATIENCE_S: Final = 2.0
"""How long this rank's own attempt to connect takes precedence over the other rank's."""
WHERE: Final = b"where"
"""Sent, in place of this rank's number, to ask where the other rank stands."""
_MOST_ANSWER_BYTES: Final = 2048
_COMING: Final = b"coming"
"""The answer if the answering rank's own connection is on its way."""


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
                check_connected(self._end)
                self._connection = self._connection_of(self._end, Role.CONNECTS)
                self._connection.send(WHERE)
            self._connection.flush()
            answer = self._connection.receive()
        except (OSError, AuthenticationError) as error:
            self.is_open, self.trouble = False, spelled_error(error)
            return
        if answer is not None:
            self.text, self.is_open = answer.decode(errors="replace"), False

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
        self._end.close()


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
        self._rank = rank
        self._addresses = addresses
        self._listener = listener
        self._connector = Connector(
            rank,
            dict(enumerate(addresses)),
            credentials,
            encode_purpose("message", group),
            MOST_BYTES,
            listener,
            self._answer_to,
        )
        self._known: set[int] = set()
        """The ranks to which there is, or was, a connection."""
        self.answer: Callable[[], str] = str
        """Describes where this rank stands, for a rank that asks over a connection of its own."""
        self._plain = PlainEnds()

    @property
    def trouble(self) -> dict[int, str]:
        """By rank: why the last attempt to reach it failed, until one succeeds."""
        return self._connector.trouble

    def want(self, rank: int) -> None:
        """Begin to connect to a rank, unless that has begun."""
        if rank not in self._known and not self._connector.is_trying(rank):
            self._connector.want(rank)

    @property
    def is_connecting(self) -> bool:
        """Whether a connection is wanted that is not open yet."""
        return self._connector.is_connecting

    def register(self, poll: select.poll) -> None:
        """Register all events that `handle` must be called for."""
        self._connector.register(poll)

    def handle(self, ready: set[int]) -> list[Pair]:
        """Handle the events of these descriptors; return the connections that are open now."""
        made = []
        for rank, connection, has_connected in self._connector.handle(ready):
            self._known.add(rank)
            end, seal, opening = connection.detach_with_seals()
            # A rank that reads nothing for long is late, not lost: the links tell the two apart.
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
            made.append(Pair(rank, self._plain.of(end), seal, opening, has_connected))
        return made

    def _answer_to(self, introduction: bytes) -> Answer:
        """Return the answer to a rank that has connected, or that asks where this one stands."""
        if introduction == WHERE:
            return Answer(None, self.answer().encode(errors="replace")[:_MOST_ANSWER_BYTES])
        rank = int(introduction)
        if not 0 <= rank < len(self._addresses) or rank == self._rank or rank in self._known:
            raise ValueError("a rank that is not expected")
        if self._refuses(rank):
            return Answer(None, _COMING)
        self._connector.give_up(rank)
        return Answer(rank)

    def _refuses(self, rank: int) -> bool:
        """Return whether a rank that has connected must take this rank's connection instead."""
        if rank < self._rank:
            return False
        connector = self._connector
        is_new = time.monotonic() - connector.began.get(rank, 0.0) < _PATIENCE_S
        return connector.is_asked(rank) or (connector.is_going(rank) and is_new)

    # --- asking -----------------------------------------------------------------------------------

    def ask(self, ranks: Sequence[int], timeout_s: float) -> dict[int, str]:
        """Return where ranks stand by their own answers, or why they cannot be reached.

        A rank with neither an answer nor a failure in time is left out. Any thread may call this.
        """
        asked = {
            rank: Question(self._addresses[rank], self._connector.connection) for rank in ranks
        }
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
        self._connector.close()
        self._plain.close()
