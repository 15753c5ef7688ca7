"""Small tables for kernels: copied to a device in a stream's order, into reused memory."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy.typing as npt

from gpucoll.devices.device import Device

__all__ = ["Table", "TableMemory"]

_LEAST_BYTES = 4096
_MOST_UNUSED_BYTES = 8 << 20
_FIRST_CREATED_STREAM = 3
"""Smaller numbers are default streams; the legacy one can be neither captured nor queried."""

_Unused = dict[tuple[int, int], deque[int]]


class Table:
    """A table on a device, which releases its memory when nothing refers to it any more.

    Code that launches a kernel that reads the table must keep it until the kernel is done, and as
    long as a graph with such a kernel exists. Until then, even the copy to it may be pending.
    """

    def __init__(self, address: int, host: npt.NDArray[Any], unused: deque[int]) -> None:
        self.address = address
        self._host = host  # the driver may read it after the copy was enqueued
        self._unused = unused

    def __del__(self) -> None:
        self._unused.append(self.address)  # no lock: this may run anywhere


class TableMemory:
    """The memory of one device's tables.

    A table's memory is reused for later tables of the same stream. Only memory beyond 8 MiB of
    unused memory is freed, when a table needs new memory.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._unused: _Unused = {}
        self._own_stream = 0

    def upload(self, table: npt.NDArray[Any], stream: int) -> Table:
        """Return a copy of a table on the device, available to work on the stream from now on.

        While a graph is captured from the stream, the copy is made immediately and outside the
        graph.
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
        """Free unused memory beyond the limit; the driver waits for work that may still use it."""
        total = sum(size * len(kept) for (_, size), kept in [*self._unused.items()])
        for (_, size), kept in [*self._unused.items()]:
            while total > _MOST_UNUSED_BYTES and kept:
                self._device.free(kept.popleft())
                total -= size

    def _stream(self) -> int:
        if not self._own_stream:
            self._own_stream = self._device.create_stream()
        return self._own_stream
