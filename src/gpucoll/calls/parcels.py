"""Python objects as bytes to be moved: pickled, with large buffers left in place.

An object becomes parts: its pickle (protocol 5), and the buffers that are not copied into it, such
as the memory of contiguous arrays. Small parts travel together, in a tail. Each large part travels
by itself, directly from the sender's memory to memory that is allocated for it on the receiver.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.arrays.buffer import Buffer
from gpucoll.calls.given import AnyObject

LARGE_BYTES = 64 << 10
"""Parts of at least this size travel by themselves, and are read in place."""
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


def pickled(value: object) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickle an object; return the pickle and the buffers that are left out of it.

    Exceptions come from the object's own code.
    """
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers


def pack(value: object) -> Parcel:
    """Pickle an object, and return it as parts."""
    return parcel_of(*pickled(value))


def parcel_of(data: bytes, buffers: list[pickle.PickleBuffer]) -> Parcel:
    """Return a pickled object as parts."""
    if not buffers and len(data) < LARGE_BYTES:
        return Parcel(1, len(data).to_bytes(_SIZE_BYTES, "little") + data, [])
    parts: list[Any] = [data, *[buffer.raw() for buffer in buffers]]
    sizes = np.array([len(part) for part in parts], np.int64)
    small = [part for part in parts if len(part) < LARGE_BYTES]
    large = [np.frombuffer(part, np.uint8) for part in parts if len(part) >= LARGE_BYTES]
    return Parcel(len(parts), b"".join([sizes.tobytes(), *small]), large)


@dataclass
class Arrival:
    """One object on its way in. `tail` comes first; then `large` is allocated and filled."""

    n_parts: int
    tail: Any = b""
    large: list[Bytes] = field(default_factory=list)

    def make_room(self) -> None:
        """Allocate memory for the large parts, whose sizes are in the tail."""
        sizes = self._sizes()
        self.large = [np.empty(size, np.uint8) for size in sizes[sizes >= LARGE_BYTES]]

    def _sizes(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.tail, np.int64, self.n_parts)

    def unpack(self) -> AnyObject:
        """Return the object."""
        if self.n_parts == 1 and not self.large:
            return pickle.loads(memoryview(self.tail)[_SIZE_BYTES:])
        large, start = iter(self.large), _SIZE_BYTES * self.n_parts
        parts: list[memoryview] = []
        for size in self._sizes().tolist():
            if size >= LARGE_BYTES:
                part: Any = next(large)
                parts.append(memoryview(part))
            else:  # memory of its own, aligned, because an array may use it
                parts.append(memoryview(bytearray(memoryview(self.tail)[start : start + size])))
                start += size
        return pickle.loads(parts[0], buffers=parts[1:])


def buffer_of(data: Bytes | bytes) -> Buffer:
    """Return bytes of any kind as a buffer."""
    array = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    return Buffer(array.ctypes.data, array.shape, "uint8", 1, array)
