"""Intel GPUs, through the C interface to SYCL that dpctl's package brings.

SYCL itself has a C++ interface only. dpctl's libDPCTLSyclInterface has C functions over it, whose
handles are pointers to SYCL's own objects: a stream here is a ``sycl::queue``, as PyTorch's
``torch.xpu.Stream.sycl_queue`` and dpctl's ``SyclQueue.addressof_ref()`` give it.

Never executed on an Intel GPU so far: tested on the CPU as a SYCL device (intel-opencl-rt). Memory
of other processes, words that streams wait for, and kernels are missing: methods for them say so.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import uuid
from ctypes import POINTER, c_bool, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from typing import Any, Final, NoReturn

from gpucoll import config
from gpucoll.devices.device import DEFAULT_STREAMS, Exported, Identity
from gpucoll.devices.foreign_library import (
    Prototype,
    bind,
    files_of_wheels,
    loaded_copies,
    open_library,
)
from gpucoll.errors import ArgumentError, BackendError, BackendUnavailableError

_SYCL: Final = r"libsycl\.so\.\d+.*"
_WHEEL: Final = ("dpctl/libDPCTLSyclInterface.so",)
_REMEDY: Final = "pip install dpctl, of the release of SYCL (intel-sycl-rt) that PyTorch uses"
_LEVEL_ZERO, _GPU, _CPU = 1 << 17, 1 << 4, 1 << 2
DEVICES: Final = [_LEVEL_ZERO | _GPU]
"""Which devices count (a list for tests): the GPUs that Level Zero drives, as PyTorch counts."""
ALL_CPUS: Final = 31 << 16 | _CPU
_IN_ORDER: Final = 1 << 1
_COMPLETE: Final = 3  # of DPCTLSyclEventStatusType
_NOT_READY: Final = 1
_NO_EVENT: Final = 2
_FILLS: Final = {1: 8, 2: 16, 4: 32, 8: 64, 16: 128}
_MULTIPROCESSORS: Final = "multiprocessor_count"
_NAMESPACE: Final = uuid.UUID("a0c3f6de-1f0b-4d59-9d0a-52b3f0e0a1c4")

_p = c_void_p
_PROTOTYPES: Final = (
    Prototype("DPCTLDeviceMgr_GetDevices", (c_int,), _p),
    Prototype("DPCTLDeviceMgr_GetCachedContext", (_p,), _p),
    Prototype("DPCTLDeviceVector_Size", (_p,), c_size_t),
    Prototype("DPCTLDeviceVector_GetAt", (_p, c_size_t), _p),
    Prototype("DPCTLDeviceVector_Delete", (_p,), None),
    Prototype("DPCTLDevice_AreEq", (_p, _p), c_bool),
    Prototype("DPCTLDevice_Delete", (_p,), None),
    Prototype("DPCTLDevice_GetName", (_p,), c_char_p),
    Prototype("DPCTLDevice_GetDriverVersion", (_p,), c_char_p),
    Prototype("DPCTLDevice_GetGlobalMemSize", (_p,), c_uint64),
    Prototype("DPCTLDevice_GetMaxComputeUnits", (_p,), ctypes.c_uint32),
    Prototype("DPCTLQueue_Create", (_p, _p, _p, c_int), _p),
    Prototype("DPCTLQueue_Delete", (_p,), None),
    Prototype("DPCTLQueue_GetDevice", (_p,), _p),
    Prototype("DPCTLQueue_Wait", (_p,), None),
    Prototype("DPCTLQueue_Memcpy", (_p, _p, _p, c_size_t), _p),
    *(
        Prototype(
            f"DPCTLQueue_Fill{bits}", (_p, _p, getattr(ctypes, f"c_uint{bits}"), c_size_t), _p
        )
        for bits in (8, 16, 32, 64)
    ),
    Prototype("DPCTLQueue_Fill128", (_p, _p, c_char_p, c_size_t), _p),
    Prototype("DPCTLQueue_SubmitBarrier", (_p,), _p),
    Prototype("DPCTLQueue_SubmitBarrierForEvents", (_p, POINTER(_p), c_size_t), _p),
    Prototype("DPCTLEvent_Wait", (_p,), None),
    Prototype("DPCTLEvent_Delete", (_p,), None),
    Prototype("DPCTLEvent_GetCommandExecutionStatus", (_p,)),
    Prototype("DPCTLmalloc_device", (c_size_t, _p), _p),
    Prototype("DPCTLmalloc_host", (c_size_t, _p), _p),
    Prototype("DPCTLfree_with_queue", (_p, _p), None),
    Prototype("DPCTLUSM_GetPointerType", (_p, _p)),
    Prototype("DPCTLUSM_GetPointerDevice", (_p, _p), _p),
)


class SyclDriver:
    """dpctl's C interface to SYCL, and the devices that it offers.

    Raises
    ------
    BackendUnavailableError
        It is missing or too old, or the process has two copies of SYCL.
    """

    def __init__(self) -> None:
        path = next(files_of_wheels(_WHEEL), "")
        if not path:
            raise BackendUnavailableError(
                f"Intel GPUs are reached through dpctl's C interface to SYCL, which is not "
                f"installed. What to do: {_REMEDY}"
            )
        try:
            library = open_library(path)
        except OSError as error:
            raise BackendUnavailableError(
                f"dpctl's C interface to SYCL cannot be loaded: {error}. What to do: {_REMEDY}"
            ) from None
        self.functions = bind(library, _PROTOTYPES)
        if missing := [row.name for row in _PROTOTYPES if row.name not in self.functions]:
            raise BackendUnavailableError(f"{path} is too old: it has no {', '.join(missing)}")
        if len(copies := loaded_copies(_SYCL)) > 1:
            raise BackendUnavailableError(
                f"this process has {len(copies)} copies of SYCL, {' and '.join(copies)}: a queue "
                f"of one is nothing to the other. What to do: {_REMEDY}"
            )
        self.devices = self._listed()

    def _listed(self) -> list[int]:
        functions = self.functions
        vector = functions["DPCTLDeviceMgr_GetDevices"](DEVICES[0])
        if not vector:
            return []
        count = functions["DPCTLDeviceVector_Size"](vector)
        found = [functions["DPCTLDeviceVector_GetAt"](vector, place) for place in range(count)]
        functions["DPCTLDeviceVector_Delete"](vector)
        return found

    def number_of(self, device: int | None) -> int | None:
        """Return the number of a device, whose handle is released; None: it is none of these."""
        if not device:
            return None
        same = self.functions["DPCTLDevice_AreEq"]
        found = next((n for n, its in enumerate(self.devices) if same(device, its)), None)
        self.functions["DPCTLDevice_Delete"](device)
        return found

    def device_of(self, address: int) -> int | None:
        """Return the number of the device that owns this memory; None: none, or freed."""
        for device in self.devices:
            context = self.functions["DPCTLDeviceMgr_GetCachedContext"](device)
            if not self.functions["DPCTLUSM_GetPointerType"](address, context):
                continue  # of other memory the next function ends the process
            owner = self.functions["DPCTLUSM_GetPointerDevice"](address, context)
            if (number := self.number_of(owner)) is not None:
                return number
        return None


@functools.cache
def load() -> SyclDriver:
    """Load dpctl's C interface to SYCL, once."""
    return SyclDriver()


def device_count() -> int:
    """Return how many GPUs the process sees; BackendUnavailableError without dpctl."""
    return len(load().devices)


def open_device(number: int) -> SyclDevice:
    """Return a new object for a GPU; `gpucoll.devices.open_device` keeps one for each."""
    return SyclDevice(load(), number)


class SyclDevice:
    """An Intel GPU, in its platform's default context. `device.Device` describes the methods."""

    kind = "sycl"
    not_ready = _NOT_READY
    can_wait_for_values = False
    remote_writes_problem = "gpucoll does not do that on Intel GPUs"
    target = "sycl"

    def __init__(self, driver: SyclDriver, number: int) -> None:
        if not 0 <= number < len(driver.devices):
            raise BackendUnavailableError(
                f"sycl:{number} is not there: SYCL sees {len(driver.devices)} GPUs"
            )
        self.driver, self.number, self.label = driver, number, f"sycl:{number}"
        self._functions = driver.functions
        self._device = driver.devices[number]
        self._context: int = self._functions["DPCTLDeviceMgr_GetCachedContext"](self._device)
        name = (self._functions["DPCTLDevice_GetName"](self._device) or b"").decode()
        self.identity = Identity(name, _uuid(number), "")
        self._events: dict[int, int] = {}
        """Handle -> SYCL's event; 0 before it is recorded."""
        self._n_events = 0
        self._own = self.create_stream()

    def __repr__(self) -> str:
        return f"<{self.label}: {self.identity.name}>"

    def _call(self, name: str, what: str, *arguments: Any) -> int:
        """Call a function that returns a handle; 0 is its way to report an error."""
        handle: int | None = self._functions[name](*arguments)
        if not handle:
            raise BackendError(
                f"{self.label}: cannot {what}: SYCL has raised an exception, whose text dpctl "
                "writes to stderr if DPCTL_VERBOSITY=error"
            )
        return handle

    def _missing(self, what: str) -> NoReturn:
        raise BackendUnavailableError(f"{self.label}: gpucoll cannot {what} on Intel GPUs yet")

    def check(self, code: int, what: str) -> None:
        if code == _NO_EVENT:
            raise BackendError(f"{self.label}: cannot {what}: SYCL made no event")
        if code:
            raise BackendError(f"{self.label}: cannot {what} (code {code})")

    def addresses(self) -> dict[str, int]:
        """Return none: no compiled code calls SYCL."""
        return {}

    def __enter__(self) -> SyclDevice:
        return self  # SYCL has no current device

    def __exit__(self, *exception: object) -> None:
        """Do nothing."""

    # --- streams and events -----------------------------------------------------------------------

    def queue(self, stream: int) -> int:
        """Return the address of a stream's ``sycl::queue``: default streams stand for one here."""
        return self._own if stream in DEFAULT_STREAMS else stream

    def create_stream(self, is_urgent: bool = False) -> int:
        given = self._context, self._device, None, _IN_ORDER
        return self._call("DPCTLQueue_Create", "make a queue", *given)

    def destroy_stream(self, stream: int) -> None:
        self._functions["DPCTLQueue_Delete"](stream)

    def is_stream_done(self, stream: int) -> bool:
        event = self._call("DPCTLQueue_SubmitBarrier", "look at a queue", self.queue(stream))
        try:
            return self._status(event) == _COMPLETE
        finally:
            self._functions["DPCTLEvent_Delete"](event)

    def synchronize_stream(self, stream: int) -> None:
        self._functions["DPCTLQueue_Wait"](self.queue(stream))

    def is_capturing(self, stream: int) -> bool:
        return False

    def relaxed_capture(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def owns_stream(self, stream: int) -> bool:
        if stream in DEFAULT_STREAMS:
            return True
        return self.driver.number_of(self._functions["DPCTLQueue_GetDevice"](stream)) == self.number

    def create_event(self) -> int:
        self._n_events += 1
        self._events[self._n_events] = 0
        return self._n_events

    def destroy_event(self, event: int) -> None:
        if made := self._events.pop(event):
            self._functions["DPCTLEvent_Delete"](made)

    def record_event(self, event: int, stream: int) -> int:
        made = self._functions["DPCTLQueue_SubmitBarrier"](self.queue(stream))
        if not made:
            return _NO_EVENT
        before, self._events[event] = self._events[event], made
        if before:
            self._functions["DPCTLEvent_Delete"](before)
        return 0

    def stream_wait_event(self, stream: int, event: int, flags: int) -> int:
        if not (recorded := self._events[event]):
            return 0
        given = ctypes.byref(c_void_p(recorded)), 1
        made = self._functions["DPCTLQueue_SubmitBarrierForEvents"](self.queue(stream), *given)
        if not made:
            return _NO_EVENT
        self._functions["DPCTLEvent_Delete"](made)
        return 0

    def query_event(self, event: int) -> int:
        recorded = self._events[event]
        return 0 if not recorded or self._status(recorded) == _COMPLETE else _NOT_READY

    def _status(self, event: int) -> int:
        return int(self._functions["DPCTLEvent_GetCommandExecutionStatus"](event))

    def is_event_done(self, event: int) -> bool:
        return self.query_event(event) == 0

    def synchronize_event(self, event: int) -> None:
        if recorded := self._events[event]:
            self._functions["DPCTLEvent_Wait"](recorded)

    def synchronize(self) -> None:
        """Wait for this device's own queue: SYCL knows of no other queue of the device."""
        self.synchronize_stream(0)

    # --- memory -----------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> int:
        return self._allocated("DPCTLmalloc_device", size_bytes)

    def _allocated(self, name: str, size_bytes: int) -> int:
        made: int | None = self._functions[name](max(size_bytes, 1), self._own)
        if not made:
            raise MemoryError(f"{self.label}: SYCL has no {size_bytes} bytes")
        return made

    def free(self, address: int) -> None:
        self.synchronize()
        self._functions["DPCTLfree_with_queue"](address, self._own)

    def allocate_pinned(self, size_bytes: int) -> int:
        return self._allocated("DPCTLmalloc_host", size_bytes)

    free_pinned = free

    def copy(self, destination: int, source: int, size_bytes: int, stream: int) -> None:
        if size_bytes:
            given = self.queue(stream), destination, source, size_bytes
            self._drop(self._call("DPCTLQueue_Memcpy", "copy", *given))

    def fill(self, address: int, pattern: bytes, count: int, stream: int) -> None:
        if len(pattern) not in _FILLS:
            raise ArgumentError(f"{self.label}: a pattern has 1, 2, 4, 8 or 16 bytes: {pattern!r}")
        value = pattern if len(pattern) == 16 else int.from_bytes(pattern, "little")
        if count:
            name = f"DPCTLQueue_Fill{_FILLS[len(pattern)]}"
            given = self.queue(stream), address, value, count
            self._drop(self._call(name, "fill memory", *given))

    def _drop(self, event: int) -> None:
        self._functions["DPCTLEvent_Delete"](event)

    def device_of(self, address: int) -> int | None:
        return self.driver.device_of(address)

    def memory_bytes(self) -> tuple[int, int]:
        """Return the size of all memory twice: this interface does not tell how much is free."""
        total = int(self._functions["DPCTLDevice_GetGlobalMemSize"](self._device))
        return total, total

    def is_managed(self, address: int) -> bool:
        return False

    # --- missing ----------------------------------------------------------------------------------

    def stream_wait_value(self, stream: int, address: int, value: int) -> int:
        self._missing("make streams wait for words in memory")

    def stream_write_value(self, stream: int, address: int, value: int) -> int:
        self._missing("let streams write words in memory")

    def register_host(self, address: int, size_bytes: int) -> int:
        self._missing("page-lock memory that others have allocated")

    def unregister_host(self, address: int) -> None:
        self._missing("page-lock memory that others have allocated")

    def flush_remote_writes(self) -> None:
        self._missing("flush what other devices have written")

    def export_memory(self, address: int) -> Exported | None:
        return None

    def open_exported(self, handle: bytes) -> int:
        self._missing("open memory of other processes (Level Zero's shared handles)")

    def close_exported(self, base: int) -> None:
        self._missing("open memory of other processes (Level Zero's shared handles)")

    def can_access(self, number: int) -> bool:
        return number == self.number

    def load_module(self, image: bytes) -> int:
        self._missing("run kernels")

    def unload_module(self, module: int) -> None:
        self._missing("run kernels")

    def function_of(self, module: int, name: str) -> int:
        self._missing("run kernels")

    def launch(self, *_: object) -> None:
        self._missing("run kernels")

    # --- facts ------------------------------------------------------------------------------------

    def attribute(self, name: str) -> int | None:
        if name != _MULTIPROCESSORS:
            return None
        return int(self._functions["DPCTLDevice_GetMaxComputeUnits"](self._device))

    def driver_version(self) -> str:
        found = self._functions["DPCTLDevice_GetDriverVersion"](self._device) or b""
        return str(found.decode())


def _uuid(number: int) -> str:
    """Return an identifier of a GPU: its number among those that the environment leaves.

    The C interface does not tell SYCL's own. Ranks with the same masks count the same GPUs.
    """
    masks = (
        config.variable(config.ZE_AFFINITY_MASK),
        config.variable(config.ONEAPI_DEVICE_SELECTOR),
    )
    return f"SYCL-{uuid.uuid5(_NAMESPACE, f'{os.uname().nodename}/{masks}/{number}')}"
