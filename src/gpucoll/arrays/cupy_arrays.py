"""CuPy arrays, on CUDA and on ROCm."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, cast

import cupy

from gpucoll.arrays import numpy_arrays
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import (
    AnyDtype,
    Destination,
    Library,
    Template,
    View,
    raise_not_an_array,
)

if TYPE_CHECKING:
    from gpucoll.arrays.device_array import DeviceArray

NAME = "a CuPy array"
_THIS = cast(Library, sys.modules[__name__])
_FIRST_OF_OTHERS = 256
"""Dtypes with this number or a larger one belong to packages other than NumPy."""


def look(x: object, what: str) -> View:
    """Return the view of x."""
    if not isinstance(x, cupy.ndarray):
        raise_not_an_array(x, what)
    numpy_arrays.check_dtype(x.dtype, what)
    number = x.device.id
    device = f"{'rocm' if cupy.cuda.runtime.is_hip else 'cuda'}:{number}"
    name, stream = numpy_arrays.dtype_name(x.dtype), cupy.cuda.get_current_stream(number).ptr
    native = (x.dtype, number)
    template = Template(x.shape, name, x.dtype.itemsize, _THIS, device, stream, None, native)
    return View(template, x.data.ptr, x, None if x.flags.c_contiguous else x.strides)


def fingerprint(x: cupy.ndarray) -> tuple[Hashable, int]:
    """Return x's kind and address quickly."""
    memory = x.data
    return (x.shape, x.dtype, memory.device_id, x.flags.c_contiguous), memory.ptr


def look_at_out(out: object) -> View:
    """Return the view of an array that will be written."""
    return look(out, "out")


def pack(x: cupy.ndarray, template: Template) -> View:
    """Return a C-contiguous copy of x, made on the current stream."""
    with cupy.cuda.Device(x.device.id):
        packed = cupy.ascontiguousarray(_copyable(x)).view(x.dtype)
    return View(template, packed.data.ptr, packed)


def _copyable(x: cupy.ndarray) -> cupy.ndarray:
    """Return x with a dtype that CuPy's kernels can copy; they do not support float8."""
    return x.view(f"u{x.dtype.itemsize}") if x.dtype.num >= _FIRST_OF_OTHERS else x


def new(template: Template, shape: tuple[int, ...]) -> Destination:
    """Make a new array."""
    _, name, item_bytes, _, device, stream, _, (dtype, number) = template
    size_bytes = math.prod(shape) * item_bytes
    if cupy.cuda.runtime.getDevice() == number:
        memory = cupy.cuda.alloc(size_bytes)
    else:
        with cupy.cuda.Device(number):
            memory = cupy.cuda.alloc(size_bytes)
    result = cupy.ndarray(shape, dtype, memory)  # for any dtype; cupy.empty refuses float8
    buffer = Buffer(result.data.ptr, shape, name, item_bytes, result, device, stream)
    return Destination(buffer, lambda: result, result)


def complete(out: cupy.ndarray, temporary: cupy.ndarray) -> None:
    """Fill a non-contiguous `out`."""
    if temporary is not None:
        _copyable(out)[...] = _copyable(temporary)


def adopt(array: DeviceArray, template: Template) -> cupy.ndarray:
    """Return a CuPy array over a DeviceArray's memory, which it keeps alive."""
    dtype, number = template.native
    memory = cupy.cuda.UnownedMemory(array.address, max(array.size_bytes, 1), array, number)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(array.shape, dtype, pointer)


def current_stream_of(template: Template) -> Callable[[], int]:
    """Return a function that returns the address of the stream on which CuPy currently works."""
    number, ask = template.native[1], cupy.cuda.get_current_stream
    return lambda: ask(number).ptr


def template_of_dtype(dtype: AnyDtype, like: Template | None = None) -> Template:
    """Return the template of a new array of this dtype, on like's device or the current one."""
    template = numpy_arrays.template_of_dtype(dtype)
    number = cupy.cuda.runtime.getDevice() if like is None else like.native[1]
    kind = "rocm" if cupy.cuda.runtime.is_hip else "cuda"
    stream = cupy.cuda.get_current_stream(number).ptr
    return template._replace(
        library=_THIS, device=f"{kind}:{number}", stream=stream, native=(template.native, number)
    )
