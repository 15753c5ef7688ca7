"""A `Buffer`: what a backend needs to know of an array, whatever library it comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)  # not frozen, which would take four times as long to make
class Buffer:
    """Contiguous memory of one array.

    Attributes
    ----------
    address : int
        Of the first element.
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
        Address of the stream that the array is used on; 0 for host memory.
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
        """Count of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Size of the data, in bytes."""
        return self.count * self.item_bytes
