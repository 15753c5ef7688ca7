"""Small calls between hosts: the words that compiled code reads, and the leaders' connections.

In addition to its links, each leader keeps one connection to every host that it is linked to. The
handshake authenticates the connection for this group and this purpose only. After that it carries
plain bytes, or with certificates TLS, like those of `gpucoll.group.world.bulk`. The first call
opens all of them. In a group of a few hosts each leader has one to every other
host, for pairwise calls. A leader that breaks the communicator closes them, which its neighbours
notice at once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpucoll.blocks import Words
from gpucoll.group.world.connecting import Ends
from gpucoll.group.world.hosts import Hosts, are_few, partners
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.tcp import exchange, small_calls
from gpucoll.transport.tcp.call_routes import LEAST_BYTES
from gpucoll.transport.tcp.credentials import Credentials
from gpucoll.transport.tcp.exchange_words import (
    MESSAGE_WORDS,
    Exchange,
    Outcome,
    Part,
    PartKind,
    Peer,
    Step,
)
from gpucoll.transport.tcp.handshake import encode_purpose

MOST_BYTES: Final = 512 << 10
"""Calls with less data of all ranks together go by an exchange, if hosts need all of it."""
LEAST_PAIRWISE_BYTES: Final = 64 << 10
"""The same limit for calls in which hosts need only a part of the data."""
MOST_PAIRWISE_BYTES: Final = 8 << 20
"""Limit on a host's data in a pairwise call; larger calls go by schedules."""
MOST_BESIDE_FAST_SCHEDULES: Final = 512 << 10
"""The same limit if schedules have more connections, or TLS without a relay."""
MOST_BYTES_BY_MPI: Final = 32 << 10
"""The same limit if MPI carries the exchanges, whose own algorithms then follow."""
_Numbers = npt.NDArray[np.int64]
_ROUNDING_BYTES: Final = 4096
"""More room for what each rank brings, for whole cache lines and uneven shares."""
_SLICE_NS: Final = 20_000_000


class Connections:
    """The connections of one leader.

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
    group : str
        The group's secret name.
    listener : socket
        This leader's listening socket; belongs to this object from here on.
    """

    def __init__(
        self,
        here: int,
        names: tuple[str, ...],
        addresses: Mapping[int, Any],
        credentials: Credentials,
        group: str,
        listener: socket.socket,
    ) -> None:
        self._here = here
        self._count = len(names)
        self._addresses = addresses
        self._listener = listener
        self._ends = Ends(
            here, names, credentials, encode_purpose("exchange", group), are_plain=True
        )

    def open(self, look: Callable[[], None], deadline: float) -> tuple[int, int] | None:
        """Open all connections, as all leaders do; see `Ends.open`."""
        assert sorted(self._addresses) == partners(self._here, self._count)
        return self._ends.open(self._listener, self._addresses, look, deadline)

    def steps(self) -> list[list[int]]:
        """Return the rows of an exchange's steps; see `gpucoll.transport.tcp.exchange_words`."""
        return [
            [self._ends.sockets[after, 0].fileno(), self._ends.sockets[before, 0].fileno(), n_parts]
            for after, before, n_parts in _steps(self._here, self._count)
        ]

    def descriptors(self) -> dict[int, int]:
        """Return the descriptor of each connection, by host."""
        return {host: end.fileno() for (host, _), end in self._ends.sockets.items()}

    def close_connections(self) -> None:
        """Close the open connections."""
        self._ends.close()

    def close(self) -> None:
        """Release everything."""
        self._listener.close()
        self._ends.end()


class Exchanges:
    """The words that one rank's compiled small calls read, and its leader's exchanges.

    Parameters
    ----------
    hosts : Hosts
        Which ranks are on which host.
    rank : int
        This rank.
    connections : Connections or None
        A leader's connections; None on other ranks.
    entered, n_closed, abort : int
        Addresses of words of this host; see `gpucoll.transport.tcp.exchange_words.Exchange`.
    bell_fd : int
        Descriptor that wakes this host's leader.
    has_fast_schedules : bool
        Whether schedules have several lanes, or TLS; the same on all ranks.
    """

    def __init__(
        self,
        hosts: Hosts,
        rank: int,
        connections: Connections | None,
        entered: int,
        n_closed: int,
        abort: int,
        bell_fd: int,
        *,
        has_fast_schedules: bool,
    ) -> None:
        self.connections = connections
        self.hosts = hosts
        count, world_size = hosts.count, hosts.world_size
        # If hosts make different calls, each of them may bring as much as all ranks together may
        # have.
        most_bytes = max(MOST_BYTES, LEAST_BYTES * world_size)
        capacity = count * (most_bytes + Part.n_bytes + 8)
        edges = np.cumsum([0, *(len(ranks) for ranks in hosts.ranks)], dtype=np.int64)
        self._steps = np.zeros((count.bit_length(), Step.n_words), np.int64)
        self._tables = (
            edges,
            np.array(hosts.order, np.int64),
            np.zeros(2 * count, np.int64),
            np.zeros(world_size + 1, np.int64),
        )
        # Pages of both have no memory until a call touches them.
        self._held, held = _memory(capacity)
        pairwise_bytes = most_pairwise_bytes(count, has_fast_schedules)
        self._room, room = _memory(_room_bytes(hosts, hosts.host_of(rank), pairwise_bytes))
        self._peers = np.zeros((count, Peer.n_words), np.int64)
        self._polls = np.zeros(count, np.int64)
        words = self.words = Exchange.new()
        self.address = words.address
        tables = [Words(table.ctypes.data) for table in self._tables]
        words.edges, words.order, words.parts, words.inputs = tables
        words.steps = self._steps.ctypes.data
        words.held, words.room = held, room
        words.peers = Peer(self._peers.ctypes.data)
        words.peer_polls = Words(self._polls.ctypes.data)
        words.here, words.n_hosts = hosts.host_of(rank), count
        words.rank, words.world_size = rank, world_size
        words.most_bytes, words.least_pairwise_bytes = MOST_BYTES, LEAST_PAIRWISE_BYTES
        words.most_pairwise_bytes = pairwise_bytes
        words.is_in_order = hosts.is_in_order
        words.capacity = capacity
        words.entered, words.n_closed = entered, n_closed
        words.bell_fd, words.abort = bell_fd, abort
        self.loop: int = small_calls.small_call.address
        """Address of the compiled loop of every small call; compiled once per host, in 4 s."""
        self._is_large = small_calls.is_large.ctypes
        self._begin = exchange.begin.ctypes
        self._proceed = exchange.proceed.ctypes

    @property
    def number(self) -> int:
        """Number of the last call; the same on all ranks."""
        return self.words.number

    @number.setter
    def number(self, number: int) -> None:
        self.words.number = number

    @property
    def completed(self) -> int:
        """Number of the last call that has succeeded."""
        return self.words.completed

    @completed.setter
    def completed(self, number: int) -> None:
        self.words.completed = number

    @property
    def outcome(self) -> Outcome:
        """How the exchange of the last compiled call ended."""
        return Outcome(self.words.outcome)

    @property
    def ended_with(self) -> tuple[int, int]:
        """The host with which an exchange failed, and the errno of the failure."""
        return self.words.link, self.words.errno

    @property
    def digest(self) -> int:
        """Digest of the last call's signature."""
        return self.words.digest

    @property
    def header(self) -> tuple[int, ...]:
        """The last header that was received."""
        return tuple(self.words.came_header[word] for word in range(MESSAGE_WORDS))

    @property
    def is_open(self) -> bool:
        """Whether the leader's connections are open."""
        return bool(self.words.is_open)

    def open(self, look: Callable[[], None], deadline: float) -> tuple[int, int] | None:
        """Open the leader's connections, if they are not open; see `Connections.open`."""
        assert self.connections is not None
        if self.is_open:
            return None
        ended = self.connections.open(look, deadline)
        if ended is not None:
            return ended
        rows = self.connections.steps()
        self._steps[: len(rows)] = rows
        self.words.n_steps = len(rows)
        for host, descriptor in self.connections.descriptors().items():
            self._peers[host, Peer.fd] = descriptor
        self.words.is_open = 1
        return None

    def most_compiled_bytes(self, *, scans: bool = False) -> int:
        """Return the limit on the combined data of all ranks in a reduction that is not large."""
        words = self.words
        pairwise_bytes = 0 if scans else words.most_pairwise_bytes * words.n_hosts
        return max(words.most_bytes, pairwise_bytes)

    def is_large(self, block: CallBlock) -> bool:
        """Return whether a call is too large for an exchange; the same on all ranks."""
        return bool(self._is_large(self.address, block.words.ctypes.data))

    def carry_by(self, go_on: int, carrier: int, leaders: Sequence[int], large: int) -> None:
        """Let other code than connections carry exchanges from here on; all ranks do this.

        Parameters
        ----------
        go_on, carrier, large : int
            Addresses; see `gpucoll.transport.tcp.exchange_words.Exchange`.
        leaders : sequence of int
            By host, the number that the steps' rows contain in place of a descriptor.
        """
        here, count = self.words.here, self.words.n_hosts
        rows = [[leaders[to], leaders[origin], n] for to, origin, n in _steps(here, count)]
        self._steps[: len(rows)] = rows
        words = self.words
        words.n_steps, words.go_on, words.carrier, words.large = len(rows), go_on, carrier, large
        words.most_bytes = MOST_BYTES_BY_MPI
        words.most_pairwise_bytes = 0
        words.is_open = 1

    def announce(self, digest: int, kind: PartKind, look: Callable[[], None]) -> Outcome:
        """On a leader: find out whether all hosts make the same call.

        Parameters
        ----------
        digest : int
            Digest of the call's signature.
        kind : PartKind
            `NOTHING`, or `FURTHER`, for which the outcome is never `AGREED`.
        look : callable
            Called again and again while waiting; raises if the wait is in vain.
        """
        self._begin(self.address, digest, int(kind))
        while (outcome := self._proceed(self.address, _SLICE_NS)) == Outcome.AGAIN:
            look()
        return Outcome(outcome)

    def close_connections(self) -> None:
        """Close the leader's connections, of which no more use can be made."""
        self.words.is_open = 0
        if self.connections is not None:
            self.connections.close_connections()

    def close(self) -> None:
        """Release everything."""
        self.words.is_open = 0
        if self.connections is not None:
            self.connections.close()


def most_pairwise_bytes(count: int, has_fast_schedules: bool) -> int:
    """Return the limit on a host's data in pairwise calls; 0: hosts are too many for any."""
    if not are_few(count):
        return 0
    most_bytes = MOST_PAIRWISE_BYTES
    return min(most_bytes, MOST_BESIDE_FAST_SCHEDULES) if has_fast_schedules else most_bytes


def _room_bytes(hosts: Hosts, here: int, pairwise_bytes: int) -> int:
    """Return the size of the room of pairwise calls; see `gpucoll.transport.tcp.pairwise_calls`.

    Result and inputs are as large as the data of this host at most, what is combined as that of an
    average host.
    """
    share = -(-hosts.count * len(hosts.ranks[here]) // hosts.world_size)
    return (2 * share + 1) * pairwise_bytes + _ROUNDING_BYTES * hosts.world_size


def _memory(size_bytes: int) -> tuple[_Numbers, int]:
    """Return memory that begins at a cache line, and its address."""
    memory = np.empty(8 + size_bytes // 8, np.int64)
    return memory, (memory.ctypes.data + 63) & -64


def _steps(here: int, count: int) -> list[tuple[int, int, int]]:
    """Return, by step: the host that a message goes to, the host it comes from, its parts."""
    distances = [1 << step for step in range((count - 1).bit_length())]
    return [((here + d) % count, (here - d) % count, min(d, count - d)) for d in distances]
