"""Movement of large private arrays, chunk by chunk, through stages in shared memory.

For chunk k a sender *fills* its stage with the next part of each of its pieces, and a receiver
*reads* its parts from the others' stages. There are three stages: chunk k is filled while chunk k-1
is read and the stage of k-2 is given back.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.chunks import (
    CHUNK_BYTES,
    FILLED,
    READ,
    count_chunks,
    keep_up,
    signal_chunk,
    stage_of,
    wait_chunk,
    wait_chunk_of_all,
)
from gpucoll.backends.cpu.host.pieces import (
    IS_SPREAD,
    input_piece,
    landing,
    largest_piece_bytes,
    piece_bytes,
)
from gpucoll.backends.cpu.host.tables import DESTINATIONS, SOURCES, reduce_inputs
from gpucoll.backends.cpu.host.tuning import LANE_BYTES
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_copy, get, store64
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.steps import DESTINATION, KERNEL, OK, RANK, ROOT, SOURCE, WORLD_SIZE
from gpucoll.transport.shared.words import Call, Context, Flow

_COPY_POSTED, _COPY_TAKE = int(Context.COPY_POSTED), int(Context.COPY_TAKE)
_COPY_EXCHANGED = int(Context.COPY_EXCHANGED)
_PREFETCH_BYTES = int(Context.PREFETCH_BYTES)
_FLOW = int(Call.FLOW)
_ALL = int(Flow.ALL)
_FROM_ROOT, _TO_ROOT = int(Flow.FROM_ROOT), int(Flow.TO_ROOT)


@inline
def _lane_bytes(context, call):
    """Return how much of each piece a chunk carries: a spread stage has a lane for each rank."""
    if not get(call, IS_SPREAD):
        return get(context, CHUNK_BYTES)
    share = get(context, CHUNK_BYTES) // get(context, WORLD_SIZE)
    return share & ~(LANE_BYTES - 1)


@inline
def _part_bytes(context, call, sender, receiver, place, lane_bytes):
    """Return how much of a piece chunk `place` carries; zero or less after the piece's end."""
    return min(lane_bytes, piece_bytes(context, call, sender, receiver) - place * lane_bytes)


@inline
def _fill(context, call, place, lane_bytes):
    """Copy the next part of each piece that this rank sends into its stage, and signal."""
    me, world_size = get(context, RANK), get(context, WORLD_SIZE)
    stage, start = stage_of(context, place, me), place * lane_bytes
    copy, ahead = get(context, _COPY_POSTED), get(context, _PREFETCH_BYTES)
    if not get(call, IS_SPREAD):
        size_bytes = _part_bytes(context, call, me, me, place, lane_bytes)
        if size_bytes > 0:
            call_copy(copy, stage, get(call, SOURCE) + start, size_bytes, ahead)
    else:
        for step in range(1, world_size):
            rank = (me + step) % world_size
            size_bytes = _part_bytes(context, call, me, rank, place, lane_bytes)
            if size_bytes > 0:
                source = input_piece(context, call, rank) + start
                call_copy(copy, stage + rank * lane_bytes, source, size_bytes, ahead)
    signal_chunk(context, FILLED, place)


@inline
def _part_in_stage(context, call, rank, place, lane_bytes):
    """Return the address of this rank's part in the stage of `rank`."""
    lane = get(context, RANK) * lane_bytes if get(call, IS_SPREAD) else 0
    return stage_of(context, place, rank) + lane


@inline
def _copy_parts(context, call, place, lane_bytes):
    me, world_size = get(context, RANK), get(context, WORLD_SIZE)
    copy = get(context, _COPY_EXCHANGED if get(call, _FLOW) == _ALL else _COPY_TAKE)
    for step in range(1, world_size):
        rank = (me + step) % world_size
        if get(call, _FLOW) == _FROM_ROOT and rank != get(call, ROOT):
            continue
        status = wait_chunk(context, FILLED, place, rank)
        if status != OK:
            return status
        size_bytes = _part_bytes(context, call, rank, me, place, lane_bytes)
        if size_bytes > 0:
            call_copy(
                copy,
                get(call, DESTINATION) + landing(call, rank) + place * lane_bytes,
                _part_in_stage(context, call, rank, place, lane_bytes),
                size_bytes,
                get(context, _PREFETCH_BYTES),
            )
    return OK


@inline
def _reduce_parts(context, call, place, lane_bytes):
    me, world_size = get(context, RANK), get(context, WORLD_SIZE)
    status = wait_chunk_of_all(context, FILLED, place)
    size_bytes = _part_bytes(context, call, me, me, place, lane_bytes)
    if status != OK or size_bytes <= 0:
        return status
    sources, start = get(context, SOURCES), place * lane_bytes
    for rank in range(world_size):
        store64(sources + 8 * rank, _part_in_stage(context, call, rank, place, lane_bytes))
    store64(sources + 8 * me, input_piece(context, call, me) + start)
    store64(get(context, DESTINATIONS), get(call, DESTINATION) + start)
    reduce_inputs(
        context,
        call,
        get(context, DESTINATIONS),
        world_size,
        size_bytes,
        get(context, _PREFETCH_BYTES),
    )
    return OK


@inline
def _read(context, call, place, lane_bytes):
    """Take this rank's parts of chunk `place` out of the others' stages, and signal."""
    if get(call, KERNEL) != 0:
        status = _reduce_parts(context, call, place, lane_bytes)
    else:
        status = _copy_parts(context, call, place, lane_bytes)
    if status == OK:
        signal_chunk(context, READ, place)
    return status


@inline
def _wait_read(context, call, place):
    """Wait until all ranks that need chunk `place` of this rank's stage have read it."""
    if get(call, _FLOW) == _TO_ROOT:
        return wait_chunk(context, READ, place, get(call, ROOT))
    return wait_chunk_of_all(context, READ, place)


@inline
def move_staged(context, call, sends, receives):
    """Move chunk by chunk; return a status. After that no rank reads this rank's stages."""
    lane_bytes = _lane_bytes(context, call)
    chunks = (largest_piece_bytes(context, call) + lane_bytes - 1) // lane_bytes
    if sends:
        for place in range(min(chunks, layout.STAGES)):
            _fill(context, call, place, lane_bytes)
    for place in range(chunks + 1):
        if receives and place < chunks:
            status = _read(context, call, place, lane_bytes)
            if status != OK:
                return status
        if sends and place > 0:
            status = _wait_read(context, call, place - 1)
            if status != OK:
                return status
            following = place - 1 + layout.STAGES
            if following < chunks:
                _fill(context, call, following, lane_bytes)
    count_chunks(context, chunks)
    if not sends:
        keep_up(context, FILLED)
    if not receives:
        keep_up(context, READ)
    return OK
