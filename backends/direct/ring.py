"""Collectives by a chunked ring: each rank writes into the next rank's exchange, and no other.

Blocks go around as `gpucoll.algorithms.ring` has it, in chunks. An exchange holds slots, and the
previous rank writes into them in turn. For each chunk, a rank waits until it is there
(`Word.READY` of the previous rank). One kernel combines it with this rank's own elements and writes
the result into the next rank's slot (`gpucoll.kernels.gpu.reduce.ring_step`), once that is free
(`Word.DONE` of the next rank). A complete block goes on around by copies. So several chunks are
under way, and the bytes cross only the links between neighbours.

Both words count the chunks of a call. The numbers keep the rules of
`gpucoll.backends.direct.rounds`, so calls of both kinds may follow each other. No step waits for a
later one: ordered by lap, step and chunk, each chunk needs only earlier ones (`N_SLOTS` is greater
than `MOST_CHUNKS`).

Operands rotate: block b is combined from the rank after b's around to b's own, and half types are
rounded at each step. All ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from gpucoll.algorithms import ring
from gpucoll.algorithms.shares import equal_edges, pieces, sizes_of
from gpucoll.algorithms.steps import Step as RingStep
from gpucoll.backends.direct.rounds import (
    ALIGNMENT_BYTES,
    Await,
    Combine,
    Exchange,
    Part,
    Role,
    Rounds,
    Say,
    Segment,
    Step,
    Traffic,
    Word,
    segments_of,
)
from gpucoll.backends.gpu.steps import Copy

_NOTHING: Final = RingStep()
N_SLOTS: Final = 7
"""Number of slots in an exchange; the rest of it holds elements that this rank has scaled."""
MOST_CHUNKS: Final = 4
"""The most chunks of a block in a lap: fewer than slots, or ranks would wait in a circle."""
LEAST_CHUNK_BYTES: Final = 128 << 10
"""Blocks are not cut into smaller chunks. Chosen by reasoning, not measured: a launch and two words
cost some microseconds, in which a bus moves about this much."""


def slot_bytes(exchange: Exchange) -> int:
    """Return the size of a slot."""
    return 2 * exchange.half_bytes // (N_SLOTS + 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


class _Lap(NamedTuple):
    """Elements that go around together: parts of arrays, laid out as in one buffer."""

    segments: Sequence[Segment]
    edges: Sequence[int]
    """Where each block begins in that buffer, by its place in the ring, and the end of all."""


# --- calls ----------------------------------------------------------------------------------------


def all_reduce(
    exchange: Exchange, parts: Sequence[Part], item_bytes: int, *, scales: bool = False
) -> Rounds:
    """Return the steps of an all_reduce.

    Parameters
    ----------
    exchange : Exchange
        Of at least two ranks.
    parts : sequence of Part
        The arrays; their counts are the same on all ranks.
    item_bytes : int
        Size of an element.
    scales : bool
        Whether the operation changes each rank's elements before they are added (``scaled_sum``).
    """
    size = exchange.world_size
    walk = _Walk(exchange, ring.all_reduce(exchange.place, size), item_bytes, scales)
    most = size * MOST_CHUNKS * slot_bytes(exchange)

    def lap(segments: Sequence[Segment]) -> _Lap:
        last = segments[-1]
        end = last.offset + last.n_elements * item_bytes
        return _Lap(segments, equal_edges(end, size, ALIGNMENT_BYTES))

    return walk.made(map(lap, segments_of(parts, item_bytes, most)))


def reduce_scatter(
    exchange: Exchange,
    source: int,
    destination: int,
    edges: Sequence[int],
    item_bytes: int,
    *,
    scales: bool = False,
) -> Rounds:
    """Return the steps of a reduce_scatter, as `rounds.reduce_scatter`; `scales` as above."""
    walk = _Walk(
        exchange, ring.reduce_scatter(exchange.place, exchange.world_size), item_bytes, scales
    )

    def segment(rank: int, at: int, count: int, offset: int) -> Segment:
        to = destination + at * item_bytes if rank == exchange.rank else 0
        return Segment(source + (edges[rank] + at) * item_bytes, to, count, offset)

    return walk.made(_laps_of_blocks(exchange, edges, item_bytes, segment))


def all_gather(exchange: Exchange, source: int, destination: int, edges: Sequence[int]) -> Rounds:
    """Return the steps of an all_gather, as `rounds.gathering`."""
    walk = _Walk(exchange, ring.all_gather(exchange.place, exchange.world_size), 1)

    def segment(rank: int, at: int, count: int, offset: int) -> Segment:
        mine = source + at if rank == exchange.rank else 0
        return Segment(mine, destination + edges[rank] + at, count, offset)

    return walk.made(_laps_of_blocks(exchange, edges, 1, segment))


def _laps_of_blocks(
    exchange: Exchange,
    edges: Sequence[int],
    item_bytes: int,
    segment: Callable[[int, int, int, int], Segment],
) -> Iterator[_Lap]:
    """Yield laps that take as many elements of each block, which has a size of its own.

    `segment` makes those of a rank's block, given their start and their number in that block, and
    the offset in the buffer.
    """
    sizes = sizes_of(edges)
    most = MOST_CHUNKS * slot_bytes(exchange) // item_bytes
    for start, longest in pieces(max(sizes, default=0), most):
        segments, starts = [], [0]
        for rank in exchange.around:
            count = max(min(longest, sizes[rank] - start), 0)
            segments.append(segment(rank, start, count, starts[-1]))
            starts.append(starts[-1] + _aligned(count * item_bytes))
        yield _Lap(segments, starts)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# --- one rank's way around ------------------------------------------------------------------------


class _Walk:
    """One rank's steps, lap by lap.

    Parameters
    ----------
    exchange : Exchange
    schedule : sequence of RingStep
        What it sends and receives; each step but the first forwards what the previous one received.
    item_bytes : int
        Size of an element.
    scales : bool
        Whether this rank's elements are scaled first.
    """

    def __init__(
        self,
        exchange: Exchange,
        schedule: Sequence[RingStep],
        item_bytes: int,
        scales: bool = False,
    ) -> None:
        place, around = exchange.place, exchange.around
        self._before, self._next = around[place - 1], exchange.following
        self._addresses = exchange.addresses[exchange.rank], exchange.addresses[self._next]
        self._peers = [rank for rank in around if rank != exchange.rank]
        self._slot_bytes = slot_bytes(exchange)
        self._schedule, self._item_bytes, self._scales = schedule, item_bytes, scales
        self._steps: list[Step] = []
        self._sent = self._received = 0
        self._sizes: tuple[list[int], list[int]] = [], []
        """Of the chunks sent and received."""

    def made(self, laps: Iterable[_Lap]) -> Rounds:
        """Return the steps of all laps."""
        for lap in laps:
            if not self._steps:  # every rank has left the call before
                self._steps += [Await(peer, Word.DONE, 0) for peer in self._peers]
            self._go_around(lap)
        n_rounds = self._sent + self._sent % 2
        if n_rounds != self._sent:
            self._steps[-1] = Say(Word.DONE, n_rounds)
        traffic = Traffic(*map(tuple, self._sizes))
        return Rounds(tuple(self._steps), n_rounds, traffic)

    def _go_around(self, lap: _Lap) -> None:
        longest = max(sizes_of(lap.edges))
        needed = -(-longest // self._slot_bytes)
        n_chunks = min(max(longest // LEAST_CHUNK_BYTES, needed, 1), MOST_CHUNKS)
        width = _aligned(-(-longest // n_chunks))
        blocks = [
            [
                tuple(_cut(lap.segments, start, min(start + width, stop), self._item_bytes))
                for start in (first + number * width for number in range(n_chunks))
            ]
            for first, stop in pairwise(lap.edges)
        ]
        steps = [_NOTHING, *self._schedule, _NOTHING]
        for received, sent in pairwise(steps):
            (span,) = sent.send or received.receive
            for chunk in blocks[span.first]:
                self._chunk(chunk, received, sent)

    def _chunk(self, chunk: Sequence[Segment], received: RingStep, sent: RingStep) -> None:
        """Take a chunk out of this rank's slot, if it was received, and pass it on."""
        mine, following = self._addresses
        slot = mine + self._received % N_SLOTS * self._slot_bytes
        to = following + self._sent % N_SLOTS * self._slot_bytes if sent.send else 0
        if received.receive:
            self._steps.append(Await(self._before, Word.READY, self._received + 1))
        if sent.send and self._sent >= N_SLOTS:
            self._steps.append(Await(self._next, Word.DONE, self._sent + 1 - N_SLOTS))
        if received.reduces:
            self._combine(chunk, slot, to, is_whole=not sent.reduces)
        elif received.receive:
            self._copy_all(chunk, slot, to)
        else:
            self._begin(chunk, to, sent.reduces)
        end = chunk[-1].offset + chunk[-1].n_elements * self._item_bytes if chunk else 0
        if sent.send:
            self._sent += 1
            self._sizes[0].append(end)
            self._steps.append(Say(Word.READY, self._sent))
        if received.receive:
            self._received += 1
            self._sizes[1].append(end)
            self._steps.append(Say(Word.DONE, self._received))

    def _begin(self, chunk: Sequence[Segment], to: int, reduces: bool) -> None:
        for each in chunk:
            size_bytes = each.n_elements * self._item_bytes
            if reduces and self._scales:
                self._scale(each, to + each.offset)
            else:
                self._copy(to + each.offset, each.source, size_bytes)
            if not reduces:
                self._copy(each.destination, each.source, size_bytes)

    def _combine(self, chunk: Sequence[Segment], slot: int, to: int, *, is_whole: bool) -> None:
        """Combine received elements with this rank's, into the result (`is_whole`) and `to`."""
        role = Role.LAST if is_whole else Role.MIDDLE
        for each in chunk:
            mine, at = each.source, each.offset
            if self._scales:
                mine = self._addresses[0] + N_SLOTS * self._slot_bytes + at
                self._scale(each, mine)
            destinations = (each.destination if is_whole else 0, to + at if to else 0)
            given = tuple(filter(None, destinations))
            self._steps.append(Combine(given, (slot + at, mine), each.n_elements, role))

    def _scale(self, segment: Segment, to: int) -> None:
        self._steps.append(Combine((to,), (segment.source,), segment.n_elements))

    def _copy_all(self, chunk: Sequence[Segment], slot: int, to: int) -> None:
        for each in chunk:
            size_bytes = each.n_elements * self._item_bytes
            self._copy(each.destination, slot + each.offset, size_bytes)
            if to:  # not from the slot: both may be in host memory (`direct.wires`)
                self._copy(to + each.offset, each.destination, size_bytes)

    def _copy(self, destination: int, source: int, size_bytes: int) -> None:
        if destination != source:
            self._steps.append(Copy(destination, source, size_bytes))


def _cut(segments: Iterable[Segment], start: int, stop: int, item_bytes: int) -> Iterator[Segment]:
    """Yield the parts of segments in a range of the buffer, with their offsets in that range."""
    for each in segments:
        first = max(start - each.offset, 0) // item_bytes
        last = min((stop - each.offset) // item_bytes, each.n_elements)
        if first < last:
            at = first * item_bytes
            source, destination = (
                address and address + at for address in (each.source, each.destination)
            )
            yield Segment(source, destination, last - first, each.offset + at - start)
