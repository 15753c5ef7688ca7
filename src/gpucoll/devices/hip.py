"""AMD GPUs, through the HIP runtime (libamdhip64), which uses the device itself as context.

Never executed on an AMD GPU so far: tested with a double of the runtime, and with a comparison of
its numbers with those of the `rocm-bindings-hip` wheel.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Final

from gpucoll.devices import driver
from gpucoll.devices.device import DEFAULT_STREAMS
from gpucoll.devices.driver import Driver, DriverDevice, Vendor
from gpucoll.devices.foreign_library import Prototype, address_of
from gpucoll.errors import BackendError, BackendUnavailableError

_PROTOTYPES = (
    *driver.PROTOTYPES,
    Prototype("error_string", (c_int,), c_char_p),
    Prototype("device_set", (c_int,)),
    Prototype("device_get", (POINTER(c_int),)),
    Prototype("stream_device", (c_void_p, POINTER(c_int)), since="ROCm 5.6"),
    Prototype("memory_copy", (c_void_p, c_void_p, c_size_t, c_int, c_void_p)),
    Prototype("stream_wait_value", (c_void_p, c_void_p, *[c_uint] * 3), since="ROCm 4.2"),
    Prototype("device_properties", (c_char_p, c_int), since="ROCm 6.0"),
)

_SYMBOLS = {
    "initialise": ("hipInit",),
    "driver_version": ("hipDriverGetVersion",),
    "device_count": ("hipGetDeviceCount",),
    "device_name": ("hipDeviceGetName",),
    "device_uuid": ("hipDeviceGetUuid",),
    "device_pci_bus_id": ("hipDeviceGetPCIBusId",),
    "device_attribute": ("hipDeviceGetAttribute",),
    "device_set": ("hipSetDevice",),
    "device_get": ("hipGetDevice",),
    "synchronize": ("hipDeviceSynchronize",),
    "stream_priorities": ("hipDeviceGetStreamPriorityRange",),
    "stream_create": ("hipStreamCreateWithPriority",),
    "stream_destroy": ("hipStreamDestroy",),
    "stream_query": ("hipStreamQuery",),
    "stream_synchronize": ("hipStreamSynchronize",),
    "stream_wait_event": ("hipStreamWaitEvent",),
    "stream_is_capturing": ("hipStreamIsCapturing",),
    "capture_mode": ("hipThreadExchangeStreamCaptureMode",),
    "stream_device": ("hipStreamGetDevice",),
    "event_create": ("hipEventCreateWithFlags",),
    "event_destroy": ("hipEventDestroy",),
    "event_record": ("hipEventRecord",),
    "event_query": ("hipEventQuery",),
    "event_synchronize": ("hipEventSynchronize",),
    "memory_allocate": ("hipMalloc",),
    "memory_free": ("hipFree",),
    "memory_info": ("hipMemGetInfo",),
    "memory_copy": ("hipMemcpyAsync",),
    "memory_fill_1": ("hipMemsetD8Async",),
    "memory_fill_2": ("hipMemsetD16Async",),
    "memory_fill_4": ("hipMemsetD32Async",),
    "pointer_attribute": ("hipPointerGetAttribute",),
    "module_load": ("hipModuleLoadData",),
    "module_unload": ("hipModuleUnload",),
    "module_function": ("hipModuleGetFunction",),
    "launch": ("hipModuleLaunchKernel",),
    "device_properties": ("hipGetDevicePropertiesR0600",),
    "error_string": ("hipGetErrorString",),
    "memory_range": ("hipMemGetAddressRange",),
    "memory_export": ("hipIpcGetMemHandle",),
    "memory_open": ("hipIpcOpenMemHandle",),
    "memory_close": ("hipIpcCloseMemHandle",),
    "host_allocate": ("hipHostMalloc",),
    "host_free": ("hipHostFree",),
    "host_register": ("hipHostRegister",),
    "host_unregister": ("hipHostUnregister",),
    "host_device_address": ("hipHostGetDevicePointer",),
    "can_access_peer": ("hipDeviceCanAccessPeer",),
    "stream_wait_value": ("hipStreamWaitValue32",),
    "stream_write_value": ("hipStreamWriteValue32",),
}

ATTRIBUTES: Final = {
    "multiprocessor_count": 63,
    "compute_capability_major": 23,
    "compute_capability_minor": 61,
    "virtual_memory_management": 89,
    "dma_buf": 93,
    "gpu_direct_rdma_with_virtual_memory": 94,
    "stream_wait_value": 10013,
}
"""The numbers in ROCm 7's enumeration; a runtime that lacks one returns an error."""

VENDOR = Vendor(
    kind="rocm",
    driver="the HIP runtime",
    file_names=("libamdhip64.so.7", "libamdhip64.so.6", "/opt/rocm/lib/libamdhip64.so"),
    wheels=("_rocm_sdk_core/lib/libamdhip64.so.*",),
    prototypes=_PROTOTYPES,
    symbols=_SYMBOLS,
    attributes=ATTRIBUTES,
    remedy="It comes with ROCm; in a container the host's /dev/kfd and /dev/dri must be there",
)

_COPY_OF_ANY_KIND: Final = 4  # hipMemcpyDefault: the kind follows from the addresses
PROPERTIES_BYTES: Final = 8192
"""Room for hipDeviceProp_tR0600, which has 1472 bytes."""
ARCHITECTURE = slice(1160, 1160 + 256)
"""Its gcnArchName, which is not available as an attribute."""


_AT_LEAST: Final = 0  # hipStreamWaitValueGte
_ALL_BITS: Final = 0xFFFFFFFF


class HipDriver(Driver):
    """libamdhip64."""

    def text(self, code: int) -> str:
        found = self.functions["error_string"](code) or b"an error without a text"
        return f"{found.decode()} (HIP code {code})"


@functools.cache
def load() -> HipDriver:
    """Load and initialise the runtime, once."""
    return HipDriver(VENDOR)


def device_count() -> int:
    """Return how many GPUs the process sees; BackendUnavailableError without a runtime."""
    return load().device_count()


def open_device(number: int) -> HipDevice:
    """Return a new object for a GPU; `gpucoll.devices.open_device` keeps one for each."""
    return HipDevice(load(), number)


class _Before(threading.local):
    """Devices that were current before this thread entered others."""

    def __init__(self) -> None:
        self.numbers: list[int] = []


_before = _Before()


class HipDevice(DriverDevice):
    """An AMD GPU."""

    def __enter__(self) -> HipDevice:
        number = c_int()
        self._call("device_get", "look at the current device", ctypes.byref(number))
        if number.value != self.number:
            self._call("device_set", "become the current device", self.number)
        _before.numbers.append(number.value)
        return self

    def __exit__(self, *exception: object) -> None:
        number = _before.numbers.pop()
        if number != self.number:
            self._call("device_set", "leave the current device", number)

    def addresses(self) -> dict[str, int]:
        get, set_ = (address_of(self._functions[f"device_{name}"]) for name in ("get", "set"))
        return {**super().addresses(), "GET_DEVICE": get, "SET_DEVICE": set_, "NUMBER": self.number}

    def owns_stream(self, stream: int) -> bool:
        if stream in DEFAULT_STREAMS or "stream_device" not in self._functions:
            return True
        number = c_int()
        self._call("stream_device", "look at a stream", stream, ctypes.byref(number))
        return number.value == self.number

    def copy(self, destination: int, source: int, size_bytes: int, stream: int) -> None:
        arguments = destination, source, size_bytes, _COPY_OF_ANY_KIND, stream
        self._call("memory_copy", "copy", *arguments)

    @functools.cached_property
    def target(self) -> str:
        if "device_properties" not in self._functions:
            raise BackendUnavailableError(
                f"{self.label}: kernels need ROCm 6.0 or later: {self.driver.vendor.driver} has no "
                f"{_SYMBOLS['device_properties'][0]}"
            )
        properties = ctypes.create_string_buffer(PROPERTIES_BYTES)
        self._call("device_properties", "tell its architecture", properties, self.number)
        name = properties.raw[ARCHITECTURE].partition(b"\0")[0].decode(errors="replace")
        if not re.fullmatch(r"gfx[0-9a-f]+(:[a-z]+[+-])*", name):
            raise BackendError(
                f"{self.label}: {self.driver.vendor.driver} {self.driver_version()} names its "
                f"architecture {name[:40]!r}, which gpucoll does not understand"
            )
        return name

    @functools.cached_property
    def can_wait_for_values(self) -> bool:
        has_both = {"stream_wait_value", "stream_write_value"} <= self._functions.keys()
        return has_both and self.attribute("stream_wait_value") == 1

    def stream_wait_value(self, stream: int, address: int, value: int) -> int:
        word = value & _ALL_BITS
        return self._quick("stream_wait_value", stream, address, word, _AT_LEAST, _ALL_BITS)

    def driver_version(self) -> str:
        version = self.driver.number("driver_version")
        return f"{version // 10_000_000}.{version // 100_000 % 100}"
