"""NumPy arrays, NumPy scalars and Python numbers as buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.arrays.buffer import Buffer
from gpucoll.errors import ArgumentError, ArgumentTypeError

_OVERLAP_WORK: Any = 10_000  # any number will do, but NumPy's types do not all say so


@dataclass
class Arguments:
    """One call's arrays, ready to be moved, and what makes its result of them."""

    source: Buffer
    destination: Buffer
    finish: Callable[[], Any]
    """Called when the data is there; returns what the user gets."""


def _array_of(x: Any, what: str) -> npt.NDArray[Any]:
    """Return x as an ndarray; ArgumentTypeError where that would hide a mistake."""
    if isinstance(x, np.ndarray | np.generic | bool | int | float | complex):
        array = np.asarray(x)
    else:
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise ArgumentTypeError(
            f"{what} must be a NumPy array or a number; got {kind}. In this version, convert "
            "arrays of other libraries first (numpy.asarray shares the memory where it can)"
        )
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentTypeError(f"{what} is a masked array: collectives would ignore its mask")
    check_dtype(array.dtype, what)
    return array


def check_dtype(dtype: np.dtype[Any], what: str) -> None:
    """Raise unless elements of this dtype are plain bytes of a fixed size in native order."""
    if dtype.hasobject:
        raise ArgumentTypeError(
            f"{what} has dtype {dtype}: Python objects have no bytes to move; use the object "
            "collectives (all_gather_object, broadcast_object, ...)"
        )
    if not dtype.isnative:
        raise ArgumentTypeError(
            f"{what} has byte order {dtype.byteorder!r} ({dtype}), but only native order can be "
            f"reduced: convert it with x.astype(x.dtype.newbyteorder('='))"
        )


@functools.cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype: kept, because NumPy makes it anew each time (6 us)."""
    return dtype.name if dtype.names is None else str(dtype)  # else all of one size are the same


def _buffer(array: npt.NDArray[Any]) -> Buffer:
    dtype = array.dtype
    return Buffer(array.ctypes.data, array.shape, dtype_name(dtype), dtype.itemsize, array)


def _scalar_like(x: Any) -> Callable[[npt.NDArray[Any]], Any]:
    if isinstance(x, np.generic):
        return lambda array: array[()]
    return lambda array: array.item()


def prepare(x: Any, out: Any) -> Arguments:
    """Check one call's input and output, and make buffers of them.

    Non-contiguous inputs are packed; a non-contiguous `out` is filled at the end.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        They cannot serve; the message says why.
    """
    array = _array_of(x, "x")
    if not isinstance(x, np.ndarray):
        if out is not None:
            raise ArgumentTypeError("out= goes with arrays: a number has no memory to write to")
        result = np.empty((), array.dtype)
        convert = _scalar_like(x)
        return Arguments(_buffer(array), _buffer(result), lambda: convert(result))
    packed = np.ascontiguousarray(array).reshape(array.shape)
    if out is None:
        result = np.empty(array.shape, array.dtype)
        return Arguments(_buffer(packed), _buffer(result), lambda: result)
    check_out(array, out)
    if out.flags.c_contiguous:
        return Arguments(_buffer(packed), _buffer(out), lambda: out)
    temporary = np.empty(out.shape, out.dtype)

    def fill() -> Any:
        out[...] = temporary
        return out

    return Arguments(_buffer(packed), _buffer(temporary), fill)


def check_out(x: npt.NDArray[Any], out: Any) -> None:
    """Raise unless `out` can take a result of x's size and dtype without harm to x."""
    if not isinstance(out, np.ndarray):
        kind = f"{type(out).__module__}.{type(out).__qualname__}"
        raise ArgumentTypeError(f"out must be of x's library, a NumPy array; got {kind}")
    if out.dtype != x.dtype:
        raise ArgumentTypeError(f"out has dtype {out.dtype}, but x has {x.dtype}")
    if out.size != x.size:
        raise ArgumentError(
            f"out has shape {out.shape}, {out.size} elements; the result has shape {x.shape}, "
            f"{x.size} elements"
        )
    if not out.flags.writeable:
        raise ArgumentError("out is read-only")
    if not _is_same_memory(x, out) and _overlaps(x, out):
        raise ArgumentError(
            "out overlaps x without being x: give x itself (in place) or an array of its own"
        )


def _is_same_memory(x: npt.NDArray[Any], out: npt.NDArray[Any]) -> bool:
    if x is out:
        return True
    if x.ctypes.data != out.ctypes.data:
        return False
    both_contiguous = x.flags.c_contiguous and out.flags.c_contiguous
    return both_contiguous or (x.shape == out.shape and x.strides == out.strides)


def _overlaps(x: npt.NDArray[Any], out: npt.NDArray[Any]) -> bool:
    try:
        return np.shares_memory(x, out, max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True  # cannot be told in reasonable time: such views are not worth a risk
