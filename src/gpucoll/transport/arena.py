"""A rank's arena: shared memory from which arrays are given out that peers can reach directly.

One per process, sparse: its size is address space, memory is taken as it is touched. Every peer on
the host maps it once. Book-keeping is private; memory of freed arrays is kept for the next ones up
to a cap and goes back to the system beyond that.
"""

from __future__ import annotations

import bisect
import math
import os
import threading
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll import config
from gpucoll.transport import shared_memory

ALIGNMENT_BYTES = 256
KEPT_BYTES = 256 << 20
"""Memory of freed arrays that is kept, at most, for the next ones."""


class _Block:
    """A piece of the arena; NumPy arrays made of it keep it alive, its end frees the memory."""

    def __init__(self, arena: Arena, offset: int, size_bytes: int, shape: tuple[int, ...]) -> None:
        self._arena = arena
        self._place = (offset, size_bytes, arena.generation)
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": shape,
            "data": (arena.mapping.address + offset, False),
        }

    def __del__(self) -> None:
        self._arena.free(*self._place)


class Arena:
    """First-fit allocator over one sparse shared memory.

    Parameters
    ----------
    size_bytes : int
        Address space; more than this cannot be given out at one time.
    """

    def __init__(self, size_bytes: int) -> None:
        self.fd = shared_memory.create("gpucoll-arena", size_bytes, reserve=False)
        self.mapping = shared_memory.Mapping(self.fd, size_bytes, "the arena")
        self.size_bytes = size_bytes
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._freed: deque[tuple[int, int]] = deque()
        self._holes: list[tuple[int, int]] = [(0, size_bytes)]  # (offset, size), by offset
        self._kept_bytes = 0
        self.used_bytes = 0
        self.generation = 0

    def retire(self) -> None:
        """Never use again what is given out now: a communicator broke in the middle of a call.

        A stopped peer may go on and write to memory that it was told of before. Arrays stay valid;
        the address space of freed ones is not given out a second time.
        """
        self.generation += 1

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return a new array in the arena, with undefined values.

        Raises
        ------
        MemoryError
            The arena has no free piece of this size.
        """
        size_bytes = math.prod(shape) * dtype.itemsize
        taken = max(-(-size_bytes // ALIGNMENT_BYTES), 1) * ALIGNMENT_BYTES
        offset = self._take(taken)
        block = _Block(self, offset, taken, (size_bytes,))
        return np.asarray(block).view(dtype).reshape(shape)

    def _take(self, size_bytes: int) -> int:
        with self._lock:
            self._settle()
            for place, (offset, hole_bytes) in enumerate(self._holes):
                if hole_bytes >= size_bytes:
                    if hole_bytes == size_bytes:
                        del self._holes[place]
                    else:
                        self._holes[place] = (offset + size_bytes, hole_bytes - size_bytes)
                    self.used_bytes += size_bytes
                    self._kept_bytes = max(0, self._kept_bytes - size_bytes)
                    return offset
        raise MemoryError(
            f"the arena has no {size_bytes} bytes in one piece: {self.used_bytes} of "
            f"{self.size_bytes} are in use. Free arrays, or set {config.ARENA_BYTES}"
        )

    def free(self, offset: int, size_bytes: int, generation: int = 0) -> None:
        """Take a piece back. Safe from any thread, from a finaliser, and in a forked child."""
        if os.getpid() != self._owner or generation != self.generation:
            return  # the parent's memory, in use there; or retired
        self._freed.append((offset, size_bytes))
        if self._lock.acquire(blocking=False):  # else whoever holds it settles next time
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._freed:
            offset, size_bytes = self._freed.popleft()
            self.used_bytes -= size_bytes
            self._kept_bytes += size_bytes
            if self._kept_bytes > KEPT_BYTES:
                self.mapping.give_back(offset, size_bytes)
                self._kept_bytes -= size_bytes
            self._insert_hole(offset, size_bytes)

    def _insert_hole(self, offset: int, size_bytes: int) -> None:
        place = bisect.bisect(self._holes, (offset, size_bytes))
        if place < len(self._holes) and offset + size_bytes == self._holes[place][0]:
            size_bytes += self._holes.pop(place)[1]
        if place > 0 and sum(self._holes[place - 1]) == offset:
            offset, before_bytes = self._holes.pop(place - 1)
            size_bytes += before_bytes
            place -= 1
        self._holes.insert(place, (offset, size_bytes))


_process_arena: Arena | None = None
_process_lock = threading.Lock()


def process_arena() -> Arena:
    """Return this process's arena, made on first use; a forked child gets one of its own."""
    global _process_arena
    with _process_lock:
        if _process_arena is None:
            _process_arena = Arena(config.arena_bytes())
        return _process_arena


def _forget_in_child() -> None:
    global _process_arena, _process_lock
    _process_arena = None
    _process_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
