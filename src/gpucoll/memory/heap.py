"""A compiled allocator of shared memory: constant time, from any thread, with private records.

The memory itself holds no records (`gpucoll.memory.free_lists`), because peers can write there. A
freed block merges with its free neighbours at once, so divided blocks become whole again.

The first part of a free block may have been touched; the rest reads as zeros and uses no memory.
``calloc`` therefore clears only the first part, and the memory that is kept can be counted.
"""

from __future__ import annotations

import mmap

import numpy as np

from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import exchange64, get, put
from gpucoll.memory.free_lists import (
    BEFORE,
    FREE,
    GONE,
    NONE,
    OWNER,
    SIZE,
    TOUCHED,
    Heap,
    find,
    link,
    record_of,
    unlink,
)
from gpucoll.transport.shared.mapping import MADV_REMOVE

_SHIFT = 10
GRANULE_BYTES = 1 << _SHIFT
"""Blocks are multiples of this, and aligned to it; no call uses arrays below 2 KiB in place."""

# Plain ints, which Numba freezes into the code.
_BASE, _SIZE_BYTES, _LOCK = int(Heap.BASE), int(Heap.SIZE_BYTES), int(Heap.LOCK)
_GENERATION, _BLOCKS = int(Heap.GENERATION), int(Heap.BLOCKS)
_USED, _KEPT, _RETIRED = int(Heap.USED), int(Heap.KEPT), int(Heap.RETIRED)
_KEEP_AT_MOST = int(Heap.KEEP_AT_MOST)
_LOCK_OFFSET = 8 * _LOCK

_PAGE = mmap.PAGESIZE  # a power of two
_KEEP_EVERYTHING = 1 << 62
_i64 = types.int64
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_madvise = types.ExternalFunction("madvise", types.int32(_i64, _i64, types.int32))
_memset = types.ExternalFunction("memset", _i64(_i64, types.int32, _i64))


@inline
def lock(heap):
    """Keep other threads out, for well under a microsecond, except for a trim's system call."""
    while exchange64(heap + _LOCK_OFFSET, 1) != 0:
        _sched_yield()


@inline
def unlock(heap):
    """Let other threads in."""
    exchange64(heap + _LOCK_OFFSET, 0)


@inline
def granules_of(size_bytes):
    """Return the number of granules in a block of this size: at least one."""
    return (max(1, size_bytes) + GRANULE_BYTES - 1) >> _SHIFT


@inline
def block_at(heap, address):
    """Return the block that begins at an address of this memory."""
    return (address - get(heap, _BASE)) >> _SHIFT


@inline
def holds(heap, address):
    """Return whether an address is in this memory."""
    offset = address - get(heap, _BASE)
    return 0 <= offset < get(heap, _SIZE_BYTES)


@compiled(_i64(_i64))
def begin(heap):
    """Make all the memory one free, untouched block; the records are new."""
    size = get(heap, _SIZE_BYTES) >> _SHIFT
    put(record_of(heap, size), OWNER, GONE)
    zero = np.int64(0)  # a literal would make Numba compile `link` once more
    link(heap, zero, size, zero)
    return 0


@inline
def _own(heap, block, size, generation):
    """Note that a block is in use."""
    record = record_of(heap, block)
    put(record, SIZE, size)
    put(record, OWNER, generation)
    put(record_of(heap, block + size), BEFORE, size)


@compiled(_i64(_i64, _i64))
def take(heap, size_bytes):
    """Return the address of a new block, or 0 if there is none of this size."""
    if size_bytes > get(heap, _SIZE_BYTES):
        return 0
    size = granules_of(size_bytes)
    lock(heap)
    block = find(heap, size)
    if block != NONE:
        unlink(heap, block)
        record = record_of(heap, block)
        rest, touched = get(record, SIZE) - size, get(record, TOUCHED)
        if rest > 0:
            link(heap, block + size, rest, max(0, touched - size))
        _own(heap, block, size, get(heap, _GENERATION))
        put(record, TOUCHED, min(touched, size))
        put(heap, _USED, get(heap, _USED) + size)
        put(heap, _BLOCKS, get(heap, _BLOCKS) + 1)
    unlock(heap)
    return 0 if block == NONE else get(heap, _BASE) + block * GRANULE_BYTES


@inline
def _give_back(heap, first, stop):
    """Return the whole pages between two offsets to the system; return whether this succeeded."""
    return _madvise(get(heap, _BASE) + first, stop - first, MADV_REMOVE) == 0


@inline
def _trim(heap, block):
    """If too much memory is kept, return the end of the touched part of a free block.

    The kept memory shrinks to an eighth below the limit, so that the next frees need no system
    call.
    """
    limit = get(heap, _KEEP_AT_MOST)
    excess = get(heap, _KEPT) - limit
    if excess <= 0:
        return
    record = record_of(heap, block)
    touched = get(record, TOUCHED)
    cut = min(touched, excess + (limit >> 3))
    first = (block + touched - cut) * GRANULE_BYTES
    first = (first + _PAGE - 1) & -_PAGE
    end = (block + touched) * GRANULE_BYTES
    stop = end & -_PAGE
    if stop < end and stop + _PAGE <= (block + get(record, SIZE)) * GRANULE_BYTES:
        stop += _PAGE  # the whole last page belongs to this block
    if stop <= first:
        return
    if not _give_back(heap, first, stop):  # a file system without holes
        put(heap, _KEEP_AT_MOST, _KEEP_EVERYTHING)
        return
    if stop < end:  # the next block shares the page, but this part counts as zeros from now on
        _memset(get(heap, _BASE) + stop, 0, end - stop)
    left = (first >> _SHIFT) - block
    put(record, TOUCHED, left)
    put(heap, _KEPT, get(heap, _KEPT) - (touched - left))


@inline
def _retire(heap, block, size):
    """Return the memory of a retired block to the system, but never reuse its addresses."""
    put(record_of(heap, block), OWNER, GONE)
    put(heap, _RETIRED, get(heap, _RETIRED) + size)
    first = (block * GRANULE_BYTES + _PAGE - 1) & -_PAGE
    stop = (block + size) * GRANULE_BYTES & -_PAGE
    if stop > first:
        _give_back(heap, first, stop)


@inline
def _free(heap, block, size):
    """Make a block free, together with its free neighbours."""
    touched, following = size, block + size
    if get(record_of(heap, following), OWNER) == FREE:
        unlink(heap, following)
        size += get(record_of(heap, following), SIZE)
        touched += get(record_of(heap, following), TOUCHED)
    preceding = block - get(record_of(heap, block), BEFORE)  # for the first block, itself
    if get(record_of(heap, preceding), OWNER) == FREE:
        unlink(heap, preceding)
        size += block - preceding
        touched += block - preceding
        block = preceding
    link(heap, block, size, touched)
    _trim(heap, block)


@compiled(_i64(_i64, _i64))
def give(heap, address):
    """Free the block at an address."""
    block = block_at(heap, address)
    lock(heap)
    record = record_of(heap, block)
    size = get(record, SIZE)
    put(heap, _USED, get(heap, _USED) - size)
    put(heap, _BLOCKS, get(heap, _BLOCKS) - 1)
    if get(record, OWNER) == get(heap, _GENERATION):
        _free(heap, block, size)
    else:
        _retire(heap, block, size)
    unlock(heap)
    return 0


@inline
def split(heap, block, size):
    """Split a block: it keeps `size` granules, and its end becomes another block."""
    lock(heap)
    record = record_of(heap, block)
    rest, generation = get(record, SIZE) - size, get(record, OWNER)
    _own(heap, block, size, generation)
    _own(heap, block + size, rest, generation)
    put(heap, _BLOCKS, get(heap, _BLOCKS) + 1)
    unlock(heap)
