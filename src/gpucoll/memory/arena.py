"""A rank's arena: shared memory for arrays that peers can reach directly.

Each process has one. It is sparse: its size is address space, and memory is used only when it is
touched. Every peer on the host maps it once. Memory of freed arrays is kept for later ones up to a
limit; beyond that it is returned to the system.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll import config
from gpucoll.memory import heap
from gpucoll.memory.heap import GRANULE_BYTES, Heap
from gpucoll.memory.numpy_memory import MemoryHandler, keep_for_ever
from gpucoll.transport.shared import mapping

ALIGNMENT_BYTES = GRANULE_BYTES
KEPT_BYTES = 256 << 20
"""Limit of the memory of freed arrays that is kept for later ones."""
_SMALLER = f", set {config.ARENA_BYTES} to less"
SMALL_BYTES = 1024
"""`Arena.shared_arrays` leaves smaller arrays to ``malloc``. No call would use them in place, and
``malloc`` is faster: 12 ns against 75 to allocate and free (60 if larger, beyond its cache)."""

_heaps: list[Heap] = []


class Arena:
    """One sparse shared memory, and the allocator of arrays in it.

    The arrays are ordinary ones that own their memory. They may be sliced, reshaped, resized and
    freed in any order, from any thread, even after every communicator and while the interpreter
    ends.

    A forked child sees its parent's arrays, as the same memory. Freeing them in the child does
    nothing, and it makes no arrays in the parent's arena: `process_arena` gives it its own.

    Parameters
    ----------
    size_bytes : int
        Size of the address space, which limits the total size of live arrays.
    kept_bytes : int
        Limit of the memory of freed arrays that is kept.
    """

    def __init__(self, size_bytes: int, kept_bytes: int = KEPT_BYTES) -> None:
        size_bytes = size_bytes // GRANULE_BYTES * GRANULE_BYTES
        self.fd = mapping.create("gpucoll-arena", size_bytes)
        self.mapping = mapping.Mapping(self.fd, size_bytes, "the arena", _SMALLER)
        self.size_bytes = size_bytes
        self._records = _records(size_bytes)
        self._heap = Heap.new()
        self._heap.base = self.mapping.address
        self._heap.memory_bytes = size_bytes
        self._heap.records = self._records.address
        self._heap.generation = 1
        self._heap.keep_at_most = kept_bytes // GRANULE_BYTES
        self._heap.take, self._heap.give = heap.take.address, heap.give.address
        for place in range(heap.N_LISTS):
            self._heap.lists[place] = heap.NONE
        heap.begin.ctypes(self._heap.address)
        keep_for_ever((self._heap, heap.take, heap.give))
        _heaps.append(self._heap)

    # --- arrays ----------------------------------------------------------------------------------

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return a new array in the arena, with undefined values.

        Raises
        ------
        MemoryError
            The arena has no free piece of this size.
        """
        try:
            made: npt.NDArray[Any] = self._strict.make(shape, dtype)
            return made
        except MemoryError:
            raise MemoryError(self._full(math.prod(shape) * dtype.itemsize)) from None

    def shared_arrays(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which every NumPy array of at least `SMALL_BYTES` is made here.

        It affects this thread. Arrays without room here are made in ordinary memory
        (`Communicator.shared_arrays`).
        """
        return self._lenient.current()

    @functools.cached_property
    def _strict(self) -> MemoryHandler:
        return MemoryHandler("gpucoll_arena", self._heap, from_bytes=0, falls_back=False)

    @functools.cached_property
    def _lenient(self) -> MemoryHandler:
        return MemoryHandler("gpucoll_shared", self._heap, from_bytes=SMALL_BYTES, falls_back=True)

    def _full(self, size_bytes: int) -> str:
        if self._heap.is_forked:
            return "this process was forked: the arena belongs to its parent"
        retired = f", {self.retired_bytes} are retired" if self.retired_bytes else ""
        return (
            f"the arena has no {size_bytes} bytes in one piece: {self.used_bytes} of "
            f"{self.size_bytes} are in use by {self._heap.blocks} arrays{retired}. "
            f"Free arrays, or set {config.ARENA_BYTES}"
        )

    # --- state -----------------------------------------------------------------------------------

    def retire(self) -> None:
        """Never reuse memory that is allocated now: a communicator broke in the middle of a call.

        A stopped peer may resume and write to memory that it was told about. Arrays stay valid.
        When they are freed, their memory is returned to the system, and their addresses are not
        used again.
        """
        self._heap.generation += 1

    @property
    def used_bytes(self) -> int:
        """Number of bytes in live arrays."""
        return self._heap.used * GRANULE_BYTES

    @property
    def kept_bytes(self) -> int:
        """Number of freed bytes that may have been touched and that the system has not got back."""
        return self._heap.kept * GRANULE_BYTES

    @property
    def retired_bytes(self) -> int:
        """Number of bytes in freed arrays whose addresses are not used again."""
        return self._heap.retired * GRANULE_BYTES


def _records(size_bytes: int) -> mapping.Mapping:
    """Return the memory for the allocator's records, as sparse as the arena but never shared.

    Anonymous memory of this size would count as used if the system does not overcommit.
    """
    records_bytes = (size_bytes // GRANULE_BYTES + 1) * heap.Record.n_bytes
    fd = mapping.create("gpucoll-arena-records", records_bytes)
    try:
        return mapping.Mapping(fd, records_bytes, "the arena's records", _SMALLER)
    finally:
        os.close(fd)


_process_arena: Arena | None = None
_process_lock = threading.Lock()


def process_arena() -> Arena:
    """Return this process's arena, made on first use. A forked child gets its own."""
    global _process_arena
    with _process_lock:
        if _process_arena is None:
            _process_arena = Arena(config.arena_bytes())
        return _process_arena


def _forget_in_child() -> None:
    global _process_arena, _process_lock
    for heap_of_parent in _heaps:
        heap_of_parent.is_forked = 1
    _process_arena = None
    _process_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
