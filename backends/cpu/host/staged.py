"""Reduction of large private arrays, chunk by chunk, through stages in shared memory.

For chunk k every rank

- *fills*: copies the slices that other ranks own into its own stage, and signals;
- *reduces*: when all have filled, reduces its own slice, from its own array and the others' stages,
  into its destination *and back into the others' stages*, and signals;
- *drains*: when all have reduced, copies the other slices out of its own stage.

The cost lies in cache lines that change hands, not in passes over memory. Results that come back in
the lines that carried the input move each line twice; a separate result buffer would move it four
times. A stage is drained and refilled in one pass. The order is reduce(k), then drain(k-1) with
fill(k+2), with three stages; source and destination may be the same array. Measurements:
`docs/decisions/0003-staged-ping-pong.md`.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.chunks import (
    count_chunks,
    signal_chunk,
    stage_of,
    wait_chunk,
    wait_chunk_of_all,
)
from gpucoll.backends.cpu.host.segments import (
    copy_in,
    copy_out,
    input_at,
    is_one_piece,
    output_at,
    run_bytes,
    segment_at,
)
from gpucoll.backends.cpu.host.symmetric import slice_bytes
from gpucoll.backends.cpu.host.tables import n_inputs, reduce_for_all
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_copy, call_refill, store64
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.words import Call, Context, Status


@inline
def _fill(context: Context, call: Call, place: int) -> None:
    """Copy the others' slices of chunk `place` of my source into my stage."""
    me, world_size = context.rank, context.world_size
    chunk_bytes = context.chunk_bytes
    offset = place * chunk_bytes
    size_bytes = min(chunk_bytes, call.size_bytes - offset)
    share = slice_bytes(size_bytes, world_size)
    stage = stage_of(context, place, me)
    for step in range(1, world_size):
        start = ((me + step) % world_size) * share
        stop = min(start + share, size_bytes)
        if stop > start:
            copy_in(
                call,
                context.copy_in,
                stage + start,
                offset + start,
                stop - start,
                context.prefetch_bytes,
            )


@inline
def _set_tables(
    context: Context, call: Call, place: int, segment: int, offset: int, start: int
) -> None:
    """Set the addresses of each rank's input and result, from `start` in a chunk on."""
    sources, results = context.sources, context.destinations
    for rank in range(context.world_size):
        stage = stage_of(context, place, rank) + start
        store64(sources + 8 * rank, stage)
        store64(results + 8 * rank, stage)
    mine = 8 * context.rank
    store64(sources + mine, input_at(call, segment, offset + start))
    store64(results + mine, output_at(call, segment, offset + start))


@inline
def _reduce(context: Context, call: Call, place: int) -> None:
    """Reduce my slice of chunk `place` into my destination and into other ranks' stages."""
    me, world_size = context.rank, context.world_size
    chunk_bytes = context.chunk_bytes
    offset = place * chunk_bytes
    size_bytes = min(chunk_bytes, call.size_bytes - offset)
    share = slice_bytes(size_bytes, world_size)
    start = me * share
    stop = min(start + share, size_bytes)
    if stop <= start:
        return
    segment, done = segment_at(call, offset + start), start
    while done < stop:
        step = run_bytes(call, segment, offset + done, stop - done)
        _set_tables(context, call, place, segment, offset, done)
        reduce_for_all(context, call, step, context.prefetch_bytes)
        done += step
        segment += 1


@inline
def _drain(context: Context, call: Call, place: int, refills: int) -> int:
    """Copy each other rank's slice of chunk `place` out of my stage as soon as it is reduced.

    With `refills`, chunk ``place + STAGES`` goes into the stage in the same pass.
    """
    me, world_size = context.rank, context.world_size
    chunk_bytes, ahead = context.chunk_bytes, context.prefetch_bytes
    offset = place * chunk_bytes
    size_bytes = min(chunk_bytes, call.size_bytes - offset)
    share = slice_bytes(size_bytes, world_size)
    has_result = n_inputs(context, call) > 0
    stage = stage_of(context, place, me)
    destination = call.destination + offset
    refill = call.source + offset + layout.STAGES * chunk_bytes
    for step in range(1, world_size):
        rank = (me + step) % world_size
        status = wait_chunk(context, context.read, place, rank)
        if status != Status.OK:
            return status
        start = rank * share
        size = min(start + share, size_bytes) - start
        if size <= 0:
            continue
        if not has_result:
            if refills:
                call_copy(context.copy_posted, stage + start, refill + start, size, ahead)
        elif refills:
            call_refill(
                context.refill, destination + start, stage + start, refill + start, size, ahead
            )
        else:
            kernel = context.copy_out
            copy_out(call, kernel, stage + start, offset + start, size, ahead)
    return Status.OK


@inline
def stage_first_chunk(context: Context, call: Call) -> None:
    """Fill the first chunk without signalling it: perhaps no rank needs it."""
    _fill(context, call, 0)


@inline
def _fill_and_signal(context: Context, call: Call, place: int) -> None:
    _fill(context, call, place)
    signal_chunk(context, context.filled, place)


@inline
def reduce_staged(context: Context, call: Call) -> int:
    """Reduce chunk by chunk, with the first chunk already filled; return a status."""
    size_bytes, chunk_bytes = call.size_bytes, context.chunk_bytes
    chunks = (size_bytes + chunk_bytes - 1) // chunk_bytes
    signal_chunk(context, context.filled, 0)
    for place in range(1, min(chunks, layout.STAGES)):
        _fill_and_signal(context, call, place)
    for place in range(chunks + 1):
        if place < chunks:
            status = wait_chunk_of_all(context, context.filled, place)
            if status != Status.OK:
                return status
            _reduce(context, call, place)
            signal_chunk(context, context.read, place)
        if place > 0:
            following = place - 1 + layout.STAGES
            # In whole chunks the slices match; in a single array the pieces do.
            refills = (following + 1) * chunk_bytes <= size_bytes and is_one_piece(call)
            status = _drain(context, call, place - 1, refills)
            if status != Status.OK:
                return status
            if refills:
                signal_chunk(context, context.filled, following)
            elif following < chunks:
                _fill_and_signal(context, call, following)
    count_chunks(context, chunks)
    return Status.OK
