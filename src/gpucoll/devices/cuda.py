"""NVIDIA GPUs, through the driver's interface alone (libcuda.so.1, which comes with the driver).

Every library of the process (PyTorch, CuPy, Numba, NCCL) works in the device's primary context.
This module retains the same one, so that streams, events and memory are shared with them.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p

from gpucoll import config
from gpucoll.devices import driver
from gpucoll.devices.device import DEFAULT_STREAMS
from gpucoll.devices.driver import Driver, DriverDevice, Vendor
from gpucoll.devices.foreign_library import Prototype, address_of

_HANDLES = POINTER(c_void_p)

_PROTOTYPES = (
    *driver.PROTOTYPES,
    Prototype("error_string", (c_int, POINTER(c_char_p))),
    Prototype("context_retain", (_HANDLES, c_int)),
    Prototype("context_push", (c_void_p,)),
    Prototype("context_pop", (_HANDLES,)),
    Prototype("context_device", (POINTER(c_int),)),
    Prototype("stream_context", (c_void_p, _HANDLES)),
    Prototype("memory_copy", (c_void_p, c_void_p, c_size_t, c_void_p)),
    Prototype("flush_remote_writes", (c_int, c_int), since="CUDA 11.3"),
    Prototype("stream_wait_value", (c_void_p, c_void_p, c_uint, c_uint), since="CUDA 8"),
)

_WAIT_VALUE = "cuStreamWaitValue32_v2"  # from CUDA 11.7; its predecessor may be switched off

# The headers turn a plain name into the name with _v2; the plain symbol is an older function.
_SYMBOLS = {
    "initialise": ("cuInit",),
    "driver_version": ("cuDriverGetVersion",),
    "device_count": ("cuDeviceGetCount",),
    "device_name": ("cuDeviceGetName",),
    "device_uuid": ("cuDeviceGetUuid_v2", "cuDeviceGetUuid"),  # v2 (11.4) supports MIG slices
    "device_pci_bus_id": ("cuDeviceGetPCIBusId",),
    "device_attribute": ("cuDeviceGetAttribute",),
    "synchronize": ("cuCtxSynchronize",),
    "stream_priorities": ("cuCtxGetStreamPriorityRange",),
    "stream_create": ("cuStreamCreateWithPriority",),
    "stream_destroy": ("cuStreamDestroy_v2",),
    "stream_query": ("cuStreamQuery",),
    "stream_synchronize": ("cuStreamSynchronize",),
    "stream_wait_event": ("cuStreamWaitEvent",),
    "stream_is_capturing": ("cuStreamIsCapturing",),
    "capture_mode": ("cuThreadExchangeStreamCaptureMode",),
    "stream_context": ("cuStreamGetCtx",),
    "event_create": ("cuEventCreate",),
    "event_destroy": ("cuEventDestroy_v2",),
    "event_record": ("cuEventRecord",),
    "event_query": ("cuEventQuery",),
    "event_synchronize": ("cuEventSynchronize",),
    "memory_allocate": ("cuMemAlloc_v2",),
    "memory_free": ("cuMemFree_v2",),
    "memory_info": ("cuMemGetInfo_v2",),
    "memory_copy": ("cuMemcpyAsync",),
    "memory_fill_1": ("cuMemsetD8Async",),
    "memory_fill_2": ("cuMemsetD16Async",),
    "memory_fill_4": ("cuMemsetD32Async",),
    "pointer_attribute": ("cuPointerGetAttribute",),
    "context_retain": ("cuDevicePrimaryCtxRetain",),
    "context_push": ("cuCtxPushCurrent_v2",),
    "context_pop": ("cuCtxPopCurrent_v2",),
    "context_device": ("cuCtxGetDevice",),
    "module_load": ("cuModuleLoadData",),
    "module_unload": ("cuModuleUnload",),
    "module_function": ("cuModuleGetFunction",),
    "launch": ("cuLaunchKernel",),
    "error_string": ("cuGetErrorString",),
    "memory_range": ("cuMemGetAddressRange_v2",),
    "memory_export": ("cuIpcGetMemHandle",),
    "memory_open": ("cuIpcOpenMemHandle_v2", "cuIpcOpenMemHandle"),
    "memory_close": ("cuIpcCloseMemHandle",),
    "host_allocate": ("cuMemHostAlloc",),
    "host_free": ("cuMemFreeHost",),
    "host_register": ("cuMemHostRegister_v2",),
    "host_unregister": ("cuMemHostUnregister",),
    "host_device_address": ("cuMemHostGetDevicePointer_v2",),
    "flush_remote_writes": ("cuFlushGPUDirectRDMAWrites",),
    "can_access_peer": ("cuDeviceCanAccessPeer",),
    "stream_wait_value": (_WAIT_VALUE, "cuStreamWaitValue32"),
    "stream_write_value": ("cuStreamWriteValue32_v2", "cuStreamWriteValue32"),
}

_ATTRIBUTES = {
    "multiprocessor_count": 16,
    "compute_capability_major": 75,
    "compute_capability_minor": 76,
    "virtual_memory_management": 102,
    "gpu_direct_rdma_with_virtual_memory": 110,
    "gpu_direct_rdma": 116,
    "gpu_direct_rdma_flush": 117,
    "gpu_direct_rdma_ordering": 118,
    "dma_buf": 124,
    "multicast": 132,
    "stream_wait_value": 92,
}

VENDOR = Vendor(
    kind="cuda",
    driver="the CUDA driver",
    file_names=("libcuda.so.1",),
    wheels=(),
    prototypes=_PROTOTYPES,
    symbols=_SYMBOLS,
    attributes=_ATTRIBUTES,
    remedy="It comes with NVIDIA's driver, not with CUDA or a wheel; in a container it is mounted "
    "by the NVIDIA container toolkit (docker run --gpus all)",
)


MOST_WORK_QUEUES = 32
"""The driver's maximum; without a setting it uses 8."""
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_TO_OWNER = 100  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER, and CU_GPU_DIRECT_RDMA_WRITES_...
_CURRENT_CONTEXT = 0  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
_FROM_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST


class CudaDriver(Driver):
    """libcuda."""

    def prepare(self) -> None:
        """Request all the work queues that are possible.

        Streams share queues. A stream that waits for a word in memory may hold up all others of its
        queue, including the one that would write the word. Settings of the user, or of a library
        that initialised the driver before, are not changed.
        """
        os.environ.setdefault(config.CUDA_DEVICE_MAX_CONNECTIONS, str(MOST_WORK_QUEUES))

    def text(self, code: int) -> str:
        found = c_char_p()
        self.functions["error_string"](code, ctypes.byref(found))
        return f"{(found.value or b'an error without a text').decode()} (CUDA driver code {code})"


@functools.cache
def load() -> CudaDriver:
    """Load and initialise the driver, once."""
    return CudaDriver(VENDOR)


def device_count() -> int:
    """Return how many GPUs the process sees; BackendUnavailableError without a driver."""
    return load().device_count()


def open_device(number: int) -> CudaDevice:
    """Return a new object for a GPU; `gpucoll.devices.open_device` keeps one for each."""
    return CudaDevice(load(), number)


class CudaDevice(DriverDevice):
    """An NVIDIA GPU, in its primary context."""

    def __init__(self, driver: CudaDriver, number: int) -> None:
        super().__init__(driver, number)
        self._push, self._pop = self._functions["context_push"], self._functions["context_pop"]
        self._left = ctypes.byref(c_void_p())
        """Gets the context that was left from the driver; nothing reads it, so threads share it."""

    @functools.cached_property
    def _context(self) -> int:
        """The primary context, retained when first needed, because it takes hundreds of MB.

        Never released: other libraries hold it, too, and the driver ends it with the process.
        """
        context = c_void_p()
        self._call("context_retain", "be used", ctypes.byref(context), self.number)
        return context.value or 0

    def __enter__(self) -> CudaDevice:
        if code := self._push(self._context):
            self.check(code, "become the current device")
        return self

    def __exit__(self, *exception: object) -> None:
        if code := self._pop(self._left):
            self.check(code, "leave the current device")

    def addresses(self) -> dict[str, int]:
        entering = {"PUSH": address_of(self._push), "POP": address_of(self._pop)}
        return {**super().addresses(), **entering, "CONTEXT": self._context}

    def owns_stream(self, stream: int) -> bool:
        if stream in DEFAULT_STREAMS:
            return True
        context, number = c_void_p(), c_int()
        self._call("stream_context", "look at a stream", stream, ctypes.byref(context))
        if context.value == self._context:
            return True
        self.check(self._push(context), "look at a stream")  # a context of another library
        try:
            self._call("context_device", "look at a stream", ctypes.byref(number))
        finally:
            self._pop(self._left)
        return number.value == self.number

    def copy(self, destination: int, source: int, size_bytes: int, stream: int) -> None:
        self._call("memory_copy", "copy", destination, source, size_bytes, stream)

    @functools.cached_property
    def target(self) -> str:
        parts = (self.attribute(f"compute_capability_{part}") for part in ("major", "minor"))
        return "sm_" + "".join(map(str, parts))

    @functools.cached_property
    def can_wait_for_values(self) -> bool:
        function = self._functions.get("stream_wait_value")
        if function is None or "stream_write_value" not in self._functions:
            return False
        # The attribute only describes the older function; the newer one is always enabled.
        return function.__name__ == _WAIT_VALUE or self.attribute("stream_wait_value") == 1

    @functools.cached_property
    def _orders_remote_writes(self) -> bool:
        return (self.attribute("gpu_direct_rdma_ordering") or 0) >= _TO_OWNER

    @property
    def remote_writes_problem(self) -> str:
        if self._orders_remote_writes:
            return ""
        options = self.attribute("gpu_direct_rdma_flush") or 0
        if options & _FROM_HOST and "flush_remote_writes" in self._functions:
            return ""
        return super().remote_writes_problem

    def flush_remote_writes(self) -> None:
        if not self._orders_remote_writes:
            what = "see what other devices have written"
            self._call("flush_remote_writes", what, _CURRENT_CONTEXT, _TO_OWNER)

    def stream_wait_value(self, stream: int, address: int, value: int) -> int:
        return self._quick("stream_wait_value", stream, address, value & 0xFFFFFFFF, _AT_LEAST)

    def driver_version(self) -> str:
        version = self.driver.number("driver_version")
        return f"{version // 1000}.{version % 1000 // 10}"
