"""The `Buffer`: an array of any library in the form that backends need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)  # not frozen: frozen ones take four times as long to make
class Buffer:
    """The contiguous memory of one array.

    Attributes
    ----------
    address : int
        Address of the first element.
    shape : tuple of int
        The array's shape.
    dtype : str
        Name of the dtype, as in `gpucoll.types.DTYPES`.
    item_bytes : int
        Size of an element, in bytes.
    owner : object
        Keeps the memory alive.
    device : str
        ``"cpu"``, or the kind and number of a GPU.
    stream : int
        Address of the stream on which the array is used; 0 for host memory.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    owner: Any
    device: str = "cpu"
    stream: int = 0

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Size of the data, in bytes."""
        return self.count * self.item_bytes
