"""Host memory that a GPU and the host both see: slots for pieces of arrays, and words.

The GPU writes a word when what is before it on a stream is done, and streams wait for words that
the host writes. A word is 32 bits for the GPU; the host takes 64, of which the upper half stays 0.
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
"""More than any value that a stream waits for."""


class Slots:
    """Page-locked memory, in an array of the CPU backend's where the driver takes that.

    Parameters
    ----------
    device : Device
        Whose copies go there.
    backend : HostBackend
        Moves what lies there, without a copy of its own where it gave the memory.
    size_bytes : int
        How much.
    """

    def __init__(self, device: Device, backend: HostBackend | None, size_bytes: int) -> None:
        self._device = device
        self.size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        self._owner: Any = None
        if backend is not None and self._register(backend):
            return
        self.address = self.on_gpu = device.allocate_pinned(self.size_bytes)
        """Where the host sees it, and where the GPU does."""

    def _register(self, backend: HostBackend) -> bool:
        try:
            owner = backend.empty((self.size_bytes + PAGE_BYTES,), np.uint8)
        except MemoryError:
            return False
        self.address = -(-owner.ctypes.data // PAGE_BYTES) * PAGE_BYTES
        try:
            self.on_gpu = self._device.register_host(self.address, self.size_bytes)
        except BackendError:  # limits of locked memory: the driver's own may be under none
            return False
        self._owner = owner
        return True

    @property
    def is_shared(self) -> bool:
        """Whether the CPU backend moves what lies there without a copy of its own."""
        return self._owner is not None

    def close(self) -> None:
        """Give it back; neither the GPU nor the host uses it."""
        if self._owner is not None:
            self._device.unregister_host(self.address)
            self._owner = None
        elif self.address:
            self._device.free_pinned(self.address)
        self.address = 0


class Words:
    """Words in page-locked memory, all 0 at first.

    Parameters
    ----------
    device : Device
        Whose streams write them and wait for them.
    """

    def __init__(self, device: Device) -> None:
        self._slots = Slots(device, None, PAGE_BYTES)
        self.address = self._slots.address
        for place in range(self.count):
            self.store(self.address + WORD_BYTES * place, 0)

    count = PAGE_BYTES // WORD_BYTES

    def load(self, address: int) -> int:
        """Return a word. What is loaded afterwards is as new as it."""
        return ordering.load(address)

    def store(self, address: int, value: int) -> None:
        """Write a word, behind all that was stored before."""
        ordering.store(address, value)

    def close(self) -> None:
        """Give the memory back; no stream waits any more."""
        self._slots.close()
