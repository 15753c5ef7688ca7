"""Movement of large private arrays, chunk by chunk, through stages in shared memory.

For chunk k a sender *fills* its stage with the next part of each of its pieces, and a receiver
*reads* its parts from the others' stages. There are three stages: chunk k is filled while chunk k-1
is read and the stage of k-2 is given back.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.chunks import (
    count_chunks,
    keep_up,
    signal_chunk,
    stage_of,
    wait_chunk,
    wait_chunk_of_all,
)
from gpucoll.backends.cpu.host.pieces import input_piece, landing, largest_piece_bytes, piece_bytes
from gpucoll.backends.cpu.host.tables import reduce_inputs
from gpucoll.backends.cpu.host.tuning import LANE_BYTES
from gpucoll.collectives import Flow
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_copy, store64
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.words import Call, Context, Status


@inline
def _lane_bytes(context: Context, call: Call) -> int:
    """Return how much of each piece a chunk carries: a spread stage has a lane for each rank."""
    if not call.spreads:
        return context.chunk_bytes
    share = context.chunk_bytes // context.world_size
    return share & ~(LANE_BYTES - 1)


@inline
def _part_bytes(
    context: Context, call: Call, sender: int, receiver: int, place: int, lane_bytes: int
) -> int:
    """Return how much of a piece chunk `place` carries; zero or less after the piece's end."""
    return min(lane_bytes, piece_bytes(context, call, sender, receiver) - place * lane_bytes)


@inline
def _fill(context: Context, call: Call, place: int, lane_bytes: int) -> None:
    """Copy the next part of each piece that this rank sends into its stage, and signal."""
    me, world_size = context.rank, context.world_size
    stage, start = stage_of(context, place, me), place * lane_bytes
    copy, ahead = context.copy_posted, context.prefetch_bytes
    if not call.spreads:
        size_bytes = _part_bytes(context, call, me, me, place, lane_bytes)
        if size_bytes > 0:
            call_copy(copy, stage, call.source + start, size_bytes, ahead)
    else:
        for step in range(1, world_size):
            rank = (me + step) % world_size
            size_bytes = _part_bytes(context, call, me, rank, place, lane_bytes)
            if size_bytes > 0:
                source = input_piece(context, call, rank) + start
                call_copy(copy, stage + rank * lane_bytes, source, size_bytes, ahead)
    signal_chunk(context, context.filled, place)


@inline
def _part_in_stage(context: Context, call: Call, rank: int, place: int, lane_bytes: int) -> int:
    """Return the address of this rank's part in the stage of `rank`."""
    lane = context.rank * lane_bytes if call.spreads else 0
    return stage_of(context, place, rank) + lane


@inline
def _copy_parts(context: Context, call: Call, place: int, lane_bytes: int) -> int:
    me, world_size = context.rank, context.world_size
    copy = context.copy_exchanged if call.flow == Flow.ALL else context.copy_take
    for step in range(1, world_size):
        rank = (me + step) % world_size
        if call.flow == Flow.FROM_ROOT and rank != call.root:
            continue
        status = wait_chunk(context, context.filled, place, rank)
        if status != Status.OK:
            return status
        size_bytes = _part_bytes(context, call, rank, me, place, lane_bytes)
        if size_bytes > 0:
            call_copy(
                copy,
                call.destination + landing(call, rank) + place * lane_bytes,
                _part_in_stage(context, call, rank, place, lane_bytes),
                size_bytes,
                context.prefetch_bytes,
            )
    return Status.OK


@inline
def _reduce_parts(context: Context, call: Call, place: int, lane_bytes: int) -> int:
    me, world_size = context.rank, context.world_size
    status = wait_chunk_of_all(context, context.filled, place)
    size_bytes = _part_bytes(context, call, me, me, place, lane_bytes)
    if status != Status.OK or size_bytes <= 0:
        return status
    sources, start = context.sources, place * lane_bytes
    for rank in range(world_size):
        store64(sources + 8 * rank, _part_in_stage(context, call, rank, place, lane_bytes))
    store64(sources + 8 * me, input_piece(context, call, me) + start)
    store64(context.destinations, call.destination + start)
    reduce_inputs(
        context, call, context.destinations, world_size, size_bytes, context.prefetch_bytes
    )
    return Status.OK


@inline
def _read(context: Context, call: Call, place: int, lane_bytes: int) -> int:
    """Take this rank's parts of chunk `place` out of the others' stages, and signal."""
    if call.kernel != 0:
        status = _reduce_parts(context, call, place, lane_bytes)
    else:
        status = _copy_parts(context, call, place, lane_bytes)
    if status == Status.OK:
        signal_chunk(context, context.read, place)
    return status


@inline
def _wait_read(context: Context, call: Call, place: int) -> int:
    """Wait until all ranks that need chunk `place` of this rank's stage have read it."""
    if call.flow == Flow.TO_ROOT:
        return wait_chunk(context, context.read, place, call.root)
    return wait_chunk_of_all(context, context.read, place)


@inline
def move_staged(context: Context, call: Call, sends: int, receives: int) -> int:
    """Move chunk by chunk; return a status. After that no rank reads this rank's stages."""
    lane_bytes = _lane_bytes(context, call)
    chunks = (largest_piece_bytes(context, call) + lane_bytes - 1) // lane_bytes
    if sends:
        for place in range(min(chunks, layout.STAGES)):
            _fill(context, call, place, lane_bytes)
    for place in range(chunks + 1):
        if receives and place < chunks:
            status = _read(context, call, place, lane_bytes)
            if status != Status.OK:
                return status
        if sends and place > 0:
            status = _wait_read(context, call, place - 1)
            if status != Status.OK:
                return status
            following = place - 1 + layout.STAGES
            if following < chunks:
                _fill(context, call, following, lane_bytes)
    count_chunks(context, chunks)
    if not sends:
        keep_up(context, context.filled)
    if not receives:
        keep_up(context, context.read)
    return Status.OK
