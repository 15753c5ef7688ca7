"""Numba's own arrays and streams over a double of the GPU's driver, as far as the tests use them.

Numba asks the driver for far more than the double knows: what it would ask is done here instead.
Its arrays, views and memory pointers are the real ones, with their reference counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpucoll import devices as gpu_devices


class Context:
    """``numba.cuda.current_context()``."""

    def __init__(self, number: int) -> None:
        self.gpu = gpu_devices.open_device("cuda", number)
        self.device = SimpleNamespace(id=number)
        self.allocations: dict[int, Any] = {}

    def memalloc(self, size_bytes: int) -> Any:
        driver: Any = importlib.import_module("numba.cuda.cudadrv.driver")
        address = self.gpu.allocate(size_bytes)

        def free() -> None:
            del self.allocations[address]
            self.gpu.free(address)  # waits for the GPU; Numba puts it off for a while

        pointer = ctypes.c_void_p(address)
        memory = driver.AutoFreePointer(self, pointer, size_bytes, finalizer=free)
        self.allocations[address] = memory
        return memory.own()

    def get_default_stream(self) -> Stream:
        return Stream(self, 0)

    def wait_for(self, stream: Any) -> None:
        with self.gpu:
            self.gpu.synchronize_stream(stream.handle if stream else 0)


class Stream:
    """``numba.cuda.cudadrv.driver.Stream``."""

    def __init__(self, context: Context, handle: int) -> None:
        self._context, self.handle = context, handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def __int__(self) -> int:
        return self.handle

    def synchronize(self) -> None:
        self._context.wait_for(self)

    @contextlib.contextmanager
    def auto_synchronize(self) -> Iterator[Stream]:
        yield self
        self.synchronize()


def _on_host(x: Any) -> np.ndarray:
    """Return a NumPy array over a device array's memory, which is the host's."""
    interface = {
        "version": 3,
        "typestr": x.dtype.str,
        "shape": x.shape,
        "strides": x.strides,
        "data": (x.device_ctypes_pointer.value, False),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def install(number: int) -> Any:
    """Have Numba use the double in this process; return ``numba.cuda``."""
    cuda: Any = importlib.import_module("numba.cuda")
    devices: Any = importlib.import_module("numba.cuda.cudadrv.devices")
    driver: Any = importlib.import_module("numba.cuda.cudadrv.driver")
    context = Context(number)

    def copy(destination: int, source: int, size: int, stream: Any) -> None:
        context.wait_for(stream)
        ctypes.memmove(destination, source, size)

    def host_to_device(dst: Any, src: Any, size: int, stream: Any = 0) -> None:
        copy(dst.device_ctypes_pointer.value, src.ctypes.data, size, stream)

    def device_to_host(dst: Any, src: Any, size: int, stream: Any = 0) -> None:
        copy(dst.ctypes.data, src.device_ctypes_pointer.value, size, stream)

    def assign(lhs: Any, rhs: Any) -> None:
        """Do what Numba compiles a kernel for."""
        context.wait_for(lhs.stream)
        _on_host(lhs)[...] = _on_host(rhs)

    devicearray: Any = importlib.import_module("numba.cuda.cudadrv.devicearray")
    kernel = SimpleNamespace(forall=lambda count, stream: assign)
    devicearray._assign_kernel = lambda n_dimensions: kernel
    devices._runtime = SimpleNamespace(
        ensure_context=contextlib.nullcontext, get_or_create_context=lambda devnum: context
    )
    driver.host_to_device, driver.device_to_host = host_to_device, device_to_host
    driver.get_devptr_for_active_ctx = ctypes.c_void_p
    cuda.is_available = lambda: True
    cuda.gpus = {number: contextlib.nullcontext()}
    cuda.stream = lambda: Stream(context, context.gpu.create_stream())
    cuda.default_stream = lambda: Stream(context, 0)
    cuda.per_thread_default_stream = lambda: Stream(context, gpu_devices.PER_THREAD_STREAM)
    cuda.external_stream = lambda handle: Stream(context, handle)
    return cuda
