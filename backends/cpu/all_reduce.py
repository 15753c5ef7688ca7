"""all_reduce within a host: one-shot, staged or symmetric, chosen the same way on every rank.

What a rank cannot know of the others (is their buffer in shared memory?) comes with their header,
so after the arrival of all, every rank decides the same without another round.
"""

from __future__ import annotations

from numba import types

from gpucoll.backends.cpu.staged import reduce_staged, stage_first_chunk
from gpucoll.backends.cpu.symmetric import reduce_symmetric
from gpucoll.backends.cpu.tables import DESTINATIONS, SOURCES, reduce_tables
from gpucoll.control.calls import (
    ARENA_BYTES,
    DESTINATION,
    NOT_SHARED,
    OK,
    PATH,
    RANK,
    SEQUENCE,
    SIZE_BYTES,
    SOURCE,
    WORLD_SIZE,
    arena_offset,
    begin,
    close_record,
    payload_of,
    post,
    posted_destination,
    posted_source,
    signal_done,
    slot_of,
    wait_all_arrived,
)
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import call_copy, get, put, store64
from gpucoll.transport.layout import Context, Path

_ONE_SHOT_BYTES, _COPY_POSTED = int(Context.ONE_SHOT_BYTES), int(Context.COPY_POSTED)
_PREFETCH_BYTES = int(Context.PREFETCH_BYTES)
_SYMMETRIC_MIN_BYTES = int(Context.SYMMETRIC_MIN_BYTES)
_LOCAL, _ONE_SHOT = int(Path.LOCAL), int(Path.ONE_SHOT)
_STAGED, _SYMMETRIC = int(Path.STAGED), int(Path.SYMMETRIC)


@inline
def _reduce_slots(context, call):
    """Reduce every rank's payload of this call, in rank order, into the destination."""
    size_bytes, sequence = get(call, SIZE_BYTES), get(context, SEQUENCE)
    sources, me = get(context, SOURCES), get(context, RANK)
    for rank in range(get(context, WORLD_SIZE)):
        store64(sources + 8 * rank, payload_of(slot_of(context, sequence, rank), size_bytes))
    store64(sources + 8 * me, get(call, SOURCE))
    store64(get(context, DESTINATIONS), get(call, DESTINATION))
    reduce_tables(context, call, 1, get(context, WORLD_SIZE), size_bytes, 0)
    put(context, PATH, _ONE_SHOT)


@inline
def _count_symmetric(context):
    """Return how many ranks posted buffers in shared memory, both input and output."""
    count = 0
    for rank in range(get(context, WORLD_SIZE)):
        has_source = posted_source(context, rank) != NOT_SHARED
        if has_source and posted_destination(context, rank) != NOT_SHARED:
            count += 1
    return count


@inline
def _alone(context, call):
    """Reduce over one rank: the op's preparation and finish, without any traffic."""
    store64(get(context, SOURCES), get(call, SOURCE))
    store64(get(context, DESTINATIONS), get(call, DESTINATION))
    reduce_tables(context, call, 1, 1, get(call, SIZE_BYTES), 0)
    put(context, PATH, _LOCAL)


@inline
def _together(context, call):
    size_bytes = get(call, SIZE_BYTES)
    source = destination = NOT_SHARED
    if size_bytes >= get(context, _SYMMETRIC_MIN_BYTES) and get(context, ARENA_BYTES) > 0:
        source = arena_offset(context, get(call, SOURCE), size_bytes)
        destination = arena_offset(context, get(call, DESTINATION), size_bytes)
    shared = source != NOT_SHARED and destination != NOT_SHARED
    is_small = size_bytes <= get(context, _ONE_SHOT_BYTES)
    if is_small and not shared:
        slot = slot_of(context, get(context, SEQUENCE), get(context, RANK))
        call_copy(
            get(context, _COPY_POSTED),
            payload_of(slot, size_bytes),
            get(call, SOURCE),
            size_bytes,
            get(context, _PREFETCH_BYTES),
        )
    post(context, call, source, destination)
    staged_ahead = not is_small and not shared
    if staged_ahead:
        stage_first_chunk(context, call)  # while the others arrive
    status = wait_all_arrived(context, call)
    if status != OK:
        return status
    n_shared = _count_symmetric(context)
    if n_shared == get(context, WORLD_SIZE):
        put(context, PATH, _SYMMETRIC)
        return reduce_symmetric(context, call)
    if is_small and n_shared == 0:
        _reduce_slots(context, call)
        return OK
    if not staged_ahead:
        stage_first_chunk(context, call)
    put(context, PATH, _STAGED)
    return reduce_staged(context, call)


@compiled(types.int64(types.int64, types.int64))
def all_reduce_loop(context, call):
    """Run one all_reduce as the call block says; return a status."""
    status = begin(context, call)
    if status != OK:
        return status
    if get(context, WORLD_SIZE) == 1:
        _alone(context, call)
    else:
        status = _together(context, call)
        if status != OK:
            return status
    signal_done(context)
    close_record(context)
    return OK
