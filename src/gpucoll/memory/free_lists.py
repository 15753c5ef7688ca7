"""The records of a `gpucoll.memory.heap`: one for each block, and lists of the free blocks.

The method is two-level segregated fit (Masmano, Ripoll, Crespo and Real, ECRTS 2004). Free blocks
are in lists by size, with eight sizes for each power of two, and a bitmap of the lists finds the
first that has a block.

A block is identified by its first granule. Every granule has a record, but only those of first
granules are used. To Numba, every address, size and granule is an int64; `Heap` names the words of
the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpucoll.blocks import Block, Field, Words, words
from gpucoll.kernels.cpu.jit import inline, intrinsic, types

N_LISTS = 320
"""Enough for blocks of 2**40 granules, more than a processor can address."""
_BITMAP_WORDS = N_LISTS // 64


class Heap(Block):
    """An allocator's state, in private memory: a forked child has its own copy."""

    base: int
    """Address at which the memory is mapped."""
    memory_bytes: int
    records: int
    """Address of the granules' records."""
    lock: int
    is_forked: int
    """Set in a child's copy: the parent owns memory and records; nothing is taken or given."""
    generation: int
    """The current generation, from 1 on. Blocks of an earlier generation are retired."""
    used: int
    """Granules in use. This and the next three count granules; `blocks` counts blocks."""
    kept: int
    """Granules that are free and may have been touched."""
    keep_at_most: int
    retired: int
    """Granules that were retired and then freed; they are never allocated again."""
    blocks: int
    take: int
    """Address of `take`."""
    give: int
    """Address of `give`."""
    bitmap: Field[Words] = words(_BITMAP_WORDS)
    lists: Field[Words] = words(N_LISTS)
    """The first block of each list, or `NONE`."""


class Record(Block):
    """What is known of a block: lists are linked by granule and end with `NONE`.

    One cache line: six per cent of the smallest blocks. Under larger blocks it stays untouched.
    """

    size: int
    before: int
    """The size of the block before this one."""
    owner: int
    """`FREE`, `GONE`, or the generation in which the block was allocated."""
    touched: int
    next: int
    previous: int
    _rest: Field[Words] = words(2)


FREE = 0
GONE = -1  # retired and freed, or the end of the memory
NONE = -1


def _count_zeros(instruction: str) -> Callable[[int], int]:
    @intrinsic(types.int64(types.int64))
    def count(codegen: Any, b: Any, value: Any) -> Any:
        return getattr(b, instruction)(value, codegen.I1(0))

    return count


leading_zeros = _count_zeros("ctlz")
trailing_zeros = _count_zeros("cttz")


@inline
def record_of(heap: Heap, block: int) -> Record:
    """Return a granule's record."""
    return Record(heap.records + block * Record.n_bytes)


@inline
def _list_of(size: int) -> int:
    if size < 8:
        return size
    power = 63 - leading_zeros(size)
    return (power - 2) * 8 + ((size >> (power - 3)) & 7)


@inline
def link(heap: Heap, block: int, size: int, touched: int) -> None:
    """Make granules a free block; its first `touched` granules may not be zero."""
    record, place = record_of(heap, block), _list_of(size)
    first = heap.lists[place]
    record.size = size
    record.owner = FREE
    record.touched = touched
    record.next = first
    record.previous = NONE
    record_of(heap, block + size).before = size
    if first != NONE:
        record_of(heap, first).previous = block
    heap.lists[place] = block
    heap.bitmap[place >> 6] |= 1 << (place & 63)
    heap.kept += touched


@inline
def unlink(heap: Heap, block: int) -> None:
    """Remove a free block from its list."""
    record = record_of(heap, block)
    following, preceding = record.next, record.previous
    if following != NONE:
        record_of(heap, following).previous = preceding
    if preceding != NONE:
        record_of(heap, preceding).next = following
    else:
        place = _list_of(record.size)
        heap.lists[place] = following
        if following == NONE:
            heap.bitmap[place >> 6] &= ~(1 << (place & 63))
    heap.kept -= record.touched


@inline
def find(heap: Heap, size: int) -> int:
    """Return a free block of at least `size` granules, or NONE."""
    wanted = size
    if size >= 8:  # the first list in which every block is large enough
        wanted += (1 << (60 - leading_zeros(size))) - 1
    place = _list_of(wanted)
    word = place >> 6
    lists = heap.bitmap[word] & (-1 << (place & 63))
    while lists == 0 and word < _BITMAP_WORDS - 1:
        word += 1
        lists = heap.bitmap[word]
    if lists != 0:
        return heap.lists[64 * word + trailing_zeros(lists)]
    block = heap.lists[_list_of(size)]  # nearly full: the next smaller list may have one
    while block != NONE and record_of(heap, block).size < size:
        block = record_of(heap, block).next
    return block
