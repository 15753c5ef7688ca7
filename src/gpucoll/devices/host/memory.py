"""Memory of Host devices: an arena of shared memory for each, and other memory for streams.

The arena is a file without a name. Other processes map it through ``/proc/<pid>/fd``, and it
disappears with the last of them, however they end.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import struct
import threading
from collections import deque
from typing import NamedTuple

import numpy as np

from gpucoll.errors import BackendError

ALIGNMENT_BYTES = 512
"""Alignment of every allocation, as in the vendors' drivers."""
_GIVE_BACK_BYTES = 1 << 20
"""Freed memory of at least this size is returned to the system immediately."""
_HANDLE = struct.Struct("<8sQQQQ")
_MAGIC = b"gpucoll1"


def address_of(mapping: mmap.mmap) -> int:
    """Return the address of a mapping."""
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


class Ranges:
    """Ranges of addresses that do not overlap, with their sizes; finds the range of an address."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._starts: list[int] = []

    def add(self, start: int, size_bytes: int) -> None:
        """Add a range."""
        bisect.insort(self._starts, start)
        self.sizes[start] = size_bytes

    def remove(self, start: int) -> int | None:
        """Remove the range that begins at `start`; return its size, or None if there is none."""
        if start not in self.sizes:
            return None
        del self._starts[bisect.bisect_left(self._starts, start)]
        return self.sizes.pop(start)

    def start_of(self, address: int) -> int | None:
        """Return the start of the range that contains an address, or None."""
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        start = self._starts[place]
        return start if address < start + self.sizes[start] else None

    def overlaps(self, start: int, size_bytes: int) -> bool:
        """Return whether a part of it is in any range."""
        place = bisect.bisect_left(self._starts, start)
        follows = place < len(self._starts) and self._starts[place] < start + size_bytes
        return follows or self.start_of(start) is not None


class Arena:
    """The memory of one device in this process.

    Attributes
    ----------
    address, size_bytes : int
        Its address, and its size. Pages that were never touched take no memory.
    """

    def __init__(self, number: int, size_bytes: int) -> None:
        self.size_bytes = max(size_bytes // mmap.PAGESIZE, 1) * mmap.PAGESIZE
        self.file = os.memfd_create(f"gpucoll-host-{number}", os.MFD_CLOEXEC)
        os.ftruncate(self.file, self.size_bytes)
        self._mapping = mmap.mmap(self.file, self.size_bytes)
        self.address = address_of(self._mapping)
        self.used = Ranges()
        self._free = Ranges()
        self._free.add(self.address, self.size_bytes)
        self._free_bytes = self.size_bytes
        self._lock = threading.Lock()
        self.left: deque[int] = deque()
        """Memory that finalizers, which must not take the lock, have given back."""

    @property
    def free_bytes(self) -> int:
        """Size of the memory that is not allocated."""
        self._collect()
        return self._free_bytes

    def _collect(self) -> None:
        """Take back the memory that finalizers have left."""
        with contextlib.suppress(IndexError):
            while True:
                self.give(self.left.popleft())

    def take(self, size_bytes: int) -> int | None:
        """Return new memory, from the first gap that is large enough; None if there is none."""
        self._collect()
        size_bytes = -(-max(size_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        with self._lock:
            for start, free in sorted(self._free.sizes.items()):
                if free >= size_bytes:
                    self._free.remove(start)
                    if free > size_bytes:
                        self._free.add(start + size_bytes, free - size_bytes)
                    self.used.add(start, size_bytes)
                    self._free_bytes -= size_bytes
                    return start
        return None

    def give(self, start: int) -> bool:
        """Take memory back; return whether it had been allocated."""
        with self._lock:
            size_bytes = self.used.remove(start)
            if size_bytes is None:
                return False
            self._free_bytes += size_bytes
            self._discard(start, size_bytes)
            after = self._free.remove(start + size_bytes)
            before = self._free.start_of(start - 1)
            if before is not None:
                size_bytes += self._free.remove(before) or 0
                start = before
            self._free.add(start, size_bytes + (after or 0))
        return True

    def _discard(self, start: int, size_bytes: int) -> None:
        first = -(-(start - self.address) // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (start + size_bytes - self.address) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop - first >= _GIVE_BACK_BYTES:
            with contextlib.suppress(OSError):  # a kernel without holes keeps it
                self._mapping.madvise(mmap.MADV_REMOVE, first, stop - first)

    def handle(self) -> bytes:
        """Return the handle with which another process of this host maps the arena."""
        inode = os.fstat(self.file).st_ino
        return _HANDLE.pack(_MAGIC, os.getpid(), self.file, inode, self.size_bytes)


class _Opened(NamedTuple):
    mapping: mmap.mmap
    base: int
    uses: list[int]


class OpenedArenas:
    """Arenas of other processes that are mapped here; each is mapped once, however often opened."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], _Opened] = {}
        self.ranges = Ranges()
        self._lock = threading.Lock()

    def open(self, handle: bytes) -> int:
        """Map an arena; return its address."""
        try:
            magic, process, file, inode, size_bytes = _HANDLE.unpack(handle)
        except struct.error:
            magic = process = file = inode = size_bytes = 0
        if magic != _MAGIC:
            raise BackendError("host: cannot open memory: this is no handle of export_memory")
        if process == os.getpid():
            raise BackendError(
                "host: cannot open memory: this very process has exported it; use its address"
            )
        with self._lock:
            known = self._known.get((process, inode))
            if known is None:
                known = self._map(process, file, inode, size_bytes)
            known.uses[0] += 1
            return known.base

    def _map(self, process: int, file: int, inode: int, size_bytes: int) -> _Opened:
        try:
            opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise BackendError(
                f"host: cannot open memory of process {process}: {error.strerror}: it has ended, "
                "or is another user's, or in another PID namespace"
            ) from None
        try:
            if os.fstat(opened).st_ino != inode:
                raise BackendError(f"host: cannot open memory: process {process} has ended")
            mapping = mmap.mmap(opened, size_bytes)
        finally:
            os.close(opened)
        made = _Opened(mapping, address_of(mapping), [0])
        self._known[process, inode] = made
        self.ranges.add(made.base, size_bytes)
        return made

    def close(self, base: int) -> None:
        """Close an arena; the last close unmaps it."""
        with self._lock:
            for key, opened in self._known.items():
                if opened.base == base:
                    opened.uses[0] -= 1
                    if not opened.uses[0]:
                        del self._known[key]
                        self.ranges.remove(base)
                        opened.mapping.close()
                    return
        raise BackendError(f"host: cannot close memory: none was opened at {base:#x}")
