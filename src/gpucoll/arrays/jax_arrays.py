"""JAX arrays on one device. They are immutable, so none can be an `out`."""

from __future__ import annotations

import math
import re
import sys
from typing import cast

import jax
import numpy as np
import numpy.typing as npt

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
from gpucoll.errors import ArgumentTypeError

NAME = "a JAX array"
_THIS = cast(Library, sys.modules[__name__])
IS_STREAM_ORDERED = False
"""JAX has streams of its own, and does not wait for others."""
_ALIGNMENT_BYTES = 64
"""Alignment of JAX's own memory. JAX copies other host memory that is not aligned like this."""


def look(x: object, what: str) -> View:
    """Return the view of x, after its computation has ended."""
    if not isinstance(x, jax.Array):
        raise_not_an_array(x, what)
    if reason := _refusal(x):
        raise ArgumentTypeError(f"{what} {reason}")
    (device,) = x.devices()
    place, dtype = _place(device), np.dtype(x.dtype)
    if place == "cpu":
        array = np.asarray(x, order="C")  # waits for x; shares its memory, or unpacks it
        address, owner = numpy_arrays.address_of(array), array
    else:
        _check_on_gpu(x, device, dtype, what)
        owner = (x if _is_row_major(x) else jax.numpy.copy(x)).block_until_ready()
        address = owner.unsafe_buffer_pointer()
    name = numpy_arrays.dtype_name(dtype)
    native = (dtype, device, getattr(x, "committed", True))
    template = Template(tuple(x.shape), name, dtype.itemsize, _THIS, place, 0, None, native)
    return View(template, address, owner)


def look_at_out(out: object) -> View:
    """Refuse, because JAX arrays cannot be written."""
    raise ArgumentTypeError("JAX arrays are immutable: omit out=, and use the result")


def _refusal(x: jax.Array) -> str:
    """Return why x has no readable memory, with the remedy; or an empty string."""
    if isinstance(x, jax.core.Tracer):
        return (
            "is being traced: a collective cannot become part of a compiled or transformed "
            "function; call it outside of jax.jit, vmap and grad"
        )
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return f"has dtype {x.dtype}: pass jax.random.key_data(x)"
    if x.is_deleted():
        return "was deleted: it was donated to a compiled function"
    count = len(x.devices())
    if count != 1:
        return (
            f"lies on {count} devices: pass the part of one (x.addressable_shards[0].data), or "
            "gather it first with jax.device_put(x, jax.devices()[0])"
        )
    return ""


def _place(device: jax.Device) -> str:
    if device.platform == "cpu":
        return "cpu"
    kind = device.platform
    if kind == "gpu":
        kind = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return f"{kind}:{device.local_hardware_id}"


def _check_on_gpu(x: jax.Array, device: jax.Device, dtype: np.dtype[np.generic], what: str) -> None:
    """Refuse arrays that are not in GPU memory, and dtypes that are packed there, such as int4."""
    kind, own_kind = x.sharding.memory_kind, device.default_memory().kind
    if kind not in (None, own_kind):
        raise ArgumentTypeError(
            f"{what} is an array of a GPU that lies in host memory ({kind}): bring it back first, "
            f'jax.device_put(x, x.sharding.with_memory_kind("{own_kind}"))'
        )
    if re.fullmatch(r"(u?int|float)[124](_\w+)?", dtype.name):
        raise ArgumentTypeError(
            f"{what} has dtype {dtype}, whose elements share bytes on a GPU: convert it first, "
            'x.astype("int8")'
        )


def _is_row_major(x: jax.Array) -> bool:
    """Return whether x's elements are in C order: always, unless a user asked otherwise."""
    layout = getattr(getattr(x, "format", None), "layout", None)
    return layout is None or tuple(layout.major_to_minor) == tuple(range(x.ndim))


def pack(x: jax.Array, template: Template) -> View:
    """Return the view of x: it is always contiguous."""
    return look(x, "x")


def new(template: Template, shape: tuple[int, ...]) -> Destination:
    """Allocate memory that becomes a new JAX array."""
    _, name, item_bytes, _, place, stream, _, (dtype, device, is_committed) = template
    if (held := jax.dtypes.canonicalize_dtype(dtype)) != dtype:
        raise ArgumentTypeError(
            f"JAX would make {held} of the result's {dtype}: set jax_enable_x64, or convert x first"
        )
    bound_to = device if is_committed else None
    """Committed only if the input is: JAX moves uncommitted arrays to those they are used with."""
    if place == "cpu":
        memory = _aligned(shape, dtype)
        address = numpy_arrays.address_of(memory)
        buffer = Buffer(address, shape, name, item_bytes, memory)

        def finish() -> jax.Array:
            with jax.default_device(device):
                return jax.device_put(memory, bound_to)

        return Destination(buffer, finish)
    # The context works even if a function is being traced around the call.
    with jax.default_device(device), jax.ensure_compile_time_eval():
        result = jax.numpy.empty(shape, dtype, device=bound_to).block_until_ready()
    address = result.unsafe_buffer_pointer()
    buffer = Buffer(address, shape, name, item_bytes, result, place, stream)
    return Destination(buffer, lambda: result)


def _aligned(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    size_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -numpy_arrays.address_of(raw) % _ALIGNMENT_BYTES
    return raw[start : start + size_bytes].view(dtype).reshape(shape)


def complete(out: object, temporary: object) -> None:
    """Do nothing: there is never an `out`."""


def template_of_dtype(dtype: AnyDtype, like: Template | None = None) -> Template:
    """Return the template of a new array of this dtype."""
    template = numpy_arrays.template_of_dtype(dtype)
    device, is_committed = (jax.local_devices()[0], False) if like is None else like.native[1:]
    native = (template.native, device, is_committed)
    return template._replace(library=_THIS, device=_place(device), native=native)
