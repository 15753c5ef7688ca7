"""NumPy's four memory functions on top of a `gpucoll.memory.heap`, compiled.

NumPy (NEP 49) calls them with the context of the handler with which an array was made, during all
of that array's life. They work with and without the interpreter's lock.

If the heap has no memory to give, it comes from ``malloc``, like NumPy's own. The address tells
which of the two it is.
"""

from __future__ import annotations

from gpucoll.blocks import Block, Field
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import call_loop
from gpucoll.memory.free_lists import Heap, record_of
from gpucoll.memory.heap import GRANULE_BYTES, block_at, granules_of, holds, split


class Source(Block):
    """A handler's context."""

    heap: Field[Heap]
    from_bytes: int
    """Smaller arrays get no memory of the heap."""
    falls_back: int
    """Whether ``malloc`` replaces the heap when it has no room; otherwise NumPy's MemoryError."""


_i64 = types.int64
_malloc = types.ExternalFunction("malloc", _i64(_i64))
_calloc = types.ExternalFunction("calloc", _i64(_i64, _i64))
_realloc = types.ExternalFunction("realloc", _i64(_i64, _i64))
_free = types.ExternalFunction("free", types.void(_i64))
_usable_size = types.ExternalFunction("malloc_usable_size", _i64(_i64))
_memcpy = types.ExternalFunction("memcpy", _i64(_i64, _i64, _i64))
_memset = types.ExternalFunction("memset", _i64(_i64, types.int32, _i64))


@inline
def _take(source: Source, size_bytes: int) -> int:
    """Return memory of the heap, or 0 if it gives none."""
    heap = source.heap
    if size_bytes < source.from_bytes or heap.is_forked != 0:
        return 0
    return call_loop(heap.take, heap, size_bytes)


@inline
def _allocate(source: Source, size_bytes: int) -> int:
    address = _take(source, size_bytes)
    if address == 0 and source.falls_back != 0:
        return _malloc(max(1, size_bytes))
    return address


@inline
def _release(source: Source, address: int) -> None:
    heap = source.heap
    if not holds(heap, address):
        _free(address)
    elif heap.is_forked == 0:  # in a child the memory is the parent's, and in use there
        call_loop(heap.give, heap, address)


@compiled
def allocate(source: Source, size_bytes: int) -> int:
    """Return new memory, or 0 if there is none."""
    return _allocate(source, size_bytes)


@compiled
def allocate_zeros(source: Source, count: int, item_bytes: int) -> int:
    """Return new, zeroed memory. NumPy has already refused products that overflow."""
    address = _take(source, count * item_bytes)
    if address == 0:
        return _calloc(count, item_bytes) if source.falls_back != 0 else 0
    heap = source.heap
    touched = record_of(heap, block_at(heap, address)).touched * GRANULE_BYTES
    _memset(address, 0, min(touched, count * item_bytes))
    return address


@compiled
def release(source: Source, address: int, size_bytes: int) -> None:
    """Free memory."""
    _release(source, address)


@compiled
def resize(source: Source, address: int, size_bytes: int) -> int:
    """Return memory of another size with the same beginning; with 0, the old memory is unchanged.

    An array that grows beyond `Source.from_bytes` moves to the heap. A heap block that shrinks
    stays in place, and its end becomes free unless it is retired.
    """
    heap = source.heap
    is_forked = heap.is_forked != 0
    if holds(heap, address):
        block = block_at(heap, address)
        record, size = record_of(heap, block), granules_of(size_bytes)
        old_bytes = record.size * GRANULE_BYTES
        if size_bytes <= old_bytes and not is_forked:
            if size < record.size and record.owner == heap.generation:
                split(heap, block, size)
                _release(source, address + size * GRANULE_BYTES)
            return address
    else:
        if size_bytes < source.from_bytes or is_forked:
            return _realloc(address, max(1, size_bytes))
        old_bytes = _usable_size(address)  # NumPy does not pass it
    moved = _malloc(size_bytes) if is_forked else _allocate(source, size_bytes)
    if moved != 0:
        _memcpy(moved, address, min(old_bytes, size_bytes))
        _release(source, address)
    return moved
