"""Collectives through GPU memory that all ranks of a host can read, as steps on a stream.

Each rank has an exchange: memory of its own GPU, in two halves, which every rank of the host has
mapped. A call is a sequence of rounds, which use the halves alternately. In a round a rank copies
its part into its half and announces it (`Word.READY`). It waits until other ranks have announced
theirs, and combines or copies the content of their halves into its own output. Then it announces
that it no longer needs those halves (`Word.DONE`). Before a half is written again, all ranks must
be done with it. A reduction whose rounds have one turn copies the part of the next round before it
waits for the others' parts of this one.

All of that goes onto a stream: an announcement writes a number, and a stream can wait for a number.
No kernel waits for another rank, so ranks may share a GPU. Sources are combined in rank order: the
bits are the same on every rank, whatever the size and the number of rounds.

Steps are data, made by functions of what all ranks know; numbers count from the call's first round.
`gpucoll.backends.direct.peer` puts them on streams.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from gpucoll.algorithms.shares import equal_edges, pieces, sizes_of
from gpucoll.backends.gpu.steps import Copy

ALIGNMENT_BYTES = 16
"""Alignment of data in a half: the kernels' widest access."""


class Word(enum.IntEnum):
    """The numbers that each rank announces, for the others to wait for."""

    READY = 0
    """Two for each round: my part is in my half; my share of the result is there."""
    DONE = 1
    """One for each round: I no longer read any half of it."""


def value_of(word: Word, number: int, before: int) -> int:
    """Return the 32-bit value of a call's number, after `before` rounds of earlier calls."""
    return (number + before * (2 if word == Word.READY else 1)) % (1 << 32)


class Role(enum.Enum):
    """The place of a step among those that combine the same elements."""

    ALONE = enum.auto()
    """It combines all ranks' elements."""
    MIDDLE = enum.auto()
    """It combines a partial result with one rank's elements; an average is not divided yet."""
    LAST = enum.auto()
    """The same, and then the result is complete."""


class Combine(NamedTuple):
    """Every destination becomes source 0 op source 1 op ..."""

    destinations: tuple[int, ...]
    sources: tuple[int, ...]
    n_elements: int
    role: Role = Role.ALONE


class Identity(NamedTuple):
    """The op's identity, `n_elements` times."""

    destination: int
    n_elements: int


class Say(NamedTuple):
    """Write a number of this rank after all earlier work on the stream."""

    word: Word
    number: int


class Await(NamedTuple):
    """Make later work on the stream wait until a rank has announced this number, or a later one."""

    rank: int
    word: Word
    number: int


Step = Copy | Combine | Identity | Say | Await
T = TypeVar("T")


class Traffic(NamedTuple):
    """The sizes of the chunks that a rank sends and receives on a ring, in order, in bytes."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


class Rounds(NamedTuple):
    """A call's steps, and how many rounds it takes.

    The number of rounds is even, so that each call begins with the same half.
    """

    steps: tuple[Step, ...]
    n_rounds: int
    traffic: Traffic = Traffic((), ())
    """Of a ring only."""


class Exchange(NamedTuple):
    """The ranks' exchanges, as one of them sees them.

    Attributes
    ----------
    rank, world_size : int
        This rank and the number of ranks.
    addresses : tuple of int
        The address of each rank's first half, a multiple of `ALIGNMENT_BYTES`.
    half_bytes : int
        Size of a half; the second follows the first. At least `ALIGNMENT_BYTES` for each rank.
    ring : tuple of int
        The ranks in the order of a ring; empty: their own order.
    """

    rank: int
    world_size: int
    addresses: tuple[int, ...]
    half_bytes: int
    ring: tuple[int, ...] = ()

    @property
    def around(self) -> tuple[int, ...]:
        """The ranks in the order of a ring."""
        return self.ring or tuple(range(self.world_size))

    @property
    def place(self) -> int:
        """This rank's place in the ring."""
        return self.around.index(self.rank)

    @property
    def following(self) -> int:
        """The next rank of the ring."""
        return self.around[(self.place + 1) % self.world_size]

    @property
    def slot_bytes(self) -> int:
        """Size of the part of a half that belongs to one rank."""
        return self.half_bytes // self.world_size // ALIGNMENT_BYTES * ALIGNMENT_BYTES


class Part(NamedTuple):
    """An array that is combined by element. `destination` 0: this rank gets no result."""

    source: int
    destination: int
    n_elements: int


class Segment(NamedTuple):
    """Elements of one array that take part in a round, and their place in the half."""

    source: int
    destination: int
    n_elements: int
    offset: int


class _Builder:
    """Steps of one rank, round by round."""

    def __init__(self, exchange: Exchange, ahead: int = 0) -> None:
        self.exchange = exchange
        self._ahead = ahead
        """How many rounds a rank may be ready ahead of the last one that it is done with."""
        self.steps: list[Step] = []
        self.number = 0
        self.ranks = range(exchange.world_size)
        self.peers = [rank for rank in self.ranks if rank != exchange.rank]
        self._done = [0] * exchange.world_size
        """By rank: the number of rounds that it is known to be done with."""

    def half(self, rank: int) -> int:
        """Return the address of a rank's half in this round."""
        return self.exchange.addresses[rank] + self.number % 2 * self.exchange.half_bytes

    @property
    def mine(self) -> int:
        """The address of this rank's half in this round."""
        return self.half(self.exchange.rank)

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        if size_bytes > 0 and destination != source:
            self.steps.append(Copy(destination, source, size_bytes))

    def combine(
        self, destinations: Iterable[int], ranks: Iterable[int], at: int, count: int
    ) -> None:
        """Combine elements at an offset of these ranks' halves."""
        given = tuple(filter(None, destinations))
        if count > 0 and given:
            sources = tuple(self.half(rank) + at for rank in ranks)
            self.steps.append(Combine(given, sources, count))

    def combine_all(self, segments: Iterable[Segment], ranks: Iterable[int]) -> None:
        """Combine the segments of these ranks; without ranks the result is the identity."""
        ranks = tuple(ranks)
        self.await_ready(ranks)
        for segment in segments:
            if ranks:
                self.combine((segment.destination,), ranks, segment.offset, segment.n_elements)
            elif segment.n_elements:
                self.steps.append(Identity(segment.destination, segment.n_elements))

    def put(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Copy this rank's part of the round into its half once that is free, and announce it.

        A copy is given as its offset in the half, its source and its size in bytes. A rank without
        a part announces nothing.
        """
        copies = [copy for copy in copies if copy[2] > 0]
        if not copies:
            return
        # Number 0 is reached when all ranks have announced the end of the previous call.
        number = max(self.number - 1, 0)
        for peer in self.peers:
            if self.number < 1 or self._done[peer] < number:
                self.steps.append(Await(peer, Word.DONE, number))
                self._done[peer] = number
        for offset, source, size_bytes in copies:
            self.copy(self.mine + offset, source, size_bytes)
        self.say_ready()

    def put_segments(self, segments: Iterable[Segment], item_bytes: int) -> None:
        self.put((each.offset, each.source, each.n_elements * item_bytes) for each in segments)

    def say_ready(self, turn: int = 0) -> None:
        self.steps.append(Say(Word.READY, 2 * self.number + turn + 1))

    def await_ready(self, ranks: Iterable[int], turn: int = 0) -> None:
        number = 2 * self.number + turn + 1
        for rank in ranks:
            if rank != self.exchange.rank:
                self.steps.append(Await(rank, Word.READY, number))
                # It announced this after all earlier rounds, except those that it is ahead.
                self._done[rank] = max(self._done[rank], self.number - self._ahead)

    def end_round(self) -> None:
        self.number += 1
        self.steps.append(Say(Word.DONE, self.number))

    def rounds(self, parts: Iterable[T]) -> Iterator[T]:
        """Yield the part of each round, for its steps, and end the round after them."""
        for part in parts:
            yield part
            self.end_round()

    def rounds_of_blocks(self, edges: Sequence[int], most: int) -> Iterator[tuple[int, list[int]]]:
        """Yield for each round its start in all blocks, and how much of each block it moves."""
        sizes = sizes_of(edges)
        starts = (start for start, _ in pieces(max(sizes, default=0), most))
        return self.rounds((at, [max(min(most, size - at), 0) for size in sizes]) for at in starts)

    def made(self) -> Rounds:
        """Return all steps; if the number of rounds is odd, the last one counts as two."""
        count = self.number + self.number % 2
        if count != self.number:
            self.steps[-1] = Say(Word.DONE, count)
        return Rounds(tuple(self.steps), count)


# --- element by element ---------------------------------------------------------------------------


def segments_of(
    parts: Sequence[Part], item_bytes: int, half_bytes: int
) -> Iterator[tuple[Segment, ...]]:
    """Yield the segments of each round: as much as fits into a half, array after array."""
    taken: list[Segment] = []
    offset = 0
    for part in parts:
        start = 0
        while start < part.n_elements:
            room = (half_bytes - offset) // item_bytes
            if room <= 0:
                yield tuple(taken)
                taken, offset = [], 0
                continue
            count, at = min(room, part.n_elements - start), start * item_bytes
            destination = part.destination and part.destination + at
            taken.append(Segment(part.source + at, destination, count, offset))
            start += count
            offset += -(-count * item_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if taken:
        yield tuple(taken)


def reduction(
    exchange: Exchange,
    parts: Sequence[Part],
    item_bytes: int,
    *,
    shares: bool,
    root: int | None = None,
) -> Rounds:
    """Return the steps of an all_reduce, or with a root of a reduce.

    Parameters
    ----------
    exchange : Exchange
    parts : sequence of Part
        The arrays; their counts are the same on all ranks.
    item_bytes : int
        Size of an element.
    shares : bool
        Whether each rank combines one share of the array and then collects the others' shares (two
        turns; each half is read about twice). Otherwise each rank that gets the result combines all
        of it (one turn; all of these ranks read each half).
    root : int, optional
        The only rank that gets the result.
    """
    gets = root is None or root == exchange.rank
    rounds = list(segments_of(parts, item_bytes, exchange.half_bytes))
    if gets and not shares:
        return _copying_ahead(exchange, rounds, item_bytes)
    build = _Builder(exchange)
    for segments in build.rounds(rounds):
        build.put_segments(segments, item_bytes)
        if shares:
            _combine_shares(build, segments, item_bytes, gets)
    return build.made()


def _copying_ahead(
    exchange: Exchange, rounds: Sequence[Sequence[Segment]], item_bytes: int
) -> Rounds:
    """Return rounds of one turn, in which the next part is copied before this round's wait.

    So ranks may be one round apart, and no rank's copy waits for another rank's kernel.
    """
    build = _Builder(exchange, ahead=1)
    for number in range(len(rounds) + 1):
        if number < len(rounds):
            build.number = number
            build.put_segments(rounds[number], item_bytes)
        if number:
            build.number = number - 1
            build.combine_all(rounds[number - 1], build.ranks)
            build.end_round()
    return build.made()


def _combine_shares(
    build: _Builder, segments: Sequence[Segment], item_bytes: int, gets: bool
) -> None:
    rank, world_size = build.exchange.rank, build.exchange.world_size
    unit = max(ALIGNMENT_BYTES // item_bytes, 1)
    divided = [(segment, equal_edges(segment.n_elements, world_size, unit)) for segment in segments]
    build.await_ready(build.peers)
    for segment, edges in divided:
        start, count = edges[rank] * item_bytes, edges[rank + 1] - edges[rank]
        at, destination = segment.offset + start, segment.destination + start if gets else 0
        # Only this rank reads its share of any half until it announces again.
        build.combine((build.mine + at, destination), build.ranks, at, count)
    build.say_ready(1)
    if not gets:
        return
    build.await_ready(build.peers, 1)
    for segment, edges in divided:
        for peer in build.peers:
            at, size_bytes = edges[peer] * item_bytes, (edges[peer + 1] - edges[peer]) * item_bytes
            build.copy(segment.destination + at, build.half(peer) + segment.offset + at, size_bytes)


def scan(exchange: Exchange, part: Part, item_bytes: int, *, is_exclusive: bool) -> Rounds:
    """Return the steps of a scan: each rank combines those before it, and itself if inclusive."""
    build = _Builder(exchange)
    before = range(exchange.rank if is_exclusive else exchange.rank + 1)
    for segments in build.rounds(segments_of([part], item_bytes, exchange.half_bytes)):
        build.put_segments(segments, item_bytes)
        build.combine_all(segments, before)
    return build.made()


# --- moving blocks --------------------------------------------------------------------------------


def broadcast(exchange: Exchange, parts: Sequence[Part], root: int) -> Rounds:
    """Return the steps of a broadcast of arrays, whose elements are bytes."""
    build = _Builder(exchange)
    for segments in build.rounds(segments_of(parts, 1, exchange.half_bytes)):
        if exchange.rank == root:
            build.put_segments(segments, 1)
        else:
            build.await_ready([root])
        for segment in segments:
            source = segment.source if exchange.rank == root else build.half(root) + segment.offset
            if segment.destination:
                build.copy(segment.destination, source, segment.n_elements)
    return build.made()


def gathering(
    exchange: Exchange, source: int, destination: int, edges: Sequence[int], root: int | None = None
) -> Rounds:
    """Return the steps of an all_gather, or with a root of a gather.

    Parameters
    ----------
    exchange : Exchange
    source : int
        The address of this rank's block.
    destination : int
        The address for all blocks.
    edges : sequence of int
        Offset of each rank's block there, in bytes, and last the end of all.
    root : int, optional
        The only rank that gets the blocks.
    """
    build = _Builder(exchange)
    rank, gets = exchange.rank, root is None or root == exchange.rank
    if gets:
        build.copy(destination + edges[rank], source, edges[rank + 1] - edges[rank])
    for at, sizes in build.rounds_of_blocks(edges, exchange.half_bytes):
        if rank != root:
            build.put([(0, source + at, sizes[rank])])
        if gets:
            build.await_ready(peer for peer in build.peers if sizes[peer])
            for peer in build.peers:
                build.copy(destination + edges[peer] + at, build.half(peer), sizes[peer])
    return build.made()


def scatter(
    exchange: Exchange, source: int, destination: int, edges: Sequence[int], root: int
) -> Rounds:
    """Return the steps of a scatter: block r of the root's goes to rank r."""
    build = _Builder(exchange)
    rank, slot = exchange.rank, exchange.slot_bytes
    for at, sizes in build.rounds_of_blocks(edges, slot):
        if rank == root:
            build.put((peer * slot, source + edges[peer] + at, sizes[peer]) for peer in build.peers)
            build.copy(destination + at, source + edges[rank] + at, sizes[rank])
        elif sizes[rank]:
            build.await_ready([root])
            build.copy(destination + at, build.half(root) + rank * slot, sizes[rank])
    return build.made()


def all_to_all(exchange: Exchange, source: int, destination: int, block_bytes: int) -> Rounds:
    """Return the steps of an all_to_all of equal blocks, which may be in place."""
    build = _Builder(exchange)
    rank, slot = exchange.rank, exchange.slot_bytes
    edges = [number * block_bytes for number in range(exchange.world_size + 1)]
    for at, sizes in build.rounds_of_blocks(edges, slot):
        build.put((peer * slot, source + edges[peer] + at, sizes[peer]) for peer in build.peers)
        own = edges[rank] + at
        build.copy(destination + own, source + own, sizes[rank])
        build.await_ready(build.peers)
        for peer in build.peers:
            here = destination + edges[peer] + at
            build.copy(here, build.half(peer) + rank * slot, sizes[peer])
    return build.made()


def reduce_scatter(
    exchange: Exchange, source: int, destination: int, edges: Sequence[int], item_bytes: int
) -> Rounds:
    """Return the steps of a reduce_scatter: block r of the reduction goes to rank r.

    Parameters
    ----------
    exchange : Exchange
    source, destination : int
        The addresses of all blocks of this rank's input, and of its own block of the result.
    edges : sequence of int
        Offset of each block in the input, in elements, and last the end of all.
    item_bytes : int
        Size of an element.
    """
    build = _Builder(exchange)
    rank, slot = exchange.rank, exchange.slot_bytes
    for at, sizes in build.rounds_of_blocks(edges, slot // item_bytes):
        build.put(
            (peer * slot, source + (edges[peer] + at) * item_bytes, sizes[peer] * item_bytes)
            for peer in build.ranks
        )
        if sizes[rank]:
            build.await_ready(build.peers)
            build.combine((destination + at * item_bytes,), build.ranks, rank * slot, sizes[rank])
    return build.made()
