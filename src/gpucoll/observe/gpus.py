"""What NVIDIA's management library says of the GPUs that processes use, if it is installed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

__all__ = ["GpuUse", "Gpus"]


@dataclass(frozen=True)
class GpuUse:
    """The GPUs of a process.

    Attributes
    ----------
    busy : float
        The share of time in which a kernel of any process ran; of the busiest of its GPUs.
    memory_bytes : int
        What the process uses of their memory; 0 if the driver does not tell.
    """

    busy: float
    memory_bytes: int


class Gpus:
    """Reads the use of all GPUs. Without the library or a driver there are none, and no error."""

    def __init__(self) -> None:
        self._devices: list[Any] = []
        self._used: dict[int, GpuUse] = {}
        try:
            self._library: Any = importlib.import_module("pynvml")
            self._library.nvmlInit()
        except Exception:  # not installed, no driver, or one of another version
            return
        try:
            count = self._library.nvmlDeviceGetCount()
            get = self._library.nvmlDeviceGetHandleByIndex
            self._devices = [get(place) for place in range(count)]
        except self._library.NVMLError:
            self._library.nvmlShutdown()

    def read(self) -> None:
        """Ask for the use of each GPU and the memory of the processes on it."""
        self._used = {}
        for device in self._devices:
            try:
                busy = self._library.nvmlDeviceGetUtilizationRates(device).gpu / 100
                processes = self._library.nvmlDeviceGetComputeRunningProcesses(device)
            except self._library.NVMLError:  # lost, or it does not tell
                continue
            for one in processes:
                before = self._used.get(one.pid, GpuUse(0.0, 0))
                memory_bytes = before.memory_bytes + (one.usedGpuMemory or 0)
                self._used[one.pid] = GpuUse(max(before.busy, busy), memory_bytes)

    def used_by(self, pid: int) -> GpuUse | None:
        """Return what a process used when `read` was called; None: it is on no GPU."""
        return self._used.get(pid)

    def close(self) -> None:
        """Leave the library."""
        if self._devices:
            self._library.nvmlShutdown()
        self._devices = []
