"""NumPy's allocation handlers (NEP 49), set from Python: they decide where new arrays are.

NumPy's C API has the two functions needed for this, in a table of pointers whose order does not
change, but no Python functions. A handler is current in a context (`contextvars`), that is in one
thread or asyncio task; an array keeps the handler with which it was made. Handlers must outlive the
last of their arrays, which may be freed when the interpreter has already cleared its modules. A
handler, its context and the compiled functions are therefore kept for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gpucoll.blocks import Block, Field
from gpucoll.errors import BackendUnavailableError
from gpucoll.kernels.cpu.builtins import METH_NOARGS, builtin
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import call_loop
from gpucoll.memory.heap import GRANULE_BYTES, Heap, block_at, granules_of, holds, record_of, split
from gpucoll.transport.shared.libc import free, malloc, memset

# --- the handler, compiled ------------------------------------------------------------------------

# NumPy (NEP 49) calls them with the context of the handler with which an array was made, during all
# of that array's life. They work with and without the interpreter's lock.
#
# If the heap has no memory to give, it comes from ``malloc``, like NumPy's own. The address tells
# which of the two it is.


class Source(Block):
    """A handler's context."""

    heap: Field[Heap]
    from_bytes: int
    """Smaller arrays get no memory of the heap."""
    falls_back: int
    """Whether ``malloc`` replaces the heap when it has no room; otherwise NumPy's MemoryError."""


_i64 = types.int64
_calloc = types.ExternalFunction("calloc", _i64(_i64, _i64))
_realloc = types.ExternalFunction("realloc", _i64(_i64, _i64))
_usable_size = types.ExternalFunction("malloc_usable_size", _i64(_i64))
_memcpy = types.ExternalFunction("memcpy", _i64(_i64, _i64, _i64))


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
        return malloc(max(1, size_bytes))
    return address


@inline
def _release(source: Source, address: int) -> None:
    heap = source.heap
    if not holds(heap, address):
        free(address)
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
    memset(address, 0, min(touched, count * item_bytes))
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
    moved = malloc(size_bytes) if is_forked else _allocate(source, size_bytes)
    if moved != 0:
        _memcpy(moved, address, min(old_bytes, size_bytes))
        _release(source, address)
    return moved


# --- for Python -----------------------------------------------------------------------------------


_API_VERSION = 211
_SET_HANDLER = 304
_GET_HANDLER = 305
"""Indices in the table of ``numpy/__multiarray_api.h``, the same since NumPy 1.22."""
_FEATURE_VERSION = 0xF
"""NumPy 1.22, the first that has handlers."""
_CAPSULE_NAME = b"mem_handler"

_python = ctypes.pythonapi
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", _python))
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _python)
)
_increase_reference = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", _python))


def keep_for_ever(thing: object) -> None:
    """Keep an object alive, even at the end of the interpreter."""
    _increase_reference(thing)


class _HandlerStruct(ctypes.Structure):
    """``PyDataMem_Handler`` of NumPy's ``ndarraytypes.h``, with its allocator's fields in line."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", ctypes.c_void_p),
        ("malloc", ctypes.c_void_p),
        ("calloc", ctypes.c_void_p),
        ("realloc", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
    )


_FUNCTIONS = (allocate, allocate_zeros, resize, release)
keep_for_ever((_CAPSULE_NAME, _FUNCTIONS))


def _numpy_internals() -> Any:
    """Return the module that has NumPy's table of C functions."""
    core = "numpy.core" if int(np.__version__.split(".")[0]) < 2 else "numpy._core"
    return importlib.import_module(f"{core}._multiarray_umath")


def _unavailable(reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"NumPy {np.__version__} does not let gpucoll choose the memory of arrays ({reason}), so "
        "empty and shared_arrays are not available. They need NumPy 1.25 to 2.x; everything else "
        "works"
    )


@functools.cache
def _handler_functions() -> tuple[int, int]:
    """Return the addresses of NumPy's ``PyDataMem_SetHandler`` and ``PyDataMem_GetHandler``."""
    try:
        table_address = _capsule_pointer(_numpy_internals()._ARRAY_API, None)
    except (ImportError, AttributeError, ValueError) as error:
        raise _unavailable(f"its table of C functions was not found: {error}") from error
    table = (ctypes.c_void_p * (_GET_HANDLER + 1)).from_address(table_address)
    version_address, setting, getting = (
        table[place] for place in (_API_VERSION, _SET_HANDLER, _GET_HANDLER)
    )
    if not (version_address and setting and getting):
        raise _unavailable("its table of C functions has gaps")
    version = ctypes.CFUNCTYPE(ctypes.c_uint)(version_address)()
    if version < _FEATURE_VERSION:
        raise _unavailable(f"its C API says version {version:#x}")
    return setting, getting


@functools.lru_cache(maxsize=16)
def _setter(capsule: Any) -> Callable[[], Any]:
    """Return a function that makes a handler the current one.

    The C function takes the handler as its first argument, and a built-in passes the object that it
    is bound to as its first argument. No code is needed in between, and a call takes 50 ns.
    """
    return builtin(_handler_functions()[0], METH_NOARGS, capsule)


class MemoryHandler:
    """NumPy's memory functions on top of a heap.

    Parameters
    ----------
    name : str
        The name that NumPy's ``get_handler_name`` returns for its arrays.
    heap : Heap
        The state. It is kept for ever, and its memory must be, too.
    from_bytes : int
        Smaller arrays get ordinary memory.
    falls_back : bool
        Whether arrays for which the heap has no room get ordinary memory, or a MemoryError.

    Raises
    ------
    BackendUnavailableError
        This NumPy does not support handlers.
    """

    def __init__(self, name: str, heap: Heap, *, from_bytes: int, falls_back: bool) -> None:
        source = Source.new()
        source.heap, source.from_bytes, source.falls_back = heap, from_bytes, falls_back
        struct = _HandlerStruct(
            name.encode(), 1, source.address, *(function.address for function in _FUNCTIONS)
        )
        keep_for_ever((heap, source, struct))
        self._current = builtin(_handler_functions()[1], METH_NOARGS, None)
        self._set = _setter(_new_capsule(ctypes.addressof(struct), _CAPSULE_NAME, None))
        with self.current():
            found = _numpy_internals().get_handler_name(np.empty(from_bytes, np.uint8))
        if found != name:
            raise _unavailable(f"an array made with the handler {name!r} says {found!r}")

    def make(self, shape: Any, dtype: np.dtype[Any]) -> Any:
        """Return ``np.empty(shape, dtype)`` made with this handler."""
        restore = _setter(self._current())  # made in advance: Ctrl-C may come at any time
        try:
            self._set()
            return np.empty(shape, dtype)
        finally:
            restore()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this the handler of all arrays made in the context, in this thread."""
        restore = _setter(self._current())
        try:
            self._set()
            yield
        finally:
            restore()
