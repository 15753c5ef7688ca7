"""PyTorch tensors, on the CPU and on GPUs.

As with `torch.distributed`, autograd does not see collectives: inputs that require grad are read
without it, and results never require grad. An `out` that requires grad is refused if PyTorch's own
in-place operations would refuse it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable
from typing import cast

import torch

from gpucoll.arrays import numpy_arrays, torch_compiler
from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.device_array import DeviceArray
from gpucoll.arrays.library import (
    AnyDtype,
    Destination,
    Library,
    Template,
    View,
    kind_of,
    raise_not_an_array,
)
from gpucoll.errors import ArgumentError, ArgumentTypeError

NAME = "a PyTorch tensor"
_THIS = cast(Library, sys.modules[__name__])

torch_compiler.tell_torch()


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def look(x: object, what: str) -> View:
    """Return the view of x."""
    if not isinstance(x, torch.Tensor):
        raise_not_an_array(x, what)
    if isinstance(x, torch.nn.parameter.UninitializedTensorMixin):
        raise ArgumentTypeError(f"{what} is an uninitialized parameter: run the module once first")
    if reason := _refusal(x):
        raise ArgumentTypeError(f"{what} {reason}")
    try:
        address = x.data_ptr()
    except RuntimeError as error:
        raise ArgumentTypeError(
            f"{what} has no memory of its own ({error}): collectives cannot be called inside "
            "torch.func transforms (vmap, grad) or on tensors without storage"
        ) from None
    dtype, item_bytes = x.dtype, x.element_size()
    if address == x.storage_offset() * item_bytes and x.numel():
        raise ArgumentTypeError(
            f"{what} has no memory: its storage was freed (as FSDP does with other ranks' parts), "
            "or it is a stand-in of a torch.func transform"
        )
    device, stream = _place(x.device)
    native = (dtype, x.device)
    name = _dtype_name(dtype)
    template = Template(tuple(x.shape), name, item_bytes, _THIS, device, stream, None, native)
    strides = None if x.is_contiguous() else tuple(step * item_bytes for step in x.stride())
    return View(template, address, x, strides)


def fingerprint(x: torch.Tensor) -> tuple[Hashable, int] | None:
    """Return x's kind and address quickly; None if x needs a full look."""
    try:
        if x.requires_grad or x.is_nested:  # may be refused as an output, and has no shape
            return None
        sort = (x.shape, x.dtype, x.device, x.is_contiguous(), x.layout, x.is_conj(), x.is_neg())
        return sort, x.data_ptr()
    except RuntimeError:  # the tensor has no memory of its own
        return None


def look_at_out(out: torch.Tensor) -> View:
    """Return the view of a tensor that will be written."""
    view = look(out, "out")
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "out requires grad, and autograd would not see that it is written: give out.detach(), "
            "or call within torch.no_grad()"
        )
    return view


def _wraps_others(x: torch.Tensor) -> bool:
    return type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _refusal(x: torch.Tensor) -> str:
    """Return why a tensor's memory is not its elements, with the remedy; or an empty string."""
    if _wraps_others(x):
        return f"is a {kind_of(x)}, which wraps other tensors: pass those (DTensor: x.to_local())"
    if x.is_nested:
        return "is a nested tensor: pass x.values(), or a list of its parts (x.unbind())"
    if x.layout is not torch.strided:
        return (
            f"has layout {x.layout}, which differs in structure from rank to rank: pass "
            "x.to_dense(), or x.values() if all ranks have the same structure"
        )
    if x.is_quantized:
        return "is quantized, with a scale of its own: pass x.dequantize()"
    if x.is_conj():
        return "is a conjugate view, whose memory is not conjugated: pass x.resolve_conj()"
    if x.is_neg():
        return "is a negated view, whose memory is not negated: pass x.resolve_neg()"
    if x.device.type == "meta":
        return "is on the meta device: it has no data"
    return ""


def _place(device: torch.device) -> tuple[str, int]:
    """Return the name of a device, and the address of its current stream."""
    if device.type == "cpu":
        return "cpu", 0
    if device.type == "xpu":
        return f"sycl:{device.index}", torch.xpu.current_stream(device).sycl_queue
    if device.type != "cuda":
        return str(device), 0
    kind = "cuda" if torch.version.hip is None else "rocm"
    return f"{kind}:{device.index}", torch.cuda.current_stream(device).cuda_stream


def pack(x: torch.Tensor, template: Template) -> View:
    """Return a C-contiguous copy of x."""
    packed = x.detach().contiguous()
    return View(template, _address_of_new(packed), packed)


def _address_of_new(tensor: torch.Tensor) -> int:
    """Return the address of a tensor that PyTorch has just made; raise if it has no memory."""
    address: int = 0 if _wraps_others(tensor) else tensor.data_ptr()
    if not address and tensor.numel():
        raise ArgumentTypeError(
            "PyTorch makes tensors without memory here, as in a FakeTensorMode: collectives cannot "
            "be called there"
        )
    return address


def new(template: Template, shape: tuple[int, ...]) -> Destination:
    """Make a new tensor."""
    _, name, item_bytes, _, device, stream, _, (dtype, on) = template
    result = torch.empty(shape, dtype=dtype, device=on)
    buffer = Buffer(_address_of_new(result), shape, name, item_bytes, result, device, stream)
    return Destination(buffer, lambda: result, result)


def complete(out: torch.Tensor, temporary: torch.Tensor) -> None:
    """Fill a non-contiguous `out`, and tell autograd that it changed."""
    if temporary is not None:
        # This may be the thread of asynchronous calls, which has a grad mode of its own. Only
        # inference mode may write to tensors that were made in it.
        with torch.inference_mode():
            out.copy_(temporary)
    elif not out.is_inference():
        torch.autograd.graph.increment_version(out)


def adopt(array: DeviceArray, template: Template) -> torch.Tensor:
    """Return a tensor over a DeviceArray's memory, which it keeps alive."""
    try:
        return torch.from_dlpack(array)
    except (BufferError, RuntimeError):  # older versions do not support DLPack's newer float8
        data = DeviceArray(array.address, (array.size_bytes,), "uint8", array.device, array)
        return torch.from_dlpack(data).view(template.native[0]).view(array.shape)


def current_stream_of(template: Template) -> Callable[[], int]:
    """Return a function that returns the address of the stream on which PyTorch currently works."""
    device = template.native[1]
    if device.type == "xpu":
        return lambda: torch.xpu.current_stream(device).sycl_queue
    if device.type != "cuda":
        return lambda: 0
    return lambda: torch.cuda.current_stream(device).cuda_stream


def template_of_dtype(dtype: AnyDtype, like: Template | None = None) -> Template:
    """Return the template of a new tensor of this dtype."""
    native = dtype
    if not isinstance(dtype, torch.dtype):
        name = dtype if isinstance(dtype, str) else numpy_arrays.template_of_dtype(dtype).dtype
        native = getattr(torch, name.removeprefix("torch."), None)
        if not isinstance(native, torch.dtype):
            raise ArgumentTypeError(f"dtype {dtype!r} is not known to PyTorch")
    device = torch.device("cpu") if like is None else like.native[1]
    place, stream = ("cpu", 0) if like is None else (like.device, like.stream)
    item_bytes = native.itemsize
    return Template(
        (), _dtype_name(native), item_bytes, _THIS, place, stream, None, (native, device)
    )
