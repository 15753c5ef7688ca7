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
    CHUNK_BYTES,
    FILLED,
    READ,
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
from gpucoll.backends.cpu.host.tables import DESTINATIONS, SOURCES, n_inputs, reduce_for_all
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_copy, call_refill, get, store64
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.steps import DESTINATION, OK, RANK, SIZE_BYTES, SOURCE, WORLD_SIZE
from gpucoll.transport.shared.words import Context

_COPY_POSTED = int(Context.COPY_POSTED)
_COPY_IN, _COPY_OUT = int(Context.COPY_IN), int(Context.COPY_OUT)
_REFILL = int(Context.REFILL)
_PREFETCH_BYTES = int(Context.PREFETCH_BYTES)


@inline
def _fill(context, call, place):
    """Copy the others' slices of chunk `place` of my source into my stage."""
    me, world_size = get(context, RANK), get(context, WORLD_SIZE)
    chunk_bytes = get(context, CHUNK_BYTES)
    offset = place * chunk_bytes
    size_bytes = min(chunk_bytes, get(call, SIZE_BYTES) - offset)
    share = slice_bytes(size_bytes, world_size)
    stage = stage_of(context, place, me)
    for step in range(1, world_size):
        start = ((me + step) % world_size) * share
        stop = min(start + share, size_bytes)
        if stop > start:
            copy_in(
                call,
                get(context, _COPY_IN),
                stage + start,
                offset + start,
                stop - start,
                get(context, _PREFETCH_BYTES),
            )


@inline
def _set_tables(context, call, place, segment, offset, start):
    """Set the addresses of each rank's input and result, from `start` in a chunk on."""
    sources, results = get(context, SOURCES), get(context, DESTINATIONS)
    for rank in range(get(context, WORLD_SIZE)):
        stage = stage_of(context, place, rank) + start
        store64(sources + 8 * rank, stage)
        store64(results + 8 * rank, stage)
    mine = 8 * get(context, RANK)
    store64(sources + mine, input_at(call, segment, offset + start))
    store64(results + mine, output_at(call, segment, offset + start))


@inline
def _reduce(context, call, place):
    """Reduce my slice of chunk `place` into my destination and into other ranks' stages."""
    me, world_size = get(context, RANK), get(context, WORLD_SIZE)
    chunk_bytes = get(context, CHUNK_BYTES)
    offset = place * chunk_bytes
    size_bytes = min(chunk_bytes, get(call, SIZE_BYTES) - offset)
    share = slice_bytes(size_bytes, world_size)
    start = me * share
    stop = min(start + share, size_bytes)
    if stop <= start:
        return
    segment, done = segment_at(call, offset + start), start
    while done < stop:
        step = run_bytes(call, segment, offset + done, stop - done)
        _set_tables(context, call, place, segment, offset, done)
        reduce_for_all(context, call, step, get(context, _PREFETCH_BYTES))
        done += step
        segment += 1


@inline
def _drain(context, call, place, refills):
    """Copy each other rank's slice of chunk `place` out of my stage as soon as it is reduced.

    With `refills`, chunk ``place + STAGES`` goes into the stage in the same pass.
    """
    me, world_size = get(context, RANK), get(context, WORLD_SIZE)
    chunk_bytes, ahead = get(context, CHUNK_BYTES), get(context, _PREFETCH_BYTES)
    offset = place * chunk_bytes
    size_bytes = min(chunk_bytes, get(call, SIZE_BYTES) - offset)
    share = slice_bytes(size_bytes, world_size)
    has_result = n_inputs(context, call) > 0
    stage = stage_of(context, place, me)
    destination = get(call, DESTINATION) + offset
    refill = get(call, SOURCE) + offset + layout.STAGES * chunk_bytes
    for step in range(1, world_size):
        rank = (me + step) % world_size
        status = wait_chunk(context, READ, place, rank)
        if status != OK:
            return status
        start = rank * share
        size = min(start + share, size_bytes) - start
        if size <= 0:
            continue
        if not has_result:
            if refills:
                call_copy(get(context, _COPY_POSTED), stage + start, refill + start, size, ahead)
        elif refills:
            call_refill(
                get(context, _REFILL),
                destination + start,
                stage + start,
                refill + start,
                size,
                ahead,
            )
        else:
            kernel = get(context, _COPY_OUT)
            copy_out(call, kernel, stage + start, offset + start, size, ahead)
    return OK


@inline
def stage_first_chunk(context, call):
    """Fill the first chunk without signalling it: perhaps no rank needs it."""
    _fill(context, call, 0)


@inline
def _fill_and_signal(context, call, place):
    _fill(context, call, place)
    signal_chunk(context, FILLED, place)


@inline
def reduce_staged(context, call):
    """Reduce chunk by chunk, with the first chunk already filled; return a status."""
    size_bytes, chunk_bytes = get(call, SIZE_BYTES), get(context, CHUNK_BYTES)
    chunks = (size_bytes + chunk_bytes - 1) // chunk_bytes
    signal_chunk(context, FILLED, 0)
    for place in range(1, min(chunks, layout.STAGES)):
        _fill_and_signal(context, call, place)
    for place in range(chunks + 1):
        if place < chunks:
            status = wait_chunk_of_all(context, FILLED, place)
            if status != OK:
                return status
            _reduce(context, call, place)
            signal_chunk(context, READ, place)
        if place > 0:
            following = place - 1 + layout.STAGES
            # In whole chunks the slices match; in a single array the pieces do.
            refills = (following + 1) * chunk_bytes <= size_bytes and is_one_piece(call)
            status = _drain(context, call, place - 1, refills)
            if status != OK:
                return status
            if refills:
                signal_chunk(context, FILLED, following)
            elif following < chunks:
                _fill_and_signal(context, call, following)
    count_chunks(context, chunks)
    return OK
