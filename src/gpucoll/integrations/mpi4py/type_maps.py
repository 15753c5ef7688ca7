"""The layout of datatypes: runs of bytes, and how to pack and unpack them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TypeMap:
    """The data of one item of a datatype, relative to the item's start.

    Attributes
    ----------
    runs : array of (offset, length)
        In bytes, in packing order.
    element : dtype or None
        The type of all elements; None if there are several types.
    lb, extent : int
        The lower bound, and the distance to the next item, in bytes.
    alignment : int
        The largest alignment of the elements, in bytes.
    """

    runs: Offsets
    element: np.dtype[np.generic] | None
    lb: int
    extent: int
    alignment: int = 1
    size: int = field(init=False)
    true_lb: int = field(init=False)
    true_extent: int = field(init=False)

    def __post_init__(self) -> None:
        starts, lengths = self.runs[:, 0], self.runs[:, 1]
        is_empty = not len(self.runs)
        low = 0 if is_empty else int(starts.min())
        high = 0 if is_empty else int((starts + lengths).max())
        object.__setattr__(self, "size", int(lengths.sum()))
        object.__setattr__(self, "true_lb", low)
        object.__setattr__(self, "true_extent", high - low)

    @functools.cached_property
    def is_dense(self) -> bool:
        """Whether items are adjacent, without gaps and in byte order."""
        if not len(self.runs):
            return self.extent == 0
        return len(self.runs) == 1 and self.runs[0, 0] == 0 and self.extent == self.size

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of the packed data."""
        return np.dtype(np.uint8) if self.element is None else self.element

    @property
    def n_elements(self) -> int:
        """The number of elements of `dtype` in one item."""
        return self.size // self.dtype.itemsize

    def span(self, count: int) -> tuple[int, int]:
        """Return the first and last byte offsets of `count` items."""
        if not count or not self.size:
            return 0, 0
        last = (count - 1) * self.extent
        low = self.true_lb + min(0, last)
        return low, self.true_lb + self.true_extent + max(0, last)

    def pack(self, memory: Bytes, offset: int, count: int) -> npt.NDArray[np.generic]:
        """Return the elements of `count` items from `offset` on, as a view if they are dense."""
        if self.is_dense:
            return memory[offset : offset + count * self.size].view(self.dtype)
        unit, places = self._places(offset, count)
        return _in_units(memory, unit)[places].view(np.uint8).view(self.dtype)

    def unpack(self, packed: npt.NDArray[np.generic], memory: Bytes, offset: int) -> None:
        """Write all of the packed elements to their places."""
        data = np.ascontiguousarray(packed).reshape(-1).view(np.uint8)
        if not len(data):
            return
        count = -(-len(data) // self.size)
        unit, places = self._places(offset, count)
        if len(data) % unit.itemsize:  # a message that ends inside a unit
            _, places = self._places(offset, count, np.dtype(np.uint8))
            unit = np.dtype(np.uint8)
        values = data.view(unit)
        _in_units(memory, unit)[places[: len(values)]] = values

    def _places(
        self, offset: int, count: int, unit: np.dtype[np.generic] | None = None
    ) -> tuple[np.dtype[np.generic], Offsets]:
        """Return the largest unit that divides all runs, and the place of each unit."""
        if unit is None:
            step = int(np.gcd.reduce(np.append(self.runs, (self.extent, offset))))
            unit = np.dtype(f"u{min(step & -step, 8) or 8}")
        one = _spread(self.runs // unit.itemsize)
        items = (offset + np.arange(count, dtype=np.int64) * self.extent) // unit.itemsize
        return unit, (items[:, None] + one).reshape(-1)

    def moved(self, displacements: npt.ArrayLike, blocklengths: npt.ArrayLike) -> Offsets:
        """Return the runs of blocks of items at byte displacements."""
        parts = []
        lengths = np.broadcast_to(np.asarray(blocklengths, np.int64), np.shape(displacements))
        for start, length in zip(np.asarray(displacements, np.int64), lengths, strict=True):
            if self.is_dense and length > 0:
                parts.append(np.array([[start, length * self.size]], np.int64))
                continue
            items = start + np.arange(length, dtype=np.int64) * self.extent
            runs = np.empty((length, len(self.runs), 2), np.int64)
            runs[..., 0] = items[:, None] + self.runs[:, 0]
            runs[..., 1] = self.runs[:, 1]
            parts.append(runs.reshape(-1, 2))
        return np.concatenate(parts) if parts else np.empty((0, 2), np.int64)


def basic_map(dtype: np.dtype[np.generic]) -> TypeMap:
    """Return the map of a basic type."""
    return TypeMap(np.array([[0, dtype.itemsize]]), dtype, 0, dtype.itemsize, dtype.alignment)


def merged_map(
    runs: Offsets, elements: list[np.dtype[np.generic] | None], lb: int, extent: int, alignment: int
) -> TypeMap:
    """Return a map in which adjacent runs are merged."""
    runs = runs[runs[:, 1] > 0]
    if len(runs) > 1:
        begins = np.append(True, runs[1:, 0] != runs[:-1].sum(axis=1))
        totals = np.add.reduceat(runs[:, 1], np.flatnonzero(begins))
        runs = np.stack([runs[begins, 0], totals], axis=1)
    same = elements[0] if elements and all(item == elements[0] for item in elements) else None
    return TypeMap(runs, same, lb, extent, alignment)


def _spread(runs: Offsets) -> Offsets:
    """Return every place in the runs, in order."""
    lengths = runs[:, 1]
    ends = np.cumsum(lengths)
    places = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64)
    found: Offsets = places + np.repeat(runs[:, 0] - (ends - lengths), lengths)
    return found


def _in_units(memory: Bytes, unit: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    return memory[: len(memory) // unit.itemsize * unit.itemsize].view(unit)
