"""Numba's CUDA device arrays."""

from __future__ import annotations

import sys
from typing import Any, cast

import numpy as np
from numba import cuda

from gpucoll.arrays import numpy_arrays
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.foreign_arrays import interface_view
from gpucoll.arrays.library import Destination, Library, Template, View, raise_not_an_array
from gpucoll.errors import ArgumentError

NAME = "a Numba device array"
FORGETS_FREED_MEMORY = True
_THIS = cast(Library, sys.modules[__name__])


def look(x: Any, what: str) -> View:
    """Say what x is and where it lies."""
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is None:
        raise_not_an_array(x, what)
    context = getattr(getattr(x, "gpu_data", None), "context", None)
    device = "cuda" if context is None else f"cuda:{context.device.id}"
    view, _ = interface_view(x, interface, what, _THIS, device)
    return view._replace(template=view.template._replace(native=np.dtype(x.dtype)))


def look_at_out(out: Any) -> View:
    """Say the same of an array that will be written."""
    return look(out, "out")


def pack(x: Any, template: Template) -> View:
    """Refuse: Numba has no copy that packs on the device."""
    raise ArgumentError("x is not contiguous, and Numba cannot pack it: pass a contiguous array")


def new(template: Template, shape: tuple[int, ...]) -> Destination:
    """Make a new array on the current device."""
    result = cuda.device_array(shape, template.native)
    address = result.__cuda_array_interface__["data"][0] or 0
    buffer = Buffer(
        address,
        shape,
        template.dtype,
        template.item_bytes,
        result,
        template.device,
        template.stream,
    )
    return Destination(buffer, lambda: result, result)


def complete(out: Any, temporary: Any) -> None:
    """Fill a non-contiguous `out`."""
    if temporary is not None:
        out[...] = temporary


def adopt(array: Any, template: Template) -> Any:
    """Return a Numba array over a DeviceArray's memory, which it keeps alive."""
    return cuda.as_cuda_array(array, sync=False)


def template_of_dtype(dtype: Any, like: Template | None = None) -> Template:
    """Return the template of a new array of this dtype."""
    template = numpy_arrays.template_of_dtype(dtype)
    device = f"cuda:{cuda.get_current_device().id}" if like is None else like.device
    return template._replace(library=_THIS, device=device)
