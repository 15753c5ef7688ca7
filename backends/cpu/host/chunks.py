"""Chunks of larger arrays in the stages: three stages per rank, used in turn.

Every rank counts the chunks of all staged calls in the same way. A rank's *filled* word is the
number of the last chunk that its stages are ready to give; its *read* word is the number of the
last chunk that it has read from the others. The words of all ranks are in the lines
`Context.filled` and `Context.read`.
"""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import signal, wait
from gpucoll.transport.shared.steps import LINE
from gpucoll.transport.shared.words import Context, Status


@inline
def stage_of(context: Context, place: int, rank: int) -> int:
    """Return the address of the stage of `rank` for chunk `place` of this call."""
    turn = (context.chunk + place) % layout.STAGES
    return context.stages + (turn * context.world_size + rank) * context.chunk_bytes


@inline
def signal_chunk(context: Context, lines: int, place: int) -> None:
    """Announce that this rank has filled, or read, chunk `place` of this call."""
    signal(lines + context.rank * LINE, context.chunk + place + 1)


@inline
def wait_chunk(context: Context, lines: int, place: int, rank: int) -> int:
    """Wait until `rank` has filled, or read, chunk `place` of this call; return a status."""
    address = lines + rank * LINE
    return wait(context, address, context.chunk + place + 1, rank)


@inline
def wait_chunk_of_all(context: Context, lines: int, place: int) -> int:
    """Wait until every other rank has filled, or read, chunk `place`; return a status."""
    me, world_size = context.rank, context.world_size
    for step in range(1, world_size):
        status = wait_chunk(context, lines, place, (me + step) % world_size)
        if status != Status.OK:
            return status
    return Status.OK


@inline
def count_chunks(context: Context, chunks: int) -> None:
    """Add a call's chunks to the count: it has ended."""
    context.chunk += chunks


@inline
def keep_up(context: Context, lines: int) -> None:
    """Advance this rank's word over the chunks in which it had no part.

    A word left behind by 2**31 chunks (hours of broadcasts from one root) would seem to be ahead.
    """
    signal(lines + context.rank * LINE, context.chunk)
