"""Arrays of libraries without a module here, read through the protocols that they share.

``__cuda_array_interface__``, ``__sycl_usm_array_interface__`` (dpctl, dpnp),
``__array_interface__`` or DLPack give the memory. The library's own
``from_dlpack`` makes the result on the host, and its ``empty`` on a GPU, if it has them (as
libraries of the array API standard do). Otherwise the result on the host is a NumPy array, and on a
GPU `out` must be given.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from gpucoll.arrays import dlpack, numpy_arrays
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import AnyArray, AnyDtype, Destination, Library, Template, View, kind_of
from gpucoll.errors import ArgumentError, ArgumentTypeError

NAME = "one with an array interface or DLPack"
Interface: TypeAlias = dict[str, Any]
"""An array interface, with the values that x's library gives."""
FORGETS_FREED_MEMORY = True
_THIS = cast(Library, sys.modules[__name__])
_READ_ONLY = "is read-only"
_COPIED = "hands over a copy of its memory by DLPack, so the result would not reach it"


def look(x: AnyArray, what: str) -> View:
    """Return the view of x."""
    return _seen(x, what)[0]


def look_at_out(out: AnyArray) -> View:
    """Return the view of an array that will be written."""
    view, refusal = _seen(out, "out")
    if refusal:
        raise ArgumentError(f"out {refusal}")
    return view


def _seen(x: AnyArray, what: str) -> tuple[View, str]:
    """Return the view of x, and the reason why x cannot be written; empty if it can."""
    if (usm := getattr(x, "__sycl_usm_array_interface__", None)) is not None:
        return _interface_view(x, *_of_sycl(usm, what), what)
    for attribute in ("__cuda_array_interface__", "__array_interface__"):
        if (interface := getattr(x, attribute, None)) is not None:
            return _interface_view(x, interface, _device_of(x, attribute), what)
    tensor = dlpack.read(x, what)
    name, item_bytes = tensor.dtype, tensor.item_bytes
    template = Template(tensor.shape, name, item_bytes, _THIS, tensor.device, 0, None, (x, name))
    refusal = _READ_ONLY if tensor.is_read_only else _COPIED if tensor.is_copied else ""
    return View(template, tensor.address, tensor.owner, tensor.strides), refusal


def _device_of(x: AnyArray, attribute: str) -> str:
    if attribute == "__array_interface__":
        return "cpu"
    return dlpack.device_of(x) if hasattr(x, "__dlpack_device__") else "cuda"


def _of_sycl(usm: Interface, what: str) -> tuple[Interface, str]:
    """Return what the interface of SYCL's shared memory says in CUDA's words, and the device."""
    queue = usm["syclobj"]
    if not hasattr(queue, "addressof_ref") or not hasattr(queue, "sycl_device"):
        raise ArgumentTypeError(f"{what} does not say on which queue of dpctl it was made")
    item_bytes = np.dtype(usm["typestr"]).itemsize
    strides = usm.get("strides")
    address, is_read_only = usm["data"]
    interface = {
        "typestr": usm["typestr"],
        "shape": usm["shape"],
        "strides": None if strides is None else tuple(step * item_bytes for step in strides),
        "data": (address + usm.get("offset", 0) * item_bytes, is_read_only),
        "stream": queue.addressof_ref(),
    }
    return interface, f"sycl:{queue.sycl_device.get_device_id()}"


def _interface_view(x: AnyArray, interface: Interface, device: str, what: str) -> tuple[View, str]:
    """Return the same as `_seen`, from x's array interface, NumPy's or CUDA's."""
    if interface.get("mask") is not None:
        raise ArgumentTypeError(f"{what} is a masked array: collectives would ignore its mask")
    dtype = numpy_arrays.dtype_of(interface["typestr"])
    if dtype.kind == "V" and interface.get("descr"):
        dtype = np.dtype(interface["descr"])
    numpy_arrays.check_dtype(dtype, what)
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    if dlpack.is_contiguous(shape, strides, dtype.itemsize):
        strides = None
    name, stream = numpy_arrays.dtype_name(dtype), interface.get("stream") or 0
    owner = x
    data = interface.get("data")
    if not isinstance(data, tuple):  # data is a buffer; if it is None, x itself is
        named = {**interface, "data": x if data is None else data}
        owner = np.asarray(SimpleNamespace(__array_interface__=named))
        address, is_read_only = numpy_arrays.address_of(owner), not owner.flags.writeable
    else:
        address, is_read_only = data
    template = Template(shape, name, dtype.itemsize, _THIS, device, stream, None, (x, dtype))
    return View(template, address or 0, owner, strides), _READ_ONLY if is_read_only else ""


def pack(x: AnyArray, template: Template) -> View:
    """Return a C-contiguous copy of x, a NumPy array."""
    if template.device != "cpu":
        raise ArgumentError(
            f"x, a {kind_of(x)}, is not contiguous, and how to pack it on {template.device} is not "
            "known: pass a contiguous array"
        )
    return numpy_arrays.pack(_host_array(look(x, "x")), template)


def _host_array(view: View) -> npt.NDArray[np.generic]:
    """Return a NumPy array over the same memory, with bytes in place of elements."""
    template = view.template
    interface = {
        "version": 3,
        "typestr": f"|V{template.item_bytes}",
        "shape": template.shape,
        "strides": view.strides,
        "data": (view.address, False),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface, owner=view.owner))


def new(template: Template, shape: tuple[int, ...]) -> Destination:
    """Make a new array of the template's library if it can, otherwise of NumPy."""
    _, name, item_bytes, _, device, stream, _, (x, dtype) = template
    library = _namespace(x)
    if device == "cpu":
        host = numpy_arrays.new(numpy_arrays.template_of_dtype(dtype), shape)
        convert = getattr(library, "from_dlpack", None)
        if convert is None or np.dtype(dtype).kind not in "biufc":
            return host
        return Destination(host.buffer, lambda: convert(host.finish()))
    empty = getattr(library, "empty", None)
    if empty is None:
        raise ArgumentError(f"how to make a new {kind_of(x)} is not known: give out=")
    result = empty(shape, dtype=x.dtype, device=x.device)
    view = look(result, "the result")
    assert view.template.size_bytes == math.prod(shape) * item_bytes
    buffer = Buffer(view.address, shape, name, item_bytes, result, device, stream)
    return Destination(buffer, lambda: result, result)


def _namespace(x: AnyArray) -> ModuleType | None:
    """Return the module of x's library that makes arrays, if there is one."""
    if hasattr(x, "__array_namespace__"):
        namespace: ModuleType = x.__array_namespace__()
        return namespace
    return sys.modules.get(type(x).__module__.partition(".")[0])


def complete(out: AnyArray, temporary: AnyArray) -> None:
    """Fill a non-contiguous `out`."""
    if temporary is None:
        return
    if look(out, "out").template.device == "cpu":
        _host_array(look(out, "out"))[...] = _host_array(look(temporary, "out"))
    else:
        out[...] = temporary


def template_of_dtype(dtype: AnyDtype, like: Template | None = None) -> Template:
    """Return the template of a new array of like's dtype; NumPy's template for another dtype."""
    template = numpy_arrays.template_of_dtype(dtype)
    if like is None:
        return template
    if like.device != "cpu":
        raise ArgumentTypeError(
            f"an array on {like.device} with another dtype than like's cannot be made: give out"
        )
    return template._replace(library=_THIS, native=(like.native[0], template.native))
