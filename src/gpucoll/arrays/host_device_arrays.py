"""Arrays of Host devices: objects with ``__host_device_array_interface__``.

This is a mapping: ``shape``, ``strides`` (in bytes), ``dtype`` (NumPy's), ``data`` (the address),
``device`` (its number) and ``stream`` (on which the library currently works). The class makes new
arrays by ``empty(shape, dtype, device)`` and ``over(address, shape, dtype, device, owner)``, and
copies by ``copy()`` and ``[...] =``, in the order of that stream. An example is
`gpucoll.testing.device_arrays`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, cast

from gpucoll.arrays import numpy_arrays
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.dlpack import is_contiguous
from gpucoll.arrays.library import (
    AnyArray,
    AnyDtype,
    Destination,
    Library,
    Template,
    View,
    raise_not_an_array,
)
from gpucoll.errors import ArgumentTypeError

if TYPE_CHECKING:
    from gpucoll.arrays.device_array import DeviceArray

NAME = "an array of a Host device"
PROTOCOL = "__host_device_array_interface__"
_THIS = cast(Library, sys.modules[__name__])


def look(x: object, what: str) -> View:
    """Return the view of x."""
    said = getattr(x, PROTOCOL, None)
    if said is None:
        raise_not_an_array(x, what)
    dtype, shape, strides = said["dtype"], tuple(said["shape"]), tuple(said["strides"])
    numpy_arrays.check_dtype(dtype, what)
    name, number = numpy_arrays.dtype_name(dtype), said["device"]
    native = (dtype, number, type(x))
    device = f"host:{number}"
    template = Template(shape, name, dtype.itemsize, _THIS, device, said["stream"], None, native)
    is_packed = is_contiguous(shape, strides, dtype.itemsize)
    return View(template, said["data"], x, None if is_packed else strides)


def fingerprint(x: object) -> tuple[Hashable, int]:
    """Return x's kind and address quickly."""
    said = getattr(x, PROTOCOL)
    sort = said["shape"], said["dtype"], said["device"], said["strides"], type(x)
    return sort, said["data"]


def look_at_out(out: object) -> View:
    """Return the view of an array that will be written."""
    return look(out, "out")


def pack(x: AnyArray, template: Template) -> View:
    """Return a C-contiguous copy of x, made on the current stream."""
    packed = x.copy()
    return View(template, getattr(packed, PROTOCOL)["data"], packed)


def new(template: Template, shape: tuple[int, ...]) -> Destination:
    """Make a new array."""
    _, name, item_bytes, _, device, stream, _, (dtype, number, kind) = template
    result = kind.empty(shape, dtype, number)
    address = getattr(result, PROTOCOL)["data"]
    buffer = Buffer(address, shape, name, item_bytes, result, device, stream)
    return Destination(buffer, lambda: result, result)


def complete(out: AnyArray, temporary: AnyArray) -> None:
    """Fill a non-contiguous `out`."""
    if temporary is not None:
        out[...] = temporary


def adopt(array: DeviceArray, template: Template) -> AnyArray:
    """Return an array over a DeviceArray's memory, which it keeps alive."""
    dtype, number, kind = template.native
    return kind.over(array.address, array.shape, dtype, number, array)


def current_stream_of(template: Template) -> Callable[[], int]:
    """Return a function that returns the stream on which the library currently works."""
    _, number, kind = template.native
    ask: Callable[[int], int] = kind.current_stream
    return lambda: ask(number)


def template_of_dtype(dtype: AnyDtype, like: Template | None = None) -> Template:
    """Return the template of a new array of this dtype, on like's device."""
    if like is None:
        raise ArgumentTypeError("give an array as like=: its library and device are used")
    template = numpy_arrays.template_of_dtype(dtype)
    native = (template.native, *like.native[1:])
    return template._replace(library=_THIS, device=like.device, stream=like.stream, native=native)
