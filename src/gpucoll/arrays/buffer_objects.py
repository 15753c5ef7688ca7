"""Objects with Python's buffer protocol: bytes, bytearray, array.array, memoryview, ...

For those four, the result is of the input's type; for others (mmap, ctypes arrays) a NumPy array.
"""

from __future__ import annotations

import array
import sys
from typing import Any, cast

import numpy as np

from gpucoll.arrays import numpy_arrays
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import AnyArray, AnyDtype, Destination, Library, Template, View, kind_of
from gpucoll.errors import ArgumentError, ArgumentTypeError

NAME = "an object with the buffer protocol"
_FLAT = (bytes, bytearray, array.array)
_THIS = cast(Library, sys.modules[__name__])


def look(x: AnyArray, what: str) -> View:
    """Return the view of x."""
    try:
        seen = np.asarray(memoryview(x))
    except (TypeError, ValueError, BufferError) as error:
        raise ArgumentTypeError(
            f"{what} is a {kind_of(x)} whose elements NumPy cannot read: {error}"
        ) from None
    numpy_arrays.check_dtype(seen.dtype, what)
    view = numpy_arrays.view_of(seen, _THIS, seen)
    kind = next((kind for kind in _FLAT if isinstance(x, kind)), type(x))
    native = (seen.dtype, kind, getattr(x, "typecode", None))
    return view._replace(template=view.template._replace(native=native))


def look_at_out(out: AnyArray) -> View:
    """Return the view of an object that will be written."""
    view = look(out, "out")
    if not view.owner.flags.writeable:
        raise ArgumentError("out is read-only")
    return view


def pack(x: AnyArray, template: Template) -> View:
    """Return a C-contiguous copy of x."""
    return numpy_arrays.pack(memoryview(x), template)


def new(template: Template, shape: tuple[int, ...]) -> Destination:
    """Make a new object like the template."""
    dtype, kind, typecode = template.native
    if kind in _FLAT and len(shape) != 1:
        raise ArgumentError(f"a {kind.__name__} has one dimension; the result has shape {shape}")
    memory: Any
    result: Any
    if kind is bytearray:
        result = bytearray(shape[0])
        memory = np.frombuffer(result, dtype)
    elif kind is array.array:
        result = array.array(typecode, bytes(shape[0] * dtype.itemsize))
        memory = np.frombuffer(result, dtype)
    else:
        memory = np.empty(shape, dtype)
        result = memoryview(memory) if kind is memoryview else memory
    address = numpy_arrays.address_of(memory)
    buffer = Buffer(address, shape, template.dtype, template.item_bytes, memory)
    if kind is bytes:
        return Destination(buffer, memory.tobytes)
    return Destination(buffer, lambda: result, result)


def complete(out: AnyArray, temporary: AnyArray) -> None:
    """Fill a non-contiguous `out`."""
    if temporary is not None:
        np.asarray(memoryview(out))[...] = np.asarray(memoryview(temporary))


def template_of_dtype(dtype: AnyDtype, like: Template | None = None) -> Template:
    """Return the template of a new object of this dtype."""
    template = numpy_arrays.template_of_dtype(dtype)
    if like is None:
        return template
    _, kind, _ = like.native
    code = template.native.char if kind is array.array else None
    if (kind in (bytes, bytearray) and template.dtype != "uint8") or (
        code is not None and code not in array.typecodes
    ):
        raise ArgumentTypeError(f"a {kind.__name__} cannot hold elements of dtype {dtype!r}")
    return template._replace(library=_THIS, native=(template.native, kind, code))
