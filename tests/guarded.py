"""Arrays at any address, with neighbours that must not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

GUARD_BYTES = 256
GUARD = 0xA5
POISON = 0x5A


class Guarded:
    """An array that begins `offset` bytes after a 64-byte boundary, between two guards.

    Parameters
    ----------
    shape, dtype
        Of the array.
    offset : int
        Where it begins, in bytes; need not be aligned.
    allocate : callable
        Makes the memory: bytes -> an array of uint8.
    """

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: Any,
        offset: int = 0,
        allocate: Callable[[int], np.ndarray] = lambda count: np.empty(count, np.uint8),
    ) -> None:
        size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._memory = allocate(size_bytes + 2 * GUARD_BYTES + 64 + offset)
        self._memory[:] = GUARD
        aligned = -self._memory.ctypes.data % 64
        self._start = aligned + GUARD_BYTES + offset
        self._stop = self._start + size_bytes
        self.array = self._memory[self._start : self._stop].view(dtype).reshape(shape)
        self.poison()

    def poison(self) -> None:
        """Fill the array with bytes that no result has by chance."""
        self._memory[self._start : self._stop] = POISON

    def check(self, where: object = "") -> None:
        """Raise where a neighbour has changed."""
        before, after = self._memory[: self._start], self._memory[self._stop :]
        for name, guard in (("before", before), ("after", after)):
            if changed := int(np.count_nonzero(guard != GUARD)):
                raise AssertionError(f"{where}: {changed} bytes {name} the array were written")
