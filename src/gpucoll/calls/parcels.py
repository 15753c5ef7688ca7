"""Python objects as bytes to be moved: pickled, with large buffers left where they lie.

An object becomes parts: its pickle (protocol 5), and what that leaves out, such as the memory of
contiguous arrays. Small parts travel together, in a tail; each large one by itself, straight from
the memory of whoever has it to memory that is made for it where it goes.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.arrays.buffer import Buffer

LARGE_BYTES = 64 << 10
"""A part of so many bytes travels by itself: from there on it is read where it lies."""
_SIZE_BYTES = 8

Bytes = npt.NDArray[np.uint8]


@dataclass
class Parcel:
    """One object on its way out.

    Attributes
    ----------
    n_parts : int
    tail : bytes
        The sizes of all parts, then the small ones.
    large : list of array
        The large parts.
    """

    n_parts: int
    tail: bytes
    large: list[Bytes]


NOTHING = Parcel(0, b"", [])


def pack(value: object) -> Parcel:
    """Pickle an object. Whatever that raises is the object's own."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    if not buffers and len(data) < LARGE_BYTES:
        return Parcel(1, len(data).to_bytes(_SIZE_BYTES, "little") + data, [])
    parts: list[Any] = [data, *[buffer.raw() for buffer in buffers]]
    sizes = np.array([len(part) for part in parts], np.int64)
    small = [part for part in parts if len(part) < LARGE_BYTES]
    large = [np.frombuffer(part, np.uint8) for part in parts if len(part) >= LARGE_BYTES]
    return Parcel(len(parts), b"".join([sizes.tobytes(), *small]), large)


@dataclass
class Arrival:
    """One object on its way in: `tail` first, then `large` are made and filled."""

    n_parts: int
    tail: Any = b""
    large: list[Bytes] = field(default_factory=list)

    def make_room(self) -> None:
        """Make memory for the large parts, whose sizes are in the tail."""
        sizes = self._sizes()
        self.large = [np.empty(size, np.uint8) for size in sizes[sizes >= LARGE_BYTES]]

    def _sizes(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.tail, np.int64, self.n_parts)

    def unpack(self) -> Any:
        """Return the object."""
        if self.n_parts == 1 and not self.large:
            return pickle.loads(memoryview(self.tail)[_SIZE_BYTES:])
        large, start = iter(self.large), _SIZE_BYTES * self.n_parts
        parts: list[memoryview] = []
        for size in self._sizes().tolist():
            if size >= LARGE_BYTES:
                part: Any = next(large)
                parts.append(memoryview(part))
            else:  # memory of its own, aligned: an array may be made of it
                parts.append(memoryview(bytearray(memoryview(self.tail)[start : start + size])))
                start += size
        return pickle.loads(parts[0], buffers=parts[1:])


def buffer_of(data: Any) -> Buffer:
    """Return bytes, of whatever kind, as a buffer."""
    array = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    return Buffer(array.ctypes.data, array.shape, "uint8", 1, array)
