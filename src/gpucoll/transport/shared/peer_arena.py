"""A peer's arena in this process: mapped as far as it is used, and extended on demand.

An arena has as much address space as the machine has memory. To map the whole arenas of all ranks
would take more address space than a process may have. So the first part is mapped when the ranks
meet. When a call needs more, a new mapping is made from the arena's beginning, four times as large
or larger. The old mapping stays until the last communicator with this peer is closed, because
another thread may be reading there.
"""

from __future__ import annotations

import numpy as np

from gpucoll.blocks import Block, Field, Words, words
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import call_reach, compare_exchange64, load64, load64_acquire
from gpucoll.transport.shared.flags import give_up
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Context

__all__ = ["FIRST_BYTES", "GROWTHS", "PeerArena", "arena_of", "map_more", "reach"]

FIRST_BYTES = 1 << 20
GROWTHS = 20
_GROWTH_BITS = 2


class PeerArena(Block):
    """An arena: one block for all communicators of this process."""

    mapped: int  # how often the mapping has grown
    size_bytes: int
    mappings: Field[Words] = words(GROWTHS + 1)  # for each growth: the address of its mapping


_MAY_MOVE = 1

_i64, _i32 = types.int64, types.int32
_mremap = types.ExternalFunction("mremap", _i64(_i64, _i64, _i64, _i32))
_munmap = types.ExternalFunction("munmap", _i32(_i64, _i64))


@inline
def _reaches(growth: int, stop: int) -> bool:
    """Return whether the mapping after `growth` growths includes all offsets before `stop`."""
    return stop <= FIRST_BYTES << (_GROWTH_BITS * growth)


@inline
def arena_of(context: Context, rank: int) -> int:
    """Return where the arena of `rank` is mapped, as far as `reach` has mapped it."""
    arena = PeerArena(load64(context.arenas + 8 * rank))
    return load64(arena.at.mappings + 8 * (load64_acquire(arena.at.mapped)))


@inline
def reach(context: Context, rank: int, stop: int) -> int:
    """Return the address of `rank`'s arena, mapped up to offset `stop`; 0: it was given up."""
    arena = PeerArena(load64(context.arenas + 8 * rank))
    growth = load64_acquire(arena.at.mapped)
    if _reaches(growth, stop):
        return load64(arena.at.mappings + 8 * growth)
    return call_reach(context.map_more, context, rank, stop)


@inline
def _map_growth(arena: PeerArena, growth: int) -> int:
    """Map the arena again, from its beginning, for this growth; return the address, or 0."""
    place = arena.at.mappings + 8 * growth
    address = load64_acquire(place)
    if address != 0:
        return address
    size_bytes = min(FIRST_BYTES << (_GROWTH_BITS * growth), load64(arena.at.size_bytes))
    # If the old size is 0, mremap(2) maps the same memory a second time.
    address = _mremap(load64(arena.at.mappings), 0, size_bytes, np.int32(_MAY_MOVE))
    if address == -1:
        return 0
    before = compare_exchange64(place, 0, address)
    if before == 0:
        return address
    _munmap(address, size_bytes)
    return before


@compiled
def map_more(context: Context, rank: int, stop: int) -> int:
    """Map the arena of `rank` up to `stop`; return its address, or give up and return 0."""
    arena = PeerArena(load64(context.arenas + 8 * rank))
    growth = load64_acquire(arena.at.mapped)
    while not _reaches(growth, stop):
        growth += 1
    address = 0
    if stop <= load64(arena.at.size_bytes):
        address = _map_growth(arena, growth)
    if address == 0:
        give_up(context, Abort.NO_ADDRESSES, context.rank)
        return 0
    before = load64_acquire(arena.at.mapped)
    while before < growth:  # another thread may have gone further
        before = compare_exchange64(arena.at.mapped, before, growth)
    return address
