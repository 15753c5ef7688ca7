"""A compiled allocator of shared memory: constant time, from any thread, with private records.

The memory itself holds no records, because peers can write there. A freed block merges with its
free neighbours at once, so divided blocks become whole again.

The first part of a free block may have been touched; the rest reads as zeros and uses no memory.
``calloc`` therefore clears only the first part, and the memory that is kept can be counted.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

from gpucoll.blocks import Block, Field, Words, words
from gpucoll.kernels.cpu.jit import compiled, inline, intrinsic, types
from gpucoll.kernels.cpu.memory import exchange64
from gpucoll.transport.shared.flags import yield_once
from gpucoll.transport.shared.libc import memset
from gpucoll.transport.shared.mapping import MADV_REMOVE

# --- the records: one for each block, and lists of the free blocks --------------------------------

# The method is two-level segregated fit (Masmano, Ripoll, Crespo and Real, ECRTS 2004). Free blocks
# are in lists by size, with eight sizes for each power of two, and a bitmap of the lists finds the
# first that has a block.
#
# A block is identified by its first granule. Every granule has a record, but only those of first
# granules are used. To Numba, every address, size and granule is an int64; `Heap` names the words
# of the state.


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


# --- the allocator --------------------------------------------------------------------------------


_SHIFT = 10
GRANULE_BYTES = 1 << _SHIFT
"""Blocks are multiples of this, and aligned to it; no call uses arrays below 2 KiB in place."""

_PAGE = mmap.PAGESIZE  # a power of two
_KEEP_EVERYTHING = 1 << 62
_i64 = types.int64
_madvise = types.ExternalFunction("madvise", types.int32(_i64, _i64, types.int32))


@inline
def lock(heap: Heap) -> None:
    """Keep other threads out, for well under a microsecond, except for a trim's system call."""
    while exchange64(heap.at.lock, 1) != 0:
        yield_once()


@inline
def unlock(heap: Heap) -> None:
    """Let other threads in."""
    exchange64(heap.at.lock, 0)


@inline
def granules_of(size_bytes: int) -> int:
    """Return the number of granules in a block of this size: at least one."""
    return (max(1, size_bytes) + GRANULE_BYTES - 1) >> _SHIFT


@inline
def block_at(heap: Heap, address: int) -> int:
    """Return the block that begins at an address of this memory."""
    return (address - heap.base) >> _SHIFT


@inline
def holds(heap: Heap, address: int) -> bool:
    """Return whether an address is in this memory."""
    offset = address - heap.base
    return 0 <= offset < heap.memory_bytes


@compiled
def begin(heap: Heap) -> int:
    """Make all the memory one free, untouched block; the records are new."""
    size = heap.memory_bytes >> _SHIFT
    record_of(heap, size).owner = GONE
    link(heap, 0, size, 0)
    return 0


@inline
def _own(heap: Heap, block: int, size: int, generation: int) -> None:
    """Note that a block is in use."""
    record = record_of(heap, block)
    record.size = size
    record.owner = generation
    record_of(heap, block + size).before = size


@compiled
def take(heap: Heap, size_bytes: int) -> int:
    """Return the address of a new block, or 0 if there is none of this size."""
    if size_bytes > heap.memory_bytes:
        return 0
    size = granules_of(size_bytes)
    lock(heap)
    block = find(heap, size)
    if block != NONE:
        unlink(heap, block)
        record = record_of(heap, block)
        rest, touched = record.size - size, record.touched
        if rest > 0:
            link(heap, block + size, rest, max(0, touched - size))
        _own(heap, block, size, heap.generation)
        record.touched = min(touched, size)
        heap.used += size
        heap.blocks += 1
    unlock(heap)
    return 0 if block == NONE else heap.base + block * GRANULE_BYTES


@inline
def _give_back(heap: Heap, first: int, stop: int) -> bool:
    """Return the whole pages between two offsets to the system; return whether this succeeded."""
    return _madvise(heap.base + first, stop - first, MADV_REMOVE) == 0


@inline
def _trim(heap: Heap, block: int) -> None:
    """If too much memory is kept, return the end of the touched part of a free block.

    The kept memory shrinks to an eighth below the limit, so that the next frees need no system
    call.
    """
    limit = heap.keep_at_most
    excess = heap.kept - limit
    if excess <= 0:
        return
    record = record_of(heap, block)
    touched = record.touched
    cut = min(touched, excess + (limit >> 3))
    first = (block + touched - cut) * GRANULE_BYTES
    first = (first + _PAGE - 1) & -_PAGE
    end = (block + touched) * GRANULE_BYTES
    stop = end & -_PAGE
    if stop < end and stop + _PAGE <= (block + record.size) * GRANULE_BYTES:
        stop += _PAGE  # the whole last page belongs to this block
    if stop <= first:
        return
    if not _give_back(heap, first, stop):  # a file system without holes
        heap.keep_at_most = _KEEP_EVERYTHING
        return
    if stop < end:  # the next block shares the page, but this part counts as zeros from now on
        memset(heap.base + stop, 0, end - stop)
    left = (first >> _SHIFT) - block
    record.touched = left
    heap.kept -= touched - left


@inline
def _retire(heap: Heap, block: int, size: int) -> None:
    """Return the memory of a retired block to the system, but never reuse its addresses."""
    record_of(heap, block).owner = GONE
    heap.retired += size
    first = (block * GRANULE_BYTES + _PAGE - 1) & -_PAGE
    stop = (block + size) * GRANULE_BYTES & -_PAGE
    if stop > first:
        _give_back(heap, first, stop)


@inline
def _free(heap: Heap, block: int, size: int) -> None:
    """Make a block free, together with its free neighbours."""
    touched, following = size, block + size
    if record_of(heap, following).owner == FREE:
        unlink(heap, following)
        size += record_of(heap, following).size
        touched += record_of(heap, following).touched
    preceding = block - record_of(heap, block).before  # for the first block, itself
    if record_of(heap, preceding).owner == FREE:
        unlink(heap, preceding)
        size += block - preceding
        touched += block - preceding
        block = preceding
    link(heap, block, size, touched)
    _trim(heap, block)


@compiled
def give(heap: Heap, address: int) -> int:
    """Free the block at an address."""
    block = block_at(heap, address)
    lock(heap)
    record = record_of(heap, block)
    size = record.size
    heap.used -= size
    heap.blocks -= 1
    if record.owner == heap.generation:
        _free(heap, block, size)
    else:
        _retire(heap, block, size)
    unlock(heap)
    return 0


@inline
def split(heap: Heap, block: int, size: int) -> None:
    """Split a block: it keeps `size` granules, and its end becomes another block."""
    lock(heap)
    record = record_of(heap, block)
    rest, generation = record.size - size, record.owner
    _own(heap, block, size, generation)
    _own(heap, block + size, rest, generation)
    heap.blocks += 1
    unlock(heap)
