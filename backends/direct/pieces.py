"""A call on GPU arrays in pieces that fit into host memory of a fixed size: pure functions.

Every rank cuts a call in the same way, using only what all of them know. A piece is a call of the
CPU backend of the same kind, on some of the elements, or on an equal number of elements of each
block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpucoll.algorithms.shares import edges_of
from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.protocol import Request

SLOT_BYTES = 2 << 20
"""Size of one direction of a piece, unless one element of each block needs more."""


class Copy(NamedTuple):
    """A contiguous part of a piece."""

    offset: int
    """Its offset in the slot, in host memory."""
    address: int
    """Its address on the GPU."""
    size_bytes: int


class Piece(NamedTuple):
    """One call of the CPU backend, and the copies for it."""

    reads: tuple[Copy, ...]
    """Copies from the GPU, before the call."""
    writes: tuple[Copy, ...]
    """Copies to the GPU, after the call."""
    request: Callable[[int, int], Request]
    """Returns the call, given the addresses of the slots that it reads and writes."""


class Pieces(NamedTuple):
    """A call on GPU arrays in pieces."""

    n_pieces: int
    """Number of pieces in which this rank takes part."""
    piece: Callable[[int], Piece]
    agrees: bool = False
    """Whether ranks may have different numbers, and first agree on the largest."""


def pieces_of(request: Request, rank: int, world_size: int, slot_bytes: int = SLOT_BYTES) -> Pieces:
    """Return a request in pieces.

    Parameters
    ----------
    request : Request
        The request, over memory of the GPU.
    rank, world_size : int
        This rank and the communicator's size.
    slot_bytes : int
        The most that a piece may read or write, unless one element of each block is more.
    """
    if request.collective.has_blocks:
        return _by_blocks(request, rank, world_size, slot_bytes)
    return _by_elements(request, rank, slot_bytes)


def slot_bytes_for(world_size: int) -> int:
    """Return the size of a slot: one element of each block always fits."""
    return max(SLOT_BYTES, 16 * world_size)


def _by_elements(request: Request, rank: int, slot_bytes: int) -> Pieces:
    data, root = request.data, request.root
    pairs: Sequence[tuple[Buffer | None, Buffer | None]] = request.parts or (
        (request.source, request.destination),
    )
    reads, writes = request.collective.gives(rank, root), request.collective.gets(rank, root)
    ends = edges_of([(source or out or data).count for source, out in pairs])
    at_once = max(slot_bytes // data.item_bytes, 1)
    collective = request.collective.of_one
    has_source = any(source is not None for source, _ in pairs)
    has_out = any(out is not None for _, out in pairs)

    def copies(start: int, stop: int, is_source: bool) -> tuple[Copy, ...]:
        made = []
        for place, pair in enumerate(pairs):
            buffer = pair[0] if is_source else pair[1]
            first, last = max(start, ends[place]), min(stop, ends[place + 1])
            if buffer is not None and first < last:
                address = buffer.address + (first - ends[place]) * data.item_bytes
                size_bytes = (last - first) * data.item_bytes
                made.append(Copy((first - start) * data.item_bytes, address, size_bytes))
        return tuple(made)

    def piece(number: int) -> Piece:
        start, stop = number * at_once, min((number + 1) * at_once, ends[-1])

        def made(source: int, out: int) -> Request:
            shape = (stop - start,)
            return Request(
                collective,
                _buffer(source, shape, data) if has_source else None,
                _buffer(out, shape, data) if has_out else None,
                request.op,
                root,
            )

        return Piece(
            copies(start, stop, is_source=True) if reads else (),
            copies(start, stop, is_source=False) if writes else (),
            made,
        )

    return Pieces(-(-ends[-1] // at_once), piece)


def _by_blocks(request: Request, rank: int, world_size: int, slot_bytes: int) -> Pieces:
    data, root, collective = request.data, request.root, request.collective
    at_once = max(slot_bytes // (data.item_bytes * world_size), 1)
    sent = received = _all_counts(request, world_size)
    if request.receive_counts is not None:
        received = tuple(count * request.row_count for count in request.receive_counts)
    mine = (sent[rank],)
    source = request.source if collective.gives(rank, root) else None
    out = request.destination if collective.gets(rank, root) else None
    source_counts = sent if collective.spreads else mine
    out_counts = received if collective.gathers else mine

    def piece(number: int) -> Piece:
        first = number * at_once

        def parts(counts: Sequence[int]) -> tuple[int, ...]:
            return tuple(min(max(count - first, 0), at_once) for count in counts)

        def copies(buffer: Buffer | None, counts: Sequence[int]) -> tuple[Copy, ...]:
            if buffer is None:
                return ()
            made, offset = [], 0
            for start, part in zip(edges_of(counts), parts(counts), strict=False):
                if size_bytes := part * data.item_bytes:
                    address = buffer.address + (start + first) * data.item_bytes
                    made.append(Copy(offset, address, size_bytes))
                offset += size_bytes
            return tuple(made)

        def made(source_slot: int, out_slot: int) -> Request:
            return Request(
                collective,
                source and _buffer(source_slot, (sum(parts(source_counts)),), data),
                out and _buffer(out_slot, (sum(parts(out_counts)),), data),
                request.op,
                root,
                None if request.counts is None else parts(sent),
                None if request.receive_counts is None else parts(received),
            )

        return Piece(copies(source, source_counts), copies(out, out_counts), made)

    largest, agrees = max(*sent, *received), request.receive_counts is not None
    return Pieces(-(-largest // at_once), piece, agrees)


def _all_counts(request: Request, world_size: int) -> tuple[int, ...]:
    """Return the number of elements in each rank's block."""
    if request.counts is not None:
        return tuple(count * request.row_count for count in request.counts)
    source, out = request.source, request.destination
    if not request.collective.spreads:
        assert source is not None
        count = source.count
    elif source is not None:
        count = source.count // world_size
    else:
        assert out is not None
        count = out.count
    return (count,) * world_size


def _buffer(address: int, shape: tuple[int, ...], like: Buffer) -> Buffer:
    return Buffer(address, shape, like.dtype, like.item_bytes, None)
