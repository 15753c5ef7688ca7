"""Memory for the pieces of calls on GPU arrays: two pieces, each with an input and an output.

It lies in page-locked host memory, or on the GPU if MPI can read and write it there. Either way the
user's arrays are only copied on their streams. MPI, which may keep requests after an abort, only
has addresses of this memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.direct.inner import Inner
from gpucoll.backends.direct.pinned import Slots
from gpucoll.backends.protocol import PreparedCall, Request
from gpucoll.devices import Device
from gpucoll.errors import GpucollError

GPU_SLOT_BYTES = 8 << 20
"""Size of one direction of a piece on the GPU: links need larger messages than host memory."""


class GpuMemory:
    """GPU memory with the interface of `Slots`, which is for host memory."""

    is_shared = True

    def __init__(self, device: Device, size_bytes: int) -> None:
        self._device = device
        self.address = self.on_gpu = device.allocate(size_bytes)

    def close(self) -> None:
        """Free it; nothing uses it."""
        if self.address:
            self._device.free(self.address)
        self.address = 0


class PieceSlots:
    """The slots that hold the pieces of one kind of call while they are moved.

    Parameters
    ----------
    memory : Slots or GpuMemory
        Memory of four slots.
    slot_bytes : int
        Size of a slot.
    prepare : callable
        Prepares the host's part of a piece, as the host backend does.
    around : callable
        Returns a context in which the calling thread does the host's part.
    after : callable
        Called after the host's part, within that context.
    """

    def __init__(
        self,
        memory: Slots | GpuMemory,
        slot_bytes: int,
        prepare: Callable[[Request], PreparedCall],
        around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._memory = memory
        self.slot_bytes = slot_bytes
        self.prepare = prepare
        self.around = around
        self.after = after

    def for_host(self, number: int) -> tuple[int, int]:
        """Return the addresses that the host's part of piece `number` reads and writes."""
        start = self._memory.address + number % 2 * 2 * self.slot_bytes
        return start, start + self.slot_bytes

    def on_gpu(self, number: int, direction: int) -> int:
        """Return the GPU's address of what a piece reads (`direction` 0) or writes (1)."""
        return self._memory.on_gpu + (number % 2 * 2 + direction) * self.slot_bytes

    @property
    def is_shared(self) -> bool:
        """Whether the host's part needs no copy of its own."""
        return self._memory.is_shared

    def close(self) -> None:
        """Free the memory; nothing uses it."""
        self._memory.close()


def in_host_memory(device: Device, inner: Inner, slot_bytes: int) -> PieceSlots:
    """Return slots in host memory, for the host backend."""
    memory = Slots(device, inner.backend, 4 * slot_bytes)
    return PieceSlots(memory, slot_bytes, inner.backend.prepare)


def on_gpu(device: Device, inner: Inner, slot_bytes: int, *, spans_hosts: bool) -> PieceSlots:
    """Return slots in GPU memory of the kind that MPI was tried with; MemoryError if there is none.

    The device is current in the thread that calls MPI, because MPIs use the current device. `after`
    makes data that NICs have written visible to the stream, on which everything is enqueued
    already.
    """

    def there(buffer: Buffer | None) -> Buffer | None:
        return buffer and replace(buffer, device=device.label)

    def prepare(request: Request) -> PreparedCall:
        source, out = there(request.source), there(request.destination)
        return inner.backend.prepare(request._replace(source=source, destination=out))

    memory, after = GpuMemory(device, 4 * slot_bytes), device.flush_remote_writes
    if not spans_hosts:
        return PieceSlots(memory, slot_bytes, prepare, lambda: device)
    return PieceSlots(memory, slot_bytes, prepare, lambda: device, after)


def allocated_on_gpu(
    device: Device, inner: Inner, slot_bytes: int, *, spans_hosts: bool
) -> tuple[PieceSlots | None, str]:
    """Return slots in GPU memory, or None and the reason."""
    if spans_hosts and device.remote_writes_problem:
        return None, device.remote_writes_problem
    try:
        return on_gpu(device, inner, slot_bytes, spans_hosts=spans_hosts), ""
    except (MemoryError, GpucollError) as error:
        return None, str(error)
