"""NumPy arrays, NumPy scalars and Python numbers as buffers."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from gpucoll.arrays import numpy_struct
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import (
    AnyArray,
    AnyDtype,
    Destination,
    Library,
    Template,
    View,
    raise_not_an_array,
)
from gpucoll.errors import ArgumentError, ArgumentTypeError

NAME = "a NumPy array"
NUMBERS = (np.generic, bool, int, float, complex)
_THIS = cast(Library, sys.modules[__name__])


def check_dtype(dtype: np.dtype[np.generic], what: str) -> None:
    """Raise unless elements of this dtype are plain bytes of a fixed size in native order."""
    if dtype.hasobject:
        raise ArgumentTypeError(
            f"{what} has dtype {dtype}: Python objects have no bytes to move; use the object "
            "collectives (all_gather_object, broadcast_object, ...)"
        )
    if not dtype.isnative:
        raise ArgumentTypeError(
            f"{what} has byte order {dtype.byteorder!r} ({dtype}), but only native order can be "
            f"used: convert it with x.astype(x.dtype.newbyteorder('='))"
        )


@functools.cache
def dtype_name(dtype: np.dtype[np.generic]) -> str:
    """Return the name of a dtype, cached, because NumPy computes it anew each time (6 us).

    For NumPy, all structured dtypes of one size have the same name, and so have both byte orders.
    """
    return dtype.name if dtype.names is None and dtype.isnative else str(dtype)


def _slow_address_of(array: npt.NDArray[np.generic]) -> int:
    return array.ctypes.data


def _fast_address_of(array: npt.NDArray[np.generic]) -> int:
    address: int = ctypes.c_size_t.from_address(id(array) + numpy_struct.ARRAY_DATA).value
    return address


# Every call reads up to three addresses, and NumPy's own way takes 1.5 us for each.
address_of = _fast_address_of if numpy_struct.matches() else _slow_address_of


def view_of(
    array: npt.NDArray[np.generic], library: Library, owner: object, number: type | None = None
) -> View:
    """Return the view of an array, for a library whose arrays NumPy can show."""
    dtype = array.dtype
    name, item_bytes = dtype_name(dtype), dtype.itemsize
    template = Template(array.shape, name, item_bytes, library, "cpu", 0, number, dtype)
    strides = None if array.flags.c_contiguous else array.strides
    return View(template, address_of(array), owner, strides)


def _is_masked(array: npt.NDArray[np.generic]) -> bool:
    # Importing numpy.ma takes 10 ms, which a rank with plain arrays never needs.
    return type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray)


def look(x: object, what: str) -> View:
    """Return the view of x."""
    if isinstance(x, np.ndarray):
        if _is_masked(x):
            raise ArgumentTypeError(f"{what} is a masked array: collectives would ignore its mask")
        check_dtype(x.dtype, what)
        return view_of(x, _THIS, x)
    if not isinstance(x, NUMBERS):
        raise_not_an_array(x, what)
    array = np.asarray(x)
    if array.dtype == object:
        raise ArgumentTypeError(
            f"{what} is an int that 64 bits do not hold: use all_reduce_object, or a float"
        )
    check_dtype(array.dtype, what)
    return view_of(array, _THIS, array, type(x))


def look_at_out(out: object) -> View:
    """Return the view of an array that will be written."""
    if not isinstance(out, np.ndarray):
        raise_not_an_array(out, "out")
    if _is_masked(out):
        raise ArgumentTypeError("out is a masked array: its mask would hide the result")
    if not out.flags.writeable:
        raise ArgumentError("out is read-only")
    return view_of(out, _THIS, out)


def pack(x: AnyArray, template: Template) -> View:
    """Return a C-contiguous copy of x."""
    packed = np.array(x, order="C", subok=False)
    return View(template, address_of(packed), packed)


def new(template: Template, shape: tuple[int, ...]) -> Destination:
    """Make a new array, or a number if the template is a number and the shape is ()."""
    try:
        result = np.empty(shape, template.native)
    except ValueError as error:  # more bytes than addresses
        raise ArgumentError(f"a result of shape {shape} is not possible: {error}") from None
    buffer = Buffer(address_of(result), shape, template.dtype, template.item_bytes, result)
    if template.number is None or shape:
        return Destination(buffer, lambda: result, result)
    if issubclass(template.number, np.generic):
        return Destination(buffer, lambda: result[()])
    return Destination(buffer, result.item)


def complete(out: npt.NDArray[np.generic], temporary: AnyArray) -> None:
    """Fill a non-contiguous `out`."""
    if temporary is not None:
        out[...] = temporary


def array_at(
    address: int | None, shape: Sequence[int], dtype: np.dtype[Any]
) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the host memory at an address as an array, which does not keep it alive.

    Without elements the address does not count.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes == 0:
        return np.empty(shape, dtype)
    if not address:
        raise ValueError(
            f"there is no memory for {dtype} of shape {tuple(shape)}: its address is 0"
        )
    memory: Any = (ctypes.c_char * size_bytes).from_address(address)
    return np.ndarray(shape, dtype, memory)


def dtype_of(dtype: AnyDtype) -> np.dtype[np.generic]:
    """Return a dtype of NumPy by name; raise ArgumentTypeError if NumPy does not know it."""
    try:
        native: np.dtype[np.generic] = np.dtype(dtype)
    except TypeError as error:
        raise ArgumentTypeError(
            f"dtype {dtype!r} is not known to NumPy ({error}); importing ml_dtypes adds bfloat16 "
            "and the float8 dtypes"
        ) from None
    return native


def template_of_dtype(dtype: AnyDtype, like: Template | None = None) -> Template:
    """Return the template of a new array of this dtype."""
    native = dtype_of(dtype)
    check_dtype(native, "the array to make")
    return Template((), dtype_name(native), native.itemsize, _THIS, native=native)
