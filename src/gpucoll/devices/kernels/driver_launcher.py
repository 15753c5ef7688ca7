"""Launching through NVIDIA's or AMD's driver, whichever library made the arrays."""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll import devices
from gpucoll.devices.device import Device
from gpucoll.devices.kernels.images import image_of
from gpucoll.errors import ArgumentTypeError, BackendError
from gpucoll.kernels.gpu.launcher import CompiledKernel
from gpucoll.kernels.gpu.source import THREADS, Kernel

# --- small tables for kernels: copied in a stream's order, into reused memory ---------------------


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


# --- launching ------------------------------------------------------------------------------------


_WORD = struct.Struct("=Q")


class DriverLauncher:
    """The `gpucoll.kernels.gpu.launcher.Launcher` of a kind of devices, CUDA's or AMD's.

    A kernel is loaded on a device at its first launch there, and stays, because graphs may contain
    it.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.RLock()
        self._functions: dict[tuple[Kernel | CompiledKernel, int], int] = {}
        self._modules: dict[tuple[tuple[Kernel, ...], int], int] = {}
        self._devices: dict[int, Device] = {}
        self._multiprocessors: dict[int, int] = {}
        self._tables: dict[int, TableMemory] = {}

    def multiprocessors(self, number: int) -> int:
        """Return how many multiprocessors (compute units) a device has."""
        found = self._multiprocessors.get(number)
        if found is None:
            device = self._device(number)
            found = device.attribute("multiprocessor_count")
            if not found:
                raise BackendError(f"{device.label} does not say how many multiprocessors it has")
            self._multiprocessors[number] = found
        return found

    def compute_capability(self, number: int) -> tuple[int, int]:
        """Return a CUDA device's compute capability."""
        if self._kind != "cuda":
            raise ArgumentTypeError(
                "a user's operation cannot run on AMD GPUs: Numba compiles for NVIDIA's only; use "
                "a built-in operation, or reduce on the host"
            )
        device = self._device(number)
        parts = (device.attribute(f"compute_capability_{part}") for part in ("major", "minor"))
        major, minor = (part or 0 for part in parts)
        return major, minor

    def load(self, kernel: Kernel | CompiledKernel, number: int) -> None:
        """Compile a kernel if needed, and load it on a device."""
        if (kernel, number) not in self._functions:
            self._load(kernel, number)

    def launch(
        self,
        kernel: Kernel | CompiledKernel,
        blocks: int,
        arguments: Sequence[Any],
        number: int,
        stream: int,
    ) -> None:
        """Enqueue a kernel; its first launch on a device compiles and loads it."""
        function = self._functions.get((kernel, number)) or self._load(kernel, number)
        given = [_bytes_of(argument) for argument in arguments]
        device = self._device(number)
        try:
            with device:
                device.launch(function, blocks, THREADS, given, stream)
        except BackendError as error:
            raise BackendError(f"{kernel.name}: {error}") from None

    def upload(self, table: npt.NDArray[Any], number: int, stream: int) -> tuple[int, Any]:
        """Copy a table to the device, in the stream's order; for its lifetime see `Table`."""
        with self._lock:
            memory = self._tables.get(number)
            if memory is None:
                memory = self._tables[number] = TableMemory(self._device(number))
            made = memory.upload(table, stream)
        return made.address, made

    def _device(self, number: int) -> Device:
        found = self._devices.get(number)
        if found is None:
            found = self._devices[number] = devices.open_device(self._kind, number)
        return found

    def _load(self, kernel: Kernel | CompiledKernel, number: int) -> int:
        device = self._device(number)
        with self._lock:
            key = kernel, number
            if key not in self._functions:
                if isinstance(kernel, CompiledKernel):
                    made_by = "Numba"
                    module = _loaded(device, kernel.ptx.encode(), kernel.name, made_by)
                else:
                    module = self._module(kernel, device)
                self._functions[key] = device.function_of(module, kernel.name)
            return self._functions[key]

    def _module(self, kernel: Kernel, device: Device) -> int:
        """Return the loaded module of a kernel; another kernel may have loaded it."""
        for (kernels, number), module in self._modules.items():
            if number == device.number and kernel in kernels:
                return module
        image = image_of(kernel, device.target, _most_major(device))
        module = _loaded(device, image.content, kernel.name, image.origin)
        self._modules[image.kernels, device.number] = module
        return module


def _loaded(device: Device, content: bytes, name: str, origin: str) -> int:
    try:
        return device.load_module(content)
    except BackendError as error:
        raise BackendError(
            f"{name}, made for {device.target} by {origin}: {error}. The driver's version is "
            f"{device.driver_version()}: a compiler that is newer may make what it does not load"
        ) from None


def _most_major(device: Device) -> int:
    """Return the newest major version of a compiler whose code the driver can surely load."""
    return int(device.driver_version().partition(".")[0])


def _bytes_of(argument: Any) -> bytes:
    """Return an argument in the form to pass: a struct as it is, integers as 64-bit words."""
    return argument.tobytes() if isinstance(argument, np.ndarray) else _WORD.pack(argument)
