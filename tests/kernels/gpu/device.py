"""Arrays of a GPU at any address, between guards: CuPy's and PyTorch's; and of none, NumPy's."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.dtypes import dtype_of
from tests.guarded import GUARD, GUARD_BYTES, POISON

from gpucoll.arrays.buffer import Buffer
from gpucoll.devices.host.device import HostDevice


def require_gpu(library: str) -> Any:
    """Return the library's module; skip where it is not there, or there is no GPU."""
    if library == "torch":
        torch = pytest.importorskip("torch", reason="no PyTorch")
        if not torch.cuda.is_available():
            pytest.skip("PyTorch sees no GPU")
        return torch
    cupy = pytest.importorskip("cupy", reason="no CuPy")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    if count == 0:
        pytest.skip("no GPU")
    return cupy


def require_numba_cuda() -> None:
    """Skip where Numba's CUDA compiler is not there, or does not know this NumPy."""
    pytest.importorskip("numba_cuda", reason="no numba-cuda: pip install 'gpucoll[test-gpu]'")
    try:
        importlib.import_module("numba.cuda.np.arrayobj")
    except AttributeError as error:
        if "module 'numpy' has no attribute" not in str(error):
            raise
        pytest.skip(f"numba-cuda does not know this NumPy: {error}")


class Bench:
    """One library on device 0, with a stream that is not the default one."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.module = require_gpu(library)
        if library == "cupy":
            self.stream = self.module.cuda.Stream(non_blocking=True)
        else:
            self.stream = self.module.cuda.Stream()

    @contextlib.contextmanager
    def current(self):
        """Make the stream the library's current one; what was enqueued is done at the end."""
        context = self.stream if self.library == "cupy" else self.module.cuda.stream(self.stream)
        with context:
            yield
        self.stream.synchronize()

    def bytes_of(self, host: np.ndarray) -> Any:
        """Return bytes on the device, as an array of the library."""
        if self.library == "cupy":
            return self.module.asarray(host)
        return self.module.from_numpy(host.copy()).cuda()

    def on_host(self, memory: Any) -> np.ndarray:
        return memory.get() if self.library == "cupy" else memory.cpu().numpy()

    def address_of(self, memory: Any) -> int:
        return memory.data.ptr if self.library == "cupy" else memory.data_ptr()

    def guarded(self, content: np.ndarray, offset: int = 0) -> Guarded:
        """Return a copy of an array on the device, `offset` bytes behind a 256-byte boundary."""
        return Guarded(self, content, offset)

    def empty(self, count: int, dtype: str, offset: int = 0) -> Guarded:
        """Return a poisoned array."""
        content = np.full(count * dtype_of(dtype).itemsize, POISON, np.uint8).view(dtype_of(dtype))
        return Guarded(self, content, offset)


class HostDeviceBench(Bench):
    """A Host device: the CPU's kernels in the place of a GPU's, on a stream of its own."""

    def __init__(self) -> None:
        self.library = "cupy"  # whose words are NumPy's
        self.module = np
        self.device = HostDevice(0)
        self.device_name = self.device.label
        handle = self.device.create_stream()
        self.stream = SimpleNamespace(ptr=handle)
        self.stream.synchronize = lambda: self.device.synchronize_stream(handle)

    @contextlib.contextmanager
    def current(self):
        """Let nothing run before all is enqueued: what a kernel uses must live until it does."""
        gate = self.device.allocate_pinned(4)
        with self.device:
            assert self.device.stream_wait_value(self.stream.ptr, gate, 1) == 0
        yield
        ctypes.c_uint32.from_address(gate).value = 1
        self.stream.synchronize()
        self.device.free_pinned(gate)

    def bytes_of(self, host: np.ndarray) -> Any:
        address = self.device.allocate(host.size)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * host.size).from_address(address))
        memory[:] = host
        return memory

    def on_host(self, memory: Any) -> np.ndarray:
        return memory

    def address_of(self, memory: Any) -> int:
        return memory.ctypes.data

    def close(self) -> None:
        """Give everything back."""
        self.device.destroy_stream(self.stream.ptr)
        for address in list(self.device._arena.used.sizes):
            self.device.free(address)


class HostBench(Bench):
    """No GPU: the kernels compiled as host code, so that the tests themselves are tested."""

    def __init__(self) -> None:
        self.library = "cupy"  # whose words are NumPy's
        self.module = np
        self.stream = SimpleNamespace(ptr=0, synchronize=lambda: None)

    @contextlib.contextmanager
    def current(self):
        yield

    def bytes_of(self, host: np.ndarray) -> Any:
        memory = np.empty(host.size + 256, np.uint8)
        memory = memory[-memory.ctypes.data % 256 :][: host.size]
        memory[:] = host
        return memory

    def on_host(self, memory: Any) -> np.ndarray:
        return memory

    def address_of(self, memory: Any) -> int:
        return memory.ctypes.data


class Guarded:
    """An array between two guards: the library's, or a `Buffer` where it has no such dtype."""

    def __init__(self, bench: Bench, content: np.ndarray, offset: int) -> None:
        self._bench, self._dtype = bench, content.dtype
        self._start = GUARD_BYTES + offset  # allocations begin at multiples of 256 bytes, at least
        self._stop = self._start + content.nbytes
        host = np.full(self._stop + GUARD_BYTES, GUARD, np.uint8)
        host[self._start : self._stop] = np.frombuffer(content.tobytes(), np.uint8)
        self._memory = bench.bytes_of(host)
        self.array = self._view(content)

    def _view(self, content: np.ndarray) -> Any:
        part, name = self._memory[self._start : self._stop], content.dtype.name
        kind = getattr(self._bench.module, name, None)
        if isinstance(self._bench, HostDeviceBench):
            address = self._bench.address_of(self._memory) + self._start
            where, device = self._bench.stream.ptr, self._bench.device_name
            shape, item_bytes = (content.size,), content.dtype.itemsize
            return Buffer(address, shape, name, item_bytes, self._memory, device, where)
        native = content.dtype.isbuiltin == 1 if self._bench.library == "cupy" else kind
        if native and content.size and self._start % content.dtype.itemsize == 0:
            return part.view(kind if self._bench.library == "torch" else content.dtype)
        stream = self._bench.stream
        address = self._bench.address_of(self._memory) + self._start
        where = stream.ptr if self._bench.library == "cupy" else stream.cuda_stream
        shape, item_bytes = (content.size,), content.dtype.itemsize
        device = "cpu" if isinstance(self._bench, HostBench) else "cuda:0"
        return Buffer(address, shape, name, item_bytes, self._memory, device, where)

    def read(self) -> np.ndarray:
        """Return the content, after a look at the guards."""
        host = self._bench.on_host(self._memory)
        around = np.concatenate([host[: self._start], host[self._stop :]])
        assert (around == GUARD).all(), "bytes beside the array were written"
        return host[self._start : self._stop].view(self._dtype)
