"""The arrays of one call, of any library, as buffers; and results as arrays of that library."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.libraries import is_array, library_of, library_of_dtype
from gpucoll.arrays.library import AnyArray, AnyDtype, Destination, Source, Template, View, kind_of
from gpucoll.arrays.overlap import overlaps, overlaps_itself
from gpucoll.errors import ArgumentError, ArgumentTypeError, BackendUnavailableError

GPU_KINDS = ("cuda", "rocm", "sycl", "host")
"""Kinds of devices, other than the host, whose arrays can be moved (without device numbers)."""


@dataclass(slots=True)
class Operands:
    """The arrays of one call, ready to be moved, and the function that makes the result."""

    source: Buffer
    destination: Buffer
    finish: Callable[[], Any]
    """Called once, when the data is complete; returns the user's result."""
    template: Template
    """The input's template."""
    is_packed: bool
    """Whether the source is a copy of the input."""
    lasting: Any
    """As in `Destination.lasting`."""


def template_of(x: AnyArray, what: str = "x") -> Template:
    """Return the template of x; nothing is copied.

    Parameters
    ----------
    x : array or number
    what : str
        The argument's name in errors.

    Raises
    ------
    ArgumentTypeError
        x is not an array, or its elements cannot be moved; the message has the remedy.
    """
    return library_of(x, what).look(x, what).template


def source_of(x: AnyArray, what: str = "x") -> Source:
    """Return x's memory, or that of a packed copy if x is not C-contiguous."""
    return _source(library_of(x, what).look(x, what), x)


def destination_of(
    template: Template,
    shape: tuple[int, ...],
    out: AnyArray = None,
    *,
    x: AnyArray = None,
    in_place_at: int | None = 0,
) -> Destination:
    """Return the destination of a result: `out`, or a new array.

    Parameters
    ----------
    template : Template
        The input's template. The result has its library, dtype and device, and is a number if the
        template is and `shape` is ().
    shape : tuple of int
        The result's shape.
    out : array, optional
        The user's array: any shape with the right number of elements.
    x : array, optional
        The input, if there is one. `out` must not overlap it, except in place.
    in_place_at : int or None
        The in-place position: x's address minus out's, in bytes. None if there is no such position.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        `out` is invalid; the message says why.
    """
    view = None if x is None or out is None else template.library.look(x, "x")
    return _destination(template, shape, out, view, in_place_at)


def prepare(
    x: AnyArray,
    out: AnyArray = None,
    *,
    shape: tuple[int, ...] | None = None,
    in_place_at: int | None = 0,
    what: str = "x",
) -> Operands:
    """Check one call's input and output, and return their operands.

    Parameters
    ----------
    x : array or number
        Packed if it is not contiguous.
    out : array, optional
        Filled at the end if it is not contiguous.
    shape : tuple of int, optional
        The result's shape. Default: x's.
    in_place_at : int or None
        As for `destination_of`.
    what : str
        The name of x in errors.
    """
    view = library_of(x, what).look(x, what)
    template = view.template
    destination = _destination(
        template, template.shape if shape is None else shape, out, view, in_place_at
    )
    source = _source(view, x).buffer
    return Operands(
        source,
        destination.buffer,
        destination.finish,
        template,
        view.strides is not None,
        destination.lasting,
    )


def template_like(
    shape: tuple[int, ...] | None = None, dtype: AnyDtype = None, like: AnyArray = None
) -> Template:
    """Return the template that a user described, for a result without an input.

    Parameters
    ----------
    shape : tuple of int, optional
        Default: like's.
    dtype : dtype, optional
        A name, or a dtype of like's library; default: like's.
    like : array or number, optional
        Array whose library, device and kind are used. Default: those of the dtype's library, NumPy.
    """
    if like is not None:
        template = template_of(like, "like")
        shape = template.shape if shape is None else shape
        if dtype is not None:
            template = template.library.template_of_dtype(dtype, template)
        return template._replace(shape=shape)
    if shape is None or dtype is None:
        raise ArgumentError("without an array, give shape= and dtype=, or like=")
    return library_of_dtype(dtype).template_of_dtype(dtype, None)._replace(shape=shape)


def is_sequence_of_arrays(x: object) -> bool:
    """Return whether x is a list or tuple with arrays in it, to be fused; numbers do not count."""
    return isinstance(x, list | tuple) and any(map(is_array, x))


def ensure_served(template: Template, what: str = "x") -> None:
    """Raise BackendUnavailableError unless a backend moves arrays of this device."""
    device = template.device
    if device != "cpu" and device.partition(":")[0] not in GPU_KINDS:
        raise BackendUnavailableError(
            f"{what} lies on {device}: gpucoll moves arrays in host memory and on GPUs of NVIDIA "
            "and AMD; copy it to the host first"
        )


# --- pieces ---------------------------------------------------------------------------------------


def _source(view: View, x: AnyArray) -> Source:
    if view.strides is None:
        return Source(view.buffer(), view.template)
    packed = view.template.library.pack(x, view.template)
    return Source(packed.buffer(), view.template, is_packed=True)


def _destination(
    template: Template,
    shape: tuple[int, ...],
    out: AnyArray,
    x: View | None,
    in_place_at: int | None,
) -> Destination:
    library = template.library
    if out is None:
        return library.new(template, shape)
    view = _look_at_out(out, template)
    _check_out(view, template, shape)
    if x is not None and not _is_in_place(x, view, in_place_at) and overlaps(x, view):
        raise ArgumentError(_overlap_message(in_place_at))
    if view.strides is None:

        def finish() -> AnyArray:
            library.complete(out, None)
            return out

        return Destination(view.buffer(), finish, out)
    temporary = library.new(view.template, view.template.shape)

    def fill() -> AnyArray:
        library.complete(out, temporary.finish())
        return out

    return Destination(temporary.buffer, fill)


def _look_at_out(out: AnyArray, template: Template) -> View:
    if template.number is not None:
        raise ArgumentTypeError("out= goes with arrays: a number has no memory to write to")
    library = template.library
    if not is_array(out) or library_of(out, "out") is not library:
        raise ArgumentTypeError(f"out must be of x's library, {library.NAME}; got {kind_of(out)}")
    return library.look_at_out(out)


def _check_out(out: View, x: Template, shape: tuple[int, ...]) -> None:
    of = out.template
    if of.dtype != x.dtype:
        raise ArgumentTypeError(f"out has dtype {of.dtype}, but x has {x.dtype}")
    if of.device != x.device:
        raise ArgumentError(f"out lies on {of.device}, but x on {x.device}")
    if of.shape != shape and (count := math.prod(of.shape)) != (expected := math.prod(shape)):
        raise ArgumentError(
            f"out has shape {of.shape}, {count} elements; the result has shape {shape}, "
            f"{expected} elements"
        )
    if overlaps_itself(out):
        raise ArgumentError("out has elements that share their memory: give an array of its own")


def _is_in_place(x: View, out: View, in_place_at: int | None) -> bool:
    if in_place_at is None or x.address - out.address != in_place_at:
        return False
    if x.strides is None and out.strides is None:
        return True
    return in_place_at == 0 and (x.template.shape, x.strides) == (out.template.shape, out.strides)


def _overlap_message(in_place_at: int | None) -> str:
    if in_place_at is None:
        return "out overlaps x: this call cannot work in place; give an array of its own"
    if in_place_at == 0:
        return "out overlaps x without being x: give x itself (in place) or an array of its own"
    whole, block = ("out", "x") if in_place_at > 0 else ("x", "out")
    return (
        f"out overlaps x without being in place: for that, {block} must be contiguous and begin "
        f"{abs(in_place_at)} bytes into {whole}, at this rank's block; or give an array of its own"
    )
