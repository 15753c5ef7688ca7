"""Numba's CUDA device arrays.

They are read directly, because Numba's own array interface calls a broadcast array contiguous, and
has no name for dtypes that NumPy lacks.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, cast

import numpy as np
from numba import cuda

from gpucoll.arrays import numpy_arrays, streams
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.dlpack import is_contiguous
from gpucoll.arrays.library import (
    AnyDtype,
    Destination,
    Library,
    Template,
    View,
    raise_not_an_array,
)
from gpucoll.errors import ArgumentError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from numba.cuda.cudadrv.devicearray import DeviceNDArray

    from gpucoll.arrays.device_array import DeviceArray

NAME = "a Numba device array"
FORGETS_FREED_MEMORY = True
_THIS = cast(Library, sys.modules[__name__])


def look(x: DeviceNDArray, what: str) -> View:
    """Return the view of x."""
    if getattr(x, "gpu_data", None) is None:
        raise_not_an_array(x, what)
    dtype, shape, strides = np.dtype(x.dtype), tuple(x.shape), tuple(x.strides)
    numpy_arrays.check_dtype(dtype, what)
    name, item_bytes = numpy_arrays.dtype_name(dtype), dtype.itemsize
    device = f"cuda:{x.gpu_data.context.device.id}"
    stream, native = streams.address_of(x.stream), (dtype, x.stream)
    template = Template(shape, name, item_bytes, _THIS, device, stream, None, native)
    address = x.device_ctypes_pointer.value or 0
    return View(
        template, address, x, None if is_contiguous(shape, strides, item_bytes) else strides
    )


def look_at_out(out: DeviceNDArray) -> View:
    """Return the view of an array that will be written."""
    return look(out, "out")


def pack(x: DeviceNDArray, template: Template) -> View:
    """Return a C-contiguous copy of x, made on the stream that x is bound to."""
    made = new(template, template.shape)
    try:
        _copy(made.lasting, x, template.device)
    except Exception as error:  # from Numba's compiler, or because it is missing
        raise ArgumentError(
            f"x is not contiguous, and Numba cannot pack it ({error}): pass a contiguous array"
        ) from error
    return View(template, made.buffer.address, made.lasting)


def _copy(destination: DeviceNDArray, source: DeviceNDArray, device: str) -> None:
    """Copy elements by a kernel of Numba's, which does not support an ellipsis."""
    with _on(device):
        destination[:] = source


def new(template: Template, shape: tuple[int, ...]) -> Destination:
    """Make a new array, bound to the template's stream."""
    _, name, item_bytes, _, device, stream, _, (dtype, bound_to) = template
    with _on(device):
        result = cuda.device_array(shape, dtype, stream=bound_to)
    address = result.device_ctypes_pointer.value or 0
    buffer = Buffer(address, shape, name, item_bytes, result, device, stream)
    return Destination(buffer, lambda: result, result)


def _on(device: str) -> AbstractContextManager[object]:
    """Return a context manager that makes a device Numba's current one."""
    context: AbstractContextManager[object] = cuda.gpus[int(device.partition(":")[2])]
    return context


def complete(out: DeviceNDArray, temporary: DeviceNDArray) -> None:
    """Fill a non-contiguous `out`."""
    if temporary is not None:
        _copy(out, temporary, look_at_out(out).template.device)


def adopt(array: DeviceArray, template: Template) -> DeviceNDArray:
    """Return a Numba array over a DeviceArray's memory, which it keeps alive."""
    dtype, _ = template.native
    interface = {
        "version": 3,
        "shape": array.shape,
        "typestr": dtype,  # Numba converts it to a dtype, and this one may have no typestr
        "data": (array.address if math.prod(array.shape) else 0, False),
    }
    with _on(array.device):
        return cuda.from_cuda_array_interface(interface, owner=array)


def template_of_dtype(dtype: AnyDtype, like: Template | None = None) -> Template:
    """Return the template of a new array of this dtype."""
    template = numpy_arrays.template_of_dtype(dtype)
    if like is None:
        device, stream, bound_to = f"cuda:{cuda.get_current_device().id}", 0, 0
    else:
        device, stream, bound_to = like.device, like.stream, like.native[1]
    native = template.native, bound_to
    return template._replace(library=_THIS, device=device, stream=stream, native=native)
