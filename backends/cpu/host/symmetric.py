"""Reduction of arrays that lie in shared arenas: no copies, at the memory's own speed.

Between the arrival of all and the end of all, each rank loads its slice from every rank's input,
reduces, and stores the result to every rank's output. Offsets may differ from rank to rank.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.tables import DESTINATIONS, SOURCES, reduce_for_all
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import get, store64
from gpucoll.transport.shared.flags import event_pending_since
from gpucoll.transport.shared.peer_arena import reach
from gpucoll.transport.shared.steps import (
    EVENT,
    OK,
    RANK,
    SEQUENCE,
    SIZE_BYTES,
    WORLD_SIZE,
    posted_destination,
    posted_source,
    signal_done,
    wait_all_done,
)
from gpucoll.transport.shared.words import Context

SLICE_ALIGNMENT = 256
"""Slices are whole blocks of the reduce kernel: only the last one has a tail."""

PREFETCH_MIN_BYTES = 64 << 10
"""Smaller slices are not prefetched: what lies ahead would be the next rank's slice."""

_PREFETCH_BYTES = int(Context.PREFETCH_BYTES)


@inline
def slice_bytes(size_bytes, world_size):
    """Return the size of one rank's slice of `size_bytes`."""
    share = (size_bytes + world_size - 1) // world_size
    return (share + SLICE_ALIGNMENT - 1) & ~(SLICE_ALIGNMENT - 1)


@inline
def reduce_symmetric(context, call):
    """Reduce my slice of everybody's arrays for everybody; return when all have done theirs."""
    world_size, size_bytes = get(context, WORLD_SIZE), get(call, SIZE_BYTES)
    share = slice_bytes(size_bytes, world_size)
    start = get(context, RANK) * share
    stop = min(start + share, size_bytes)
    sources, destinations = get(context, SOURCES), get(context, DESTINATIONS)
    if stop > start:
        for rank in range(world_size):
            source, destination = posted_source(context, rank), posted_destination(context, rank)
            arena = reach(context, rank, max(source, destination) + size_bytes)
            if arena == 0:
                return EVENT
            store64(sources + 8 * rank, arena + source + start)
            store64(destinations + 8 * rank, arena + destination + start)
        ahead = get(context, _PREFETCH_BYTES) if stop - start >= PREFETCH_MIN_BYTES else 0
        reduce_for_all(context, call, stop - start, ahead)
    signal_done(context)
    status = wait_all_done(context, get(context, SEQUENCE))
    # A peer that gave up may have used its memory anew while this rank still read it.
    return EVENT if status == OK and event_pending_since(context) else status
