"""Offsets of the fields of a NumPy array in memory, for code that reads them without Python.

``PyArrayObject_fields`` is part of NumPy's C ABI and has not changed since 1.0. It begins with
CPython's object header, which differs in builds without a global interpreter lock or for debugging.
`matches` compares the offsets with a real array; if they differ, compiled entries are not used.
Source: numpy/_core/include/numpy/ndarraytypes.h.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np

OBJECT_TYPE = 8
ARRAY_DATA = 16
ARRAY_N_DIMENSIONS = 24
ARRAY_DIMENSIONS = 32
ARRAY_DESCRIPTION = 56
ARRAY_FLAGS = 64
LIST_SIZE = 16
LIST_ITEMS = 24
C_CONTIGUOUS = 0x0001
WRITEABLE = 0x0400


def _word(address: int, kind: type[ctypes.c_int64] | type[ctypes.c_int32]) -> int:
    return int(kind.from_address(address).value)


@functools.cache
def matches() -> bool:
    """Return whether this interpreter's NumPy arrays and lists have these offsets."""
    array = np.zeros((3, 5), np.float32)
    array.flags.writeable = False
    address = id(array)
    flags = _word(address + ARRAY_FLAGS, ctypes.c_int32)
    shape = _word(address + ARRAY_DIMENSIONS, ctypes.c_int64)
    pair = [array, array.dtype]
    items = _word(id(pair) + LIST_ITEMS, ctypes.c_int64)
    return (
        _word(id(pair) + LIST_SIZE, ctypes.c_int64) == 2
        and [_word(items + 8 * place, ctypes.c_int64) for place in (0, 1)] == [*map(id, pair)]
        and _word(address + OBJECT_TYPE, ctypes.c_int64) == id(np.ndarray)
        and _word(address + ARRAY_DATA, ctypes.c_int64) == array.ctypes.data
        and _word(address + ARRAY_N_DIMENSIONS, ctypes.c_int32) == 2
        and [_word(shape + 8 * axis, ctypes.c_int64) for axis in (0, 1)] == [3, 5]
        and _word(address + ARRAY_DESCRIPTION, ctypes.c_int64) == id(array.dtype)
        and bool(flags & C_CONTIGUOUS)
        and not flags & WRITEABLE
    )
