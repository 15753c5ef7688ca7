"""Room for the pieces of calls on GPU arrays: two of them, each with an input and an output.

In page-locked host memory, or on the GPU, where MPI reads and writes it there. Either way the
user's own arrays are only ever copied on their streams, and MPI, which may be left with what it has
begun, has addresses of this memory alone.
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
from gpucoll.types import Collective

GPU_SLOT_BYTES = 8 << 20
"""Of one direction of a piece on the GPU: links between GPUs want larger messages than memory."""
MOVEMENTS = frozenset(
    {
        Collective.BROADCAST,
        Collective.ALL_GATHER,
        Collective.GATHER,
        Collective.SCATTER,
        Collective.ALL_TO_ALL,
    }
)
"""What MPI does on GPU memory: nothing is reduced, which our kernels do on the host."""


class GpuMemory:
    """Memory of the GPU: like `Slots`, but for the host."""

    is_shared = True

    def __init__(self, device: Device, size_bytes: int) -> None:
        self._device = device
        self.address = self.on_gpu = device.allocate(size_bytes)

    def close(self) -> None:
        """Give it back; nothing uses it."""
        if self.address:
            self._device.free(self.address)
        self.address = 0


class PieceSlots:
    """Where pieces of one kind of calls lie meanwhile.

    Parameters
    ----------
    memory : Slots or GpuMemory
        Four slots.
    slot_bytes : int
        Of each.
    prepare : callable
        Prepares the host's part of a piece: the host backend's.
    around : callable
        Returns what the calling thread does that part in.
    after : callable
        Called behind that part, within the same.
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
        """Return what the host's part of a piece of this number reads and writes."""
        start = self._memory.address + number % 2 * 2 * self.slot_bytes
        return start, start + self.slot_bytes

    def on_gpu(self, number: int, direction: int) -> int:
        """Return where the GPU sees what a piece reads (0) or writes (1)."""
        return self._memory.on_gpu + (number % 2 * 2 + direction) * self.slot_bytes

    @property
    def is_shared(self) -> bool:
        """Whether the host's part needs no copy of its own."""
        return self._memory.is_shared

    def close(self) -> None:
        """Give the memory back; nothing uses it."""
        self._memory.close()


def in_host_memory(device: Device, inner: Inner, slot_bytes: int) -> PieceSlots:
    """Return slots that the host backend works on."""
    memory = Slots(device, inner.backend, 4 * slot_bytes)
    return PieceSlots(memory, slot_bytes, inner.backend.prepare)


def on_gpu(device: Device, inner: Inner, slot_bytes: int, *, spans_hosts: bool) -> PieceSlots:
    """Return slots in GPU memory, of the kind that MPI was tried with; MemoryError: there is none.

    The thread that calls MPI is in the device meanwhile: MPIs look for the current one. What NICs
    have written the stream, on which all is enqueued already, is to see.
    """

    def there(buffer: Buffer | None) -> Buffer | None:
        return buffer and replace(buffer, device=device.label)

    def prepare(request: Request) -> PreparedCall:
        source, out = there(request.source), there(request.destination)
        return inner.backend.prepare(replace(request, source=source, destination=out))

    memory, after = GpuMemory(device, 4 * slot_bytes), device.flush_remote_writes
    if not spans_hosts:
        return PieceSlots(memory, slot_bytes, prepare, lambda: device)
    return PieceSlots(memory, slot_bytes, prepare, lambda: device, after)


def allocated_on_gpu(
    device: Device, inner: Inner, slot_bytes: int, *, spans_hosts: bool
) -> tuple[PieceSlots | None, str]:
    """Return slots in GPU memory, or None and why there are none."""
    if spans_hosts and device.remote_writes_problem:
        return None, device.remote_writes_problem
    try:
        return on_gpu(device, inner, slot_bytes, spans_hosts=spans_hosts), ""
    except (MemoryError, GpucollError) as error:
        return None, str(error)
