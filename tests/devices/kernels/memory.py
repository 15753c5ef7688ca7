"""Arrays in a device's memory, between guards, for tests of kernels in a rank with doubles."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes  # noqa: F401  (makes np.dtype("bfloat16") known)
import numpy as np
from tests.guarded import GUARD, POISON

from gpucoll.arrays.buffer import Buffer

GUARD_BYTES = 256


class Memory:
    """A device with a stream; what it gives lives until `close`."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.stream = device.create_stream()
        self._addresses: list[int] = []

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        for address in self._addresses:
            self.device.free(address)
        self.device.destroy_stream(self.stream)

    def wait(self) -> None:
        with self.device:
            self.device.synchronize_stream(self.stream)

    def array(self, content: np.ndarray, offset: int = 0) -> Array:
        """Return a copy of an array, `offset` bytes behind a multiple of 256."""
        address = self.device.allocate(content.nbytes + offset + 2 * GUARD_BYTES)
        self._addresses.append(address)
        return Array(self, address, content, offset)

    def empty(self, count: int, dtype: str, offset: int = 0) -> Array:
        content = np.full(count * np.dtype(dtype).itemsize, POISON, np.uint8).view(dtype)
        return self.array(content, offset)


class Array:
    """An array of the device; `buffer` is what kernels take."""

    def __init__(self, memory: Memory, address: int, content: np.ndarray, offset: int) -> None:
        kind: Any = ctypes.c_char * (content.nbytes + offset + 2 * GUARD_BYTES)
        self._whole = np.frombuffer(kind.from_address(address), np.uint8)
        self._whole[:] = GUARD
        start = GUARD_BYTES + offset
        self._place = slice(start, start + content.nbytes)
        self._whole[self._place] = np.frombuffer(content.tobytes(), np.uint8)
        self._dtype = content.dtype
        shape, name, item_bytes = (content.size,), content.dtype.name, content.dtype.itemsize
        label = memory.device.label
        self.buffer = Buffer(address + start, shape, name, item_bytes, None, label, memory.stream)

    def now(self) -> np.ndarray:
        """Return a copy of the content as it is."""
        return self._whole[self._place].copy().view(self._dtype)

    def read(self) -> np.ndarray:
        """Return the content, after a look at the guards."""
        around = np.concatenate([self._whole[: self._place.start], self._whole[self._place.stop :]])
        assert (around == GUARD).all(), "bytes beside the array were written"
        return self.now()
