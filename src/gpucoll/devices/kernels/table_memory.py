"""Small tables that kernels read: copied to a device in a stream's order, in memory used again."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy.typing as npt

from gpucoll.devices.device import Device

__all__ = ["Table", "TableMemory"]

_LEAST_BYTES = 4096
_MOST_UNUSED_BYTES = 8 << 20
_FIRST_CREATED_STREAM = 3
"""Smaller numbers stand for default streams; the legacy one can neither be captured nor asked."""

_Unused = dict[tuple[int, int], deque[int]]


class Table:
    """A table on a device: lets go of its memory when nobody refers to it any more.

    Whoever has launched a kernel that reads it keeps it until that is done, and as long as there is
    a graph with such a kernel: until then the copy to it may not have been made, too.
    """

    def __init__(self, address: int, host: npt.NDArray[Any], unused: deque[int]) -> None:
        self.address = address
        self._host = host  # the driver may read it after the copy was enqueued
        self._unused = unused

    def __del__(self) -> None:
        self._unused.append(self.address)  # no lock: this may run anywhere


class TableMemory:
    """The memory of one device's tables.

    A table's memory serves later tables of the same stream. Only what is more than 8 MiB unused is
    given back to the driver, when a table needs new memory.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._unused: _Unused = {}
        self._own_stream = 0

    def upload(self, table: npt.NDArray[Any], stream: int) -> Table:
        """Return a copy of a table on the device, there for what is on the stream from now on.

        While a graph is captured from the stream the copy is made at once, beside the graph.
        """
        device, host = self._device, table.copy()
        size = _LEAST_BYTES
        while size < host.nbytes:
            size *= 2
        with device, device.relaxed_capture():
            captured = stream >= _FIRST_CREATED_STREAM and device.is_capturing(stream)
            if captured:
                stream = self._stream()
            unused = self._unused.setdefault((stream, size), deque())
            made = Table(self._memory(size, unused), host, unused)
            device.copy(made.address, host.ctypes.data, host.nbytes, stream)
            if captured:
                device.synchronize_stream(stream)
        return made

    def _memory(self, size: int, unused: deque[int]) -> int:
        try:
            return unused.pop()
        except IndexError:
            self._give_back()
            return self._device.allocate(size)

    def _give_back(self) -> None:
        """Free what is unused beyond the limit; the driver waits for what may still use it."""
        total = sum(size * len(kept) for (_, size), kept in [*self._unused.items()])
        for (_, size), kept in [*self._unused.items()]:
            while total > _MOST_UNUSED_BYTES and kept:
                self._device.free(kept.popleft())
                total -= size

    def _stream(self) -> int:
        if not self._own_stream:
            self._own_stream = self._device.create_stream()
        return self._own_stream
