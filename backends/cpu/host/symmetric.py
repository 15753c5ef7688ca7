"""Reduction of arrays that lie in shared arenas: without copies, at the memory's own speed.

After all ranks have arrived, each rank loads its slice of every rank's input, reduces it, and
stores the result to every rank's output; then it waits for the end of all. Offsets may differ
between ranks.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.tables import reduce_for_all
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import store64
from gpucoll.transport.shared.flags import event_pending_since
from gpucoll.transport.shared.peer_arena import reach
from gpucoll.transport.shared.steps import (
    posted_destination,
    posted_source,
    signal_done,
    wait_all_done,
)
from gpucoll.transport.shared.words import Call, Context, Status

SLICE_ALIGNMENT = 256
"""Slices are whole blocks of the reduce kernel: only the last one has a remainder."""

PREFETCH_MIN_BYTES = 64 << 10
"""Smaller slices are not prefetched: the data ahead would be the next rank's slice."""


@inline
def slice_bytes(size_bytes: int, world_size: int) -> int:
    """Return the size of one rank's slice of `size_bytes`."""
    share = (size_bytes + world_size - 1) // world_size
    return (share + SLICE_ALIGNMENT - 1) & ~(SLICE_ALIGNMENT - 1)


@inline
def reduce_symmetric(context: Context, call: Call) -> int:
    """Reduce my slice of all ranks' arrays for all ranks; return when all ranks have finished."""
    world_size, size_bytes = context.world_size, call.size_bytes
    share = slice_bytes(size_bytes, world_size)
    start = context.rank * share
    stop = min(start + share, size_bytes)
    sources, destinations = context.sources, context.destinations
    if stop > start:
        for rank in range(world_size):
            source, destination = posted_source(context, rank), posted_destination(context, rank)
            arena = reach(context, rank, max(source, destination) + size_bytes)
            if arena == 0:
                return Status.EVENT
            store64(sources + 8 * rank, arena + source + start)
            store64(destinations + 8 * rank, arena + destination + start)
        ahead = context.prefetch_bytes if stop - start >= PREFETCH_MIN_BYTES else 0
        reduce_for_all(context, call, stop - start, ahead)
    signal_done(context)
    status = wait_all_done(context, context.sequence)
    # A peer that gave up may have reused its memory while this rank still read it.
    return Status.EVENT if status == Status.OK and event_pending_since(context) else status
