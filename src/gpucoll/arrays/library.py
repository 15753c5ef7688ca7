"""The interface of each array library's module, and the types that describe arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

from gpucoll.arrays.buffer import Buffer
from gpucoll.errors import ArgumentTypeError, GpucollError

AnyArray: TypeAlias = Any
"""An array of any library, or a number: the libraries share no class, and need not be installed."""
AnyDtype: TypeAlias = Any
"""A dtype of any library, or its name."""
AnyStream: TypeAlias = Any
"""A stream of any library, or its handle: whatever `gpucoll.arrays.streams.address_of` reads."""


class Template(NamedTuple):
    """An array's description without its memory: enough to make another one like it.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
        As in `gpucoll.types.DTYPES`; NumPy's name for other dtypes.
    item_bytes : int
        Size of an element, in bytes.
    library : Library
        The module of this package that serves the array.
    device : str
        ``"cpu"``, ``"cuda:0"``, ``"rocm:0"``, ...; without a number if it is not known.
    stream : int
        Address of the library's current stream; 0 for host memory and the default stream.
    number : type or None
        Type of a Python or NumPy number; None for arrays.
    native : object
        The library's own objects that describe the array: its dtype, its device, ...
    """

    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    library: Library
    device: str = "cpu"
    stream: int = 0
    number: type | None = None
    native: Any = None

    @property
    def size_bytes(self) -> int:
        """Size of the data, in bytes."""
        return math.prod(self.shape) * self.item_bytes


class View(NamedTuple):
    """The memory of an array."""

    template: Template
    address: int
    owner: Any
    """Keeps the memory alive."""
    strides: tuple[int, ...] | None = None
    """In bytes; None if the array is C-contiguous."""

    def buffer(self) -> Buffer:
        """Return the memory of this C-contiguous array as a `Buffer`."""
        shape, dtype, item_bytes, _, device, stream, _, _ = self.template
        return Buffer(self.address, shape, dtype, item_bytes, self.owner, device, stream)


@dataclass(slots=True)
class Source:
    """One input as contiguous memory."""

    buffer: Buffer
    template: Template
    is_packed: bool = False
    """Whether the buffer is a copy of the input."""


@dataclass(slots=True)
class Destination:
    """The contiguous memory of one result."""

    buffer: Buffer
    finish: Callable[[], Any]
    """Called once, when the data is complete; returns the user's result."""
    lasting: Any = None
    """The result of `finish` if it is the memory itself, as a plan needs it.

    None if `finish` copies, or makes a new object of the memory.
    """


class Library(Protocol):
    """One array library; each module of the table in `gpucoll.arrays.libraries` is one."""

    NAME: str
    """The user's word for one of its arrays: "a NumPy array"."""

    def look(self, x: AnyArray, what: str) -> View:
        """Return the view of x; raise ArgumentTypeError if x cannot be read."""

    def look_at_out(self, out: AnyArray) -> View:
        """Return the view of an array that will be written; raise if it must not be."""

    def pack(self, x: AnyArray, template: Template) -> View:
        """Return a C-contiguous copy of x."""

    def new(self, template: Template, shape: tuple[int, ...]) -> Destination:
        """Make a new array like the template, of this shape."""

    def complete(self, out: AnyArray, temporary: AnyArray) -> None:
        """Finish an array of `look_at_out`: copy `temporary` into it, unless that is None."""

    def template_of_dtype(self, dtype: AnyDtype, like: Template | None) -> Template:
        """Return the template of a new array of this dtype, on like's device; shape ()."""


def kind_of(x: object) -> str:
    """Return the name of x's type, for errors."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


def raise_not_an_array(x: object, what: str) -> NoReturn:
    """Raise ArgumentTypeError for an object that no module here serves."""
    hint = ""
    if isinstance(x, list | tuple):
        hint = (
            ". Make it an array first, as numpy.asarray does; all_reduce and broadcast also take "
        )
        hint += "a list of arrays, and scatter, reduce_scatter and all_to_all one for each rank"
    elif isinstance(x, Iterator):  # model.parameters()
        hint = ". all_reduce and broadcast take a list of arrays: list(x)"
    raise ArgumentTypeError(
        f"{what} must be an array (NumPy, PyTorch, JAX, CuPy, Numba, or anything with the buffer "
        f"protocol, __array_interface__ or DLPack) or a number; got {kind_of(x)}{hint}"
    )


# --- fingerprints: they tell one kind of array from another, without a full look ------------------

Fingerprint: TypeAlias = tuple[Hashable, int]
"""The kind of an array, and its address."""


def fingerprint_of(library: Library) -> Callable[[AnyArray], Fingerprint | None]:
    """Return the function that computes fingerprints of a library's arrays, inputs or outputs.

    A library's `look` describes an array in terms that every backend understands. For repeated
    calls it is enough to know that the array is of a known kind. A library's own ``fingerprint(x)``
    returns the facts that decide this, in the library's own terms, and the address; or None if x
    needs a full look.
    """
    return getattr(library, "fingerprint", None) or partial(_fingerprint, library)


def _fingerprint(library: Library, x: AnyArray) -> Fingerprint | None:
    """Compute a fingerprint by a full look."""
    try:
        template, address, owner, strides = library.look_at_out(x)
    except GpucollError:
        return None  # the slow path raises the error
    if owner is not x:
        return None
    sort = template.shape, template.dtype, template.device, template.stream, strides is None
    return sort, address
