"""A call on GPU arrays in pieces that fit into host memory of a fixed size: pure functions.

Every rank cuts a call in the same way, using only what all of them know. A piece is a call of the
CPU backend of the same kind, on some of the elements, or on an equal number of elements of each
block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

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


class _Side(NamedTuple):
    """An input or output as blocks of given numbers of elements."""

    address: int
    counts: tuple[int, ...]
    starts: tuple[int, ...]


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
    ends = [0, *accumulate((source or out or data).count for source, out in pairs)]
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
    item_bytes = request.data.item_bytes
    at_once = max(slot_bytes // (item_bytes * world_size), 1)
    source, out = _sides(request, rank, world_size)
    agrees = request.receive_counts is not None
    known = _all_counts(request, world_size)
    if agrees:
        assert source is not None
        assert out is not None
        known = source.counts + out.counts

    def piece(number: int) -> Piece:
        first = number * at_once

        def part(count: int) -> int:
            return min(max(count - first, 0), at_once)

        def copies(side: _Side | None) -> tuple[Copy, ...]:
            if side is None:
                return ()
            made, offset = [], 0
            for count, start in zip(side.counts, side.starts, strict=True):
                if size_bytes := part(count) * item_bytes:
                    made.append(
                        Copy(offset, side.address + (start + first) * item_bytes, size_bytes)
                    )
                offset += size_bytes
            return tuple(made)

        def made(source_slot: int, out_slot: int) -> Request:
            return _blocks_request(request, source, out, known, part, source_slot, out_slot)

        return Piece(copies(source), copies(out), made)

    return Pieces(-(-max(known, default=0) // at_once), piece, agrees)


def _blocks_request(
    request: Request,
    source: _Side | None,
    out: _Side | None,
    known: tuple[int, ...],
    part: Callable[[int], int],
    source_slot: int,
    out_slot: int,
) -> Request:
    """Return the call of one piece, which takes `part` of every block."""
    sizes = [
        None if side is None else (sum(part(count) for count in side.counts),)
        for side in (source, out)
    ]
    counts = receive_counts = None
    if request.receive_counts is not None:
        assert source is not None
        assert out is not None
        counts = tuple(part(count) for count in source.counts)
        receive_counts = tuple(part(count) for count in out.counts)
    elif request.counts is not None:
        counts = tuple(part(count) for count in known)
    return Request(
        request.collective,
        None if sizes[0] is None else _buffer(source_slot, sizes[0], request.data),
        None if sizes[1] is None else _buffer(out_slot, sizes[1], request.data),
        request.op,
        request.root,
        counts,
        receive_counts,
    )


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


def _sides(request: Request, rank: int, world_size: int) -> tuple[_Side | None, _Side | None]:
    """Return input and output as blocks; None if this rank does not use it."""
    collective = request.collective
    blocks = _all_counts(request, world_size)
    mine, received = (blocks[rank],), blocks
    if request.receive_counts is not None:
        received = tuple(count * request.row_count for count in request.receive_counts)
    source = request.source if collective.gives(rank, request.root) else None
    out = request.destination if collective.gets(rank, request.root) else None
    return (
        _side(source, blocks if collective.spreads else mine),
        _side(out, received if collective.gathers else mine),
    )


def _side(buffer: Buffer | None, counts: tuple[int, ...]) -> _Side | None:
    if buffer is None:
        return None
    return _Side(buffer.address, counts, (0, *accumulate(counts))[:-1])


def _buffer(address: int, shape: tuple[int, ...], like: Buffer) -> Buffer:
    return Buffer(address, shape, like.dtype, like.item_bytes, None)
