"""The records of a `gpucoll.memory.heap`: one for each block, and lists of the free blocks.

The method is two-level segregated fit (Masmano, Ripoll, Crespo and Real, ECRTS 2004). Free blocks
are in lists by size, with eight sizes for each power of two, and a bitmap of the lists finds the
first that has a block.

A block is identified by its first granule. Every granule has a record, but only those of first
granules are used. To Numba, every address, size and granule is an int64; `Heap` names the words of
the state.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from gpucoll.kernels.cpu.jit import inline, intrinsic, types
from gpucoll.kernels.cpu.memory import get, put

RECORD_BYTES = 64
"""One cache line: six per cent of the smallest blocks. Under larger blocks it stays untouched."""
N_LISTS = 320
"""Enough for blocks of 2**40 granules, more than a processor can address."""


class Heap(IntEnum):
    """Words of an allocator's state, in private memory: a forked child has its own copy."""

    BASE = 0
    """Address at which the memory is mapped."""
    SIZE_BYTES = 1
    RECORDS = 2
    """Address of the granules' records."""
    LOCK = 3
    IS_FORKED = 4
    """Set in a child's copy: the parent owns memory and records; nothing is taken or given."""
    GENERATION = 5
    """The current generation, from 1 on. Blocks of an earlier generation are retired."""
    USED = 6
    """Granules in use. This and the next three count granules; `BLOCKS` counts blocks."""
    KEPT = 7
    """Granules that are free and may have been touched."""
    KEEP_AT_MOST = 8
    RETIRED = 9
    """Granules that were retired and then freed; they are never allocated again."""
    BLOCKS = 10
    TAKE = 11
    """Address of `take`."""
    GIVE = 12
    """Address of `give`."""
    BITMAP = 13
    LISTS = 18


HEAP_WORDS = Heap.LISTS + N_LISTS

# Words of a record. Lists are linked by granule and end with `NONE`.
SIZE, BEFORE, OWNER, TOUCHED, NEXT, PREVIOUS = range(6)
FREE = 0  # in OWNER; otherwise the generation in which the block was allocated
GONE = -1  # in OWNER: retired and freed, or the end of the memory
NONE = -1

# Plain ints, which Numba freezes into the code.
_RECORDS, _KEPT = int(Heap.RECORDS), int(Heap.KEPT)
_BITMAP, _LISTS = int(Heap.BITMAP), int(Heap.LISTS)
_BITMAP_WORDS = N_LISTS // 64


def _count_zeros(instruction: str) -> Any:
    @intrinsic(types.int64(types.int64))
    def count(codegen: Any, b: Any, value: Any) -> Any:
        return getattr(b, instruction)(value, codegen.I1(0))

    return count


leading_zeros = _count_zeros("ctlz")
trailing_zeros = _count_zeros("cttz")


@inline
def record_of(heap, block):
    """Return the address of a granule's record."""
    return get(heap, _RECORDS) + block * RECORD_BYTES


@inline
def _list_of(size):
    if size < 8:
        return size
    power = 63 - leading_zeros(size)
    return (power - 2) * 8 + ((size >> (power - 3)) & 7)


@inline
def link(heap, block, size, touched):
    """Make granules a free block; its first `touched` granules may not be zero."""
    record, place = record_of(heap, block), _list_of(size)
    first = get(heap, _LISTS + place)
    put(record, SIZE, size)
    put(record, OWNER, FREE)
    put(record, TOUCHED, touched)
    put(record, NEXT, first)
    put(record, PREVIOUS, NONE)
    put(record_of(heap, block + size), BEFORE, size)
    if first != NONE:
        put(record_of(heap, first), PREVIOUS, block)
    put(heap, _LISTS + place, block)
    word = _BITMAP + (place >> 6)
    put(heap, word, get(heap, word) | (1 << (place & 63)))
    put(heap, _KEPT, get(heap, _KEPT) + touched)


@inline
def unlink(heap, block):
    """Remove a free block from its list."""
    record = record_of(heap, block)
    following, preceding = get(record, NEXT), get(record, PREVIOUS)
    if following != NONE:
        put(record_of(heap, following), PREVIOUS, preceding)
    if preceding != NONE:
        put(record_of(heap, preceding), NEXT, following)
    else:
        place = _list_of(get(record, SIZE))
        put(heap, _LISTS + place, following)
        if following == NONE:
            word = _BITMAP + (place >> 6)
            put(heap, word, get(heap, word) & ~(1 << (place & 63)))
    put(heap, _KEPT, get(heap, _KEPT) - get(record, TOUCHED))


@inline
def find(heap, size):
    """Return a free block of at least `size` granules, or NONE."""
    wanted = size
    if size >= 8:  # the first list in which every block is large enough
        wanted += (1 << (60 - leading_zeros(size))) - 1
    place = _list_of(wanted)
    word = place >> 6
    lists = get(heap, _BITMAP + word) & (-1 << (place & 63))
    while lists == 0 and word < _BITMAP_WORDS - 1:
        word += 1
        lists = get(heap, _BITMAP + word)
    if lists != 0:
        return get(heap, _LISTS + 64 * word + trailing_zeros(lists))
    block = get(heap, _LISTS + _list_of(size))  # nearly full: the next smaller list may have one
    while block != NONE and get(record_of(heap, block), SIZE) < size:
        block = get(record_of(heap, block), NEXT)
    return block
