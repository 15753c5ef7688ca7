"""A compiled allocator of shared memory: constant time, from any thread, with private records.

The memory itself holds no records (`gpucoll.memory.free_lists`), because peers can write there. A
freed block merges with its free neighbours at once, so divided blocks become whole again.

The first part of a free block may have been touched; the rest reads as zeros and uses no memory.
``calloc`` therefore clears only the first part, and the memory that is kept can be counted.
"""

from __future__ import annotations

import mmap

from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import exchange64
from gpucoll.memory.free_lists import FREE, GONE, NONE, Heap, find, link, record_of, unlink
from gpucoll.transport.shared.mapping import MADV_REMOVE

_SHIFT = 10
GRANULE_BYTES = 1 << _SHIFT
"""Blocks are multiples of this, and aligned to it; no call uses arrays below 2 KiB in place."""

_PAGE = mmap.PAGESIZE  # a power of two
_KEEP_EVERYTHING = 1 << 62
_i64 = types.int64
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_madvise = types.ExternalFunction("madvise", types.int32(_i64, _i64, types.int32))
_memset = types.ExternalFunction("memset", _i64(_i64, types.int32, _i64))


@inline
def lock(heap: Heap) -> None:
    """Keep other threads out, for well under a microsecond, except for a trim's system call."""
    while exchange64(heap.at.lock, 1) != 0:
        _sched_yield()


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
        _memset(heap.base + stop, 0, end - stop)
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
