"""NumPy's four memory functions on top of a `gpucoll.memory.heap`, compiled.

NumPy (NEP 49) calls them with the context of the handler with which an array was made, during all
of that array's life. They work with and without the interpreter's lock.

If the heap has no memory to give, it comes from ``malloc``, like NumPy's own. The address tells
which of the two it is.
"""

from __future__ import annotations

from enum import IntEnum

from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import call_loop, get
from gpucoll.memory.free_lists import OWNER, SIZE, TOUCHED, Heap, record_of
from gpucoll.memory.heap import GRANULE_BYTES, block_at, granules_of, holds, split


class Source(IntEnum):
    """Words of a handler's context."""

    HEAP = 0
    FROM_BYTES = 1
    """Smaller arrays get no memory of the heap."""
    FALLS_BACK = 2
    """Whether ``malloc`` replaces the heap when it has no room; otherwise NumPy's MemoryError."""


_HEAP, _FROM_BYTES, _FALLS_BACK = (
    int(Source.HEAP),
    int(Source.FROM_BYTES),
    int(Source.FALLS_BACK),
)
_IS_FORKED, _GENERATION = int(Heap.IS_FORKED), int(Heap.GENERATION)
_TAKE, _GIVE = int(Heap.TAKE), int(Heap.GIVE)

_i64 = types.int64
_malloc = types.ExternalFunction("malloc", _i64(_i64))
_calloc = types.ExternalFunction("calloc", _i64(_i64, _i64))
_realloc = types.ExternalFunction("realloc", _i64(_i64, _i64))
_free = types.ExternalFunction("free", types.void(_i64))
_usable_size = types.ExternalFunction("malloc_usable_size", _i64(_i64))
_memcpy = types.ExternalFunction("memcpy", _i64(_i64, _i64, _i64))
_memset = types.ExternalFunction("memset", _i64(_i64, types.int32, _i64))


@inline
def _take(source, size_bytes):
    """Return memory of the heap, or 0 if it gives none."""
    heap = get(source, _HEAP)
    if size_bytes < get(source, _FROM_BYTES) or get(heap, _IS_FORKED) != 0:
        return 0
    return call_loop(get(heap, _TAKE), heap, size_bytes)


@inline
def _allocate(source, size_bytes):
    address = _take(source, size_bytes)
    if address == 0 and get(source, _FALLS_BACK) != 0:
        return _malloc(max(1, size_bytes))
    return address


@inline
def _release(source, address):
    heap = get(source, _HEAP)
    if not holds(heap, address):
        _free(address)
    elif get(heap, _IS_FORKED) == 0:  # in a child the memory is the parent's, and in use there
        call_loop(get(heap, _GIVE), heap, address)


@compiled(_i64(_i64, _i64))
def allocate(source, size_bytes):
    """Return new memory, or 0 if there is none."""
    return _allocate(source, size_bytes)


@compiled(_i64(_i64, _i64, _i64))
def allocate_zeros(source, count, item_bytes):
    """Return new, zeroed memory. NumPy has already refused products that overflow."""
    address = _take(source, count * item_bytes)
    if address == 0:
        return _calloc(count, item_bytes) if get(source, _FALLS_BACK) != 0 else 0
    heap = get(source, _HEAP)
    touched = get(record_of(heap, block_at(heap, address)), TOUCHED) * GRANULE_BYTES
    _memset(address, 0, min(touched, count * item_bytes))
    return address


@compiled(types.void(_i64, _i64, _i64))
def release(source, address, size_bytes):
    """Free memory."""
    _release(source, address)


@compiled(_i64(_i64, _i64, _i64))
def resize(source, address, size_bytes):
    """Return memory of another size with the same beginning; with 0, the old memory is unchanged.

    An array that grows beyond `Source.FROM_BYTES` moves to the heap. A heap block that shrinks
    stays in place, and its end becomes free unless it is retired.
    """
    heap = get(source, _HEAP)
    is_forked = get(heap, _IS_FORKED) != 0
    if holds(heap, address):
        block = block_at(heap, address)
        record, size = record_of(heap, block), granules_of(size_bytes)
        old_bytes = get(record, SIZE) * GRANULE_BYTES
        if size_bytes <= old_bytes and not is_forked:
            if size < get(record, SIZE) and get(record, OWNER) == get(heap, _GENERATION):
                split(heap, block, size)
                _release(source, address + size * GRANULE_BYTES)
            return address
    else:
        if size_bytes < get(source, _FROM_BYTES) or is_forked:
            return _realloc(address, max(1, size_bytes))
        old_bytes = _usable_size(address)  # NumPy does not pass it
    moved = _malloc(size_bytes) if is_forked else _allocate(source, size_bytes)
    if moved != 0:
        _memcpy(moved, address, min(old_bytes, size_bytes))
        _release(source, address)
    return moved
