"""Host memory that GPU and host both see: slots for pieces of arrays, and words.

The GPU writes a word when the work before it on a stream is done, and streams wait for words that
the host writes. The GPU accesses 32 bits of a word; the host accesses 64, of which the upper half
stays 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpucoll.backends.protocol import HostBackend
from gpucoll.devices import Device
from gpucoll.errors import BackendError
from gpucoll.transport.shared import ordering

PAGE_BYTES = 4096
WORD_BYTES = 8
LAST = 2**31 - 1
"""A value above all that a stream waits for."""


class Slots:
    """Page-locked memory; if the driver permits it, an array that the CPU backend allocated.

    Parameters
    ----------
    device : Device
        The device whose copies use the memory.
    backend : HostBackend
        Moves the data; it needs no copy of its own if it allocated the memory.
    size_bytes : int
        The size.
    """

    def __init__(self, device: Device, backend: HostBackend | None, size_bytes: int) -> None:
        self._device = device
        self.size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        self._owner: Any = None
        if backend is not None and self._register(backend):
            return
        self.address = self.on_gpu = device.allocate_pinned(self.size_bytes)
        """The address for the host, and the address for the GPU."""

    def _register(self, backend: HostBackend) -> bool:
        try:
            owner = backend.empty((self.size_bytes + PAGE_BYTES,), np.uint8)
        except MemoryError:
            return False
        self.address = -(-owner.ctypes.data // PAGE_BYTES) * PAGE_BYTES
        try:
            self.on_gpu = self._device.register_host(self.address, self.size_bytes)
        except BackendError:  # limits on locked memory may not apply to the driver's own
            return False
        self._owner = owner
        return True

    @property
    def is_shared(self) -> bool:
        """Whether the CPU backend moves the data without a copy of its own."""
        return self._owner is not None

    def close(self) -> None:
        """Free it; neither the GPU nor the host uses it."""
        if self._owner is not None:
            self._device.unregister_host(self.address)
            self._owner = None
        elif self.address:
            self._device.free_pinned(self.address)
        self.address = 0


class Words:
    """Words in page-locked memory, initially 0.

    Parameters
    ----------
    device : Device
        The device whose streams write them and wait for them.
    """

    def __init__(self, device: Device) -> None:
        self._slots = Slots(device, None, PAGE_BYTES)
        self.address = self._slots.address
        for place in range(self.count):
            self.store(self.address + WORD_BYTES * place, 0)

    count = PAGE_BYTES // WORD_BYTES

    def load(self, address: int) -> int:
        """Return a word. Later loads return values at least as new."""
        return ordering.load(address)

    def store(self, address: int, value: int) -> None:
        """Write a word, after all earlier stores."""
        ordering.store(address, value)

    def close(self) -> None:
        """Free the memory; no stream waits any more."""
        self._slots.close()
