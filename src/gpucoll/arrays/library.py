"""What each array library's module provides, and the words in which arrays are described."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

from gpucoll.arrays.buffer import Buffer
from gpucoll.errors import ArgumentTypeError


class Template(NamedTuple):
    """What an array is, without its memory: enough to make another one like it.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
        As in `gpucoll.types.DTYPES`; for others, NumPy's name.
    item_bytes : int
        Size of an element, in bytes.
    library : Library
        The module of this package that serves the array.
    device : str
        ``"cpu"``, ``"cuda:0"``, ``"rocm:0"``, ...; without a number where nobody says which.
    stream : int
        Address of the library's current stream; 0 for host memory and the default stream.
    number : type or None
        Of a Python or NumPy number; None for arrays.
    native : object
        What the library itself needs to make such an array: its dtype, its device, ...
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
    """An array as it lies in memory."""

    template: Template
    address: int
    owner: Any
    """Keeps the memory alive."""
    strides: tuple[int, ...] | None = None
    """In bytes; None where the array is C-contiguous."""

    def buffer(self) -> Buffer:
        """Return the memory of this C-contiguous array as backends see it."""
        shape, dtype, item_bytes, _, device, stream, _, _ = self.template
        return Buffer(self.address, shape, dtype, item_bytes, self.owner, device, stream)


@dataclass(slots=True)
class Source:
    """One input, contiguous."""

    buffer: Buffer
    template: Template
    is_packed: bool = False
    """Whether the buffer is a copy of the input."""


@dataclass(slots=True)
class Destination:
    """Where one result goes, contiguous."""

    buffer: Buffer
    finish: Callable[[], Any]
    """Called once, when the data is there; returns what the user gets."""
    lasting: Any = None
    """What `finish` returns, where that is the memory itself: what a plan writes again and again.

    None where `finish` copies, or makes something new of the memory.
    """


class Library(Protocol):
    """One array library; each module of the table in `gpucoll.arrays.libraries` is one."""

    NAME: str
    """What the user calls one of its arrays: "a NumPy array"."""

    def look(self, x: Any, what: str) -> View:
        """Say what x is and where it lies; ArgumentTypeError where it cannot be read."""

    def look_at_out(self, out: Any) -> View:
        """Say the same of an array that will be written; an error where it must not be."""

    def pack(self, x: Any, template: Template) -> View:
        """Return a C-contiguous copy of x."""

    def new(self, template: Template, shape: tuple[int, ...]) -> Destination:
        """Make a new array like the template, of this shape."""

    def complete(self, out: Any, temporary: Any) -> None:
        """Finish an array of `look_at_out`: copy `temporary` into it, unless that is None."""

    def template_of_dtype(self, dtype: Any, like: Template | None) -> Template:
        """Return the template of a new array of this dtype, on like's device; shape ()."""


def kind_of(x: Any) -> str:
    """Return the name of x's type, for errors."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


def raise_not_an_array(x: Any, what: str) -> NoReturn:
    """Raise ArgumentTypeError: nothing here can serve x."""
    hint = ""
    if isinstance(x, list | tuple):
        hint = ". Make it an array first, as numpy.asarray does; all_reduce and broadcast take a "
        hint += "list of arrays, too, scatter, reduce_scatter and all_to_all one for each rank"
    elif isinstance(x, Iterator):  # model.parameters()
        hint = ". all_reduce and broadcast take a list of arrays: list(x)"
    raise ArgumentTypeError(
        f"{what} must be an array (NumPy, PyTorch, JAX, CuPy, Numba, or anything with the buffer "
        f"protocol, __array_interface__ or DLPack) or a number; got {kind_of(x)}{hint}"
    )
