"""Chunks of larger arrays in the stages: three stages per rank, used in turn.

Every rank counts the chunks of all staged calls in the same way. A rank's *filled* word is the
number of the last chunk that its stages are ready to give; its *read* word is the number of the
last chunk that it has read from the others.
"""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import get, put
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import signal, wait
from gpucoll.transport.shared.steps import LINE, OK, RANK, WORLD_SIZE
from gpucoll.transport.shared.words import Context

CHUNK, CHUNK_BYTES = int(Context.CHUNK), int(Context.CHUNK_BYTES)
FILLED, READ = int(Context.FILLED), int(Context.READ)
_STAGES = int(Context.STAGES)


@inline
def stage_of(context, place, rank):
    """Return the address of the stage of `rank` for chunk `place` of this call."""
    turn = (get(context, CHUNK) + place) % layout.STAGES
    return get(context, _STAGES) + (turn * get(context, WORLD_SIZE) + rank) * get(
        context, CHUNK_BYTES
    )


@inline
def signal_chunk(context, words, place):
    """Announce that this rank has filled, or read, chunk `place` of this call."""
    signal(get(context, words) + get(context, RANK) * LINE, get(context, CHUNK) + place + 1)


@inline
def wait_chunk(context, words, place, rank):
    """Wait until `rank` has filled, or read, chunk `place` of this call; return a status."""
    address = get(context, words) + rank * LINE
    return wait(context, address, get(context, CHUNK) + place + 1, rank)


@inline
def wait_chunk_of_all(context, words, place):
    """Wait until every other rank has filled, or read, chunk `place`; return a status."""
    me, world_size = get(context, RANK), get(context, WORLD_SIZE)
    for step in range(1, world_size):
        status = wait_chunk(context, words, place, (me + step) % world_size)
        if status != OK:
            return status
    return OK


@inline
def count_chunks(context, chunks):
    """Add a call's chunks to the count: it has ended."""
    put(context, CHUNK, get(context, CHUNK) + chunks)


@inline
def keep_up(context, words):
    """Advance this rank's word over the chunks in which it had no part.

    A word left behind by 2**31 chunks (hours of broadcasts from one root) would seem to be ahead.
    """
    signal(get(context, words) + get(context, RANK) * LINE, get(context, CHUNK))
