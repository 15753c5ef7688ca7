"""A vendor's driver, and a GPU through it, as far as CUDA and HIP are the same: nearly everywhere.

Both drivers have the same functions under different names. `PROTOTYPES` is their common table; each
vendor's module adds the symbols and the differences.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ushort, c_void_p
from typing import Any, Final, NamedTuple

from gpucoll.devices.device import Device, Exported, Identity
from gpucoll.devices.foreign_library import (
    Prototype,
    address_of,
    bind,
    files_of_wheels,
    loaded_copies,
    open_library,
)
from gpucoll.errors import BackendError, BackendUnavailableError

# --- the driver -----------------------------------------------------------------------------------


_HANDLES = POINTER(c_void_p)
_INTS = POINTER(c_int)

_HANDLE_BYTES: Final = 64


class IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``, ``hipIpcMemHandle_t``: an opaque handle of the driver."""

    _fields_ = (("data", c_char * _HANDLE_BYTES),)


PROTOTYPES: Final = (
    Prototype("initialise", (c_uint,)),
    Prototype("driver_version", (_INTS,)),
    Prototype("device_count", (_INTS,)),
    Prototype("device_name", (c_char_p, c_int, c_int)),
    Prototype("device_uuid", (c_void_p, c_int)),
    Prototype("device_pci_bus_id", (c_char_p, c_int, c_int)),
    Prototype("synchronize", ()),
    Prototype("device_attribute", (_INTS, c_int, c_int)),
    Prototype("stream_priorities", (_INTS, _INTS)),
    Prototype("stream_create", (_HANDLES, c_uint, c_int)),
    Prototype("stream_destroy", (c_void_p,)),
    Prototype("stream_query", (c_void_p,)),
    Prototype("stream_synchronize", (c_void_p,)),
    Prototype("stream_wait_event", (c_void_p, c_void_p, c_uint)),
    Prototype("stream_is_capturing", (c_void_p, _INTS)),
    Prototype("capture_mode", (_INTS,)),
    Prototype("event_create", (_HANDLES, c_uint)),
    Prototype("event_destroy", (c_void_p,)),
    Prototype("event_record", (c_void_p, c_void_p)),
    Prototype("event_query", (c_void_p,)),
    Prototype("event_synchronize", (c_void_p,)),
    Prototype("memory_allocate", (_HANDLES, c_size_t)),
    Prototype("memory_free", (c_void_p,)),
    Prototype("memory_fill_1", (c_void_p, c_ubyte, c_size_t, c_void_p)),
    Prototype("memory_fill_2", (c_void_p, c_ushort, c_size_t, c_void_p)),
    Prototype("memory_fill_4", (c_void_p, c_uint, c_size_t, c_void_p)),
    Prototype("memory_info", (POINTER(c_size_t), POINTER(c_size_t))),
    Prototype("pointer_attribute", (c_void_p, c_int, c_void_p)),
    Prototype("module_load", (_HANDLES, c_char_p)),
    Prototype("module_unload", (c_void_p,)),
    Prototype("module_function", (_HANDLES, c_void_p, c_char_p)),
    Prototype("launch", (c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_char_p), c_void_p)),
    Prototype("memory_range", (_HANDLES, POINTER(c_size_t), c_void_p)),
    Prototype("memory_export", (POINTER(IpcHandle), c_void_p)),
    Prototype("memory_open", (_HANDLES, IpcHandle, c_uint)),
    Prototype("memory_close", (c_void_p,)),
    Prototype("host_allocate", (_HANDLES, c_size_t, c_uint)),
    Prototype("host_free", (c_void_p,)),
    Prototype("host_register", (c_void_p, c_size_t, c_uint)),
    Prototype("host_unregister", (c_void_p,)),
    Prototype("host_device_address", (_HANDLES, c_void_p, c_uint)),
    Prototype("can_access_peer", (POINTER(c_int), c_int, c_int)),
    Prototype("stream_write_value", (c_void_p, c_void_p, c_uint, c_uint), since="CUDA 8"),
)
"""Functions that both drivers have, with the same arguments; others are in the vendors' modules."""

_DEVICE_ORDINAL = 9


class Vendor(NamedTuple):
    """The differences between the drivers."""

    kind: str
    driver: str
    """Its common name."""
    file_names: tuple[str, ...]
    """For the loader, in this order; a copy that is already in the process comes first."""
    wheels: tuple[str, ...]
    """Where Python packages keep their copies: patterns of paths, searched on Python's path."""
    prototypes: tuple[Prototype, ...]
    symbols: Mapping[str, Sequence[str]]
    attributes: Mapping[str, int]
    """Name in `device.ATTRIBUTES` -> the vendor's number."""
    remedy: str
    """What to do if there is no driver."""


class Driver:
    """A vendor's driver, loaded and initialised: its functions, and the meanings of its codes.

    Raises
    ------
    BackendUnavailableError
        It is missing, is too old, or does not start.
    """

    def __init__(self, vendor: Vendor) -> None:
        self.vendor = vendor
        functions = bind(self._open(), vendor.prototypes, vendor.symbols)
        if missing := sorted(
            {row.name for row in vendor.prototypes if not row.since} - {*functions}
        ):
            symbols = ", ".join(vendor.symbols[name][0] for name in missing)
            raise BackendUnavailableError(f"{vendor.driver} is too old: it has no {symbols}")
        self.functions = functions
        self.prepare()
        if code := functions["initialise"](0):
            raise BackendUnavailableError(
                f"{vendor.driver} does not start: {self.text(code)}. {vendor.remedy}"
            )

    def _open(self) -> ctypes.CDLL:
        problems = []
        stem = self.vendor.file_names[0].partition(".so")[0]
        loaded = loaded_copies(rf"{re.escape(stem)}\.so.*")  # PyTorch for ROCm brings its own
        wheels = files_of_wheels(self.vendor.wheels)
        for name in (*loaded, *wheels, *self.vendor.file_names):
            try:
                return open_library(name)
            except OSError as error:
                problems.append(str(error))
        raise BackendUnavailableError(
            f"{self.vendor.driver} cannot be loaded: {'; '.join(problems)}. {self.vendor.remedy}"
        )

    def prepare(self) -> None:
        """Do what is needed before the driver is initialised."""

    def text(self, code: int) -> str:
        """Return the meaning of a code."""
        raise NotImplementedError

    def number(self, name: str, *arguments: Any) -> int:
        """Call a function that returns an int through its first argument."""
        value = c_int()
        if code := self.functions[name](ctypes.byref(value), *arguments):
            raise BackendError(f"{self.vendor.driver}: {name.replace('_', ' ')}: {self.text(code)}")
        return value.value

    def device_count(self) -> int:
        """Return how many GPUs the process sees."""
        value = c_int()
        code = self.functions["device_count"](ctypes.byref(value))
        return 0 if code else value.value  # HIP returns an error if there are none

    def device_of(self, address: int) -> int | None:
        """Return the memory's device, as far as the thread's current context can tell."""
        value = c_int()
        code = self.functions["pointer_attribute"](ctypes.byref(value), _DEVICE_ORDINAL, address)
        return None if code or value.value < 0 else value.value


# --- a GPU ----------------------------------------------------------------------------------------


_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_RELAXED = 2
_OUT_OF_MEMORY = 2
_NOT_READY = 600
_LAZY_PEER_ACCESS: Final = 1
_PORTABLE_AND_MAPPED: Final = 1 | 2
_IS_MANAGED: Final = 8
_CANNOT_BE_EXPORTED: Final = (1, 400, 800, 801)
"""Invalid value or handle, not permitted, not supported: the memory cannot be exported."""
_MISSING: Final = 801
"""Not supported: the code for a function that the driver lacks."""
_WORD: Final = (1 << 32) - 1


class DriverDevice:
    """One GPU. `device.Device` describes the methods.

    A subclass enters and leaves the device, copies and fills, and tells to which device a stream
    belongs.
    """

    not_ready = _NOT_READY

    def __init__(self, driver: Driver, number: int) -> None:
        self.driver = driver
        self.kind = driver.vendor.kind
        self.number = number
        self.label = f"{self.kind}:{number}"
        count = driver.device_count()
        if not 0 <= number < count:
            raise BackendUnavailableError(
                f"{self.label} is not there: {driver.vendor.driver} sees {count} GPUs"
                + (f", {self.kind}:0 to {self.kind}:{count - 1}" if count else "")
            )
        functions = driver.functions
        self._functions = functions
        self.record_event: Callable[[int, int], int] = functions["event_record"]
        self.stream_wait_event: Callable[[int, int, int], int] = functions["stream_wait_event"]
        self.query_event: Callable[[int], int] = functions["event_query"]
        self._stream_is_capturing = functions["stream_is_capturing"]
        self._launch = functions["launch"]
        self.identity = self._identify()

    def __repr__(self) -> str:
        return f"<{self.label}: {self.identity.name}>"

    def __enter__(self) -> Device:
        raise NotImplementedError

    def __exit__(self, *exception: object) -> None:
        raise NotImplementedError

    def _identify(self) -> Identity:
        name, place = ctypes.create_string_buffer(256), ctypes.create_string_buffer(64)
        unique = ctypes.create_string_buffer(16)
        self._call("device_name", "look at its name", name, len(name), self.number)
        self._call("device_uuid", "look at its UUID", unique, self.number)
        self._call("device_pci_bus_id", "look at its place", place, len(place), self.number)
        return Identity(name.value.decode(), self._uuid(unique.raw), place.value.decode().lower())

    @staticmethod
    def _uuid(data: bytes) -> str:
        return f"GPU-{uuid.UUID(bytes=data)}"

    # --- errors -----------------------------------------------------------------------------------

    def check(self, code: int, what: str) -> None:
        if code:
            raise BackendError(f"{self.label}: cannot {what}: {self.driver.text(code)}")

    def addresses(self) -> dict[str, int]:
        return {
            "RECORD": address_of(self.record_event),
            "WAIT": address_of(self.stream_wait_event),
            "IS_CAPTURING": address_of(self._stream_is_capturing),
        }

    def _call(self, name: str, what: str, *arguments: Any) -> None:
        if code := self._functions[name](*arguments):
            self.check(code, what)

    def _is_done(self, name: str, handle: int) -> bool:
        code = self._functions[name](handle)
        if code == _NOT_READY:
            return False
        self.check(code, "go on: work on it has failed")
        return True

    # --- streams and events -----------------------------------------------------------------------

    def create_stream(self, is_urgent: bool = False) -> int:
        handle, least, greatest = c_void_p(), c_int(), c_int()
        with self:
            what = "make a stream"
            self._call("stream_priorities", what, ctypes.byref(least), ctypes.byref(greatest))
            priority = greatest.value if is_urgent else least.value
            self._call("stream_create", what, ctypes.byref(handle), _NON_BLOCKING, priority)
        return handle.value or 0

    def destroy_stream(self, stream: int) -> None:
        with self:
            self._call("stream_destroy", "destroy a stream", stream)

    def is_stream_done(self, stream: int) -> bool:
        return self._is_done("stream_query", stream)

    def synchronize_stream(self, stream: int) -> None:
        self._call("stream_synchronize", "wait for a stream", stream)

    def is_capturing(self, stream: int) -> bool:
        status = c_int()
        if code := self._stream_is_capturing(stream, ctypes.byref(status)):
            self.check(code, "tell whether a graph is captured")
        return status.value != 0

    @contextlib.contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        mode, what = c_int(_RELAXED), "change how captures are guarded"
        self._call("capture_mode", what, ctypes.byref(mode))
        try:
            yield
        finally:
            self._call("capture_mode", what, ctypes.byref(mode))

    def owns_stream(self, stream: int) -> bool:
        raise NotImplementedError

    def create_event(self) -> int:
        handle = c_void_p()
        with self:
            self._call("event_create", "make an event", ctypes.byref(handle), _DISABLE_TIMING)
        return handle.value or 0

    def destroy_event(self, event: int) -> None:
        with self:
            self._call("event_destroy", "destroy an event", event)

    def is_event_done(self, event: int) -> bool:
        return self._is_done("event_query", event)

    def synchronize_event(self, event: int) -> None:
        self._call("event_synchronize", "wait for an event", event)

    def synchronize(self) -> None:
        with self:
            self._call("synchronize", "wait for everything on it")

    # --- memory -----------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> int:
        handle = c_void_p()
        with self:
            code = self._functions["memory_allocate"](ctypes.byref(handle), max(size_bytes, 1))
        if code == _OUT_OF_MEMORY:
            free, total = self.memory_bytes()
            raise MemoryError(
                f"{self.label}: no {size_bytes} bytes: {free} of {total} bytes are free. Free "
                "arrays, have the array library give back what its pool keeps (CuPy: "
                "free_all_blocks, PyTorch: empty_cache), or put fewer ranks on the GPU"
            )
        self.check(code, f"allocate {size_bytes} bytes")
        return handle.value or 0

    def free(self, address: int) -> None:
        with self:
            self._call("memory_free", "free memory", address)

    def copy(self, destination: int, source: int, size_bytes: int, stream: int) -> None:
        raise NotImplementedError

    def fill(self, address: int, pattern: bytes, count: int, stream: int) -> None:
        pattern, count = _shortest(pattern, count)
        size = len(pattern)
        if count and size <= 4:
            self._fill_words(address, pattern, count, stream)
        elif count:  # the first pattern in words, then copies that double the filled part
            for offset in range(0, size, 4):
                self._fill_words(address + offset, pattern[offset : offset + 4], 1, stream)
            done = 1
            while done < count:
                more = min(done, count - done)
                self.copy(address + done * size, address, more * size, stream)
                done += more

    def _fill_words(self, address: int, word: bytes, count: int, stream: int) -> None:
        value = int.from_bytes(word, sys.byteorder)
        self._call(f"memory_fill_{len(word)}", "fill memory", address, value, count, stream)

    def device_of(self, address: int) -> int | None:
        with self:
            return self.driver.device_of(address)

    def memory_bytes(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        with self:
            what = "tell how much memory there is"
            self._call("memory_info", what, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    # --- kernels ----------------------------------------------------------------------------------

    @functools.cached_property
    def target(self) -> str:
        raise NotImplementedError

    def load_module(self, image: bytes) -> int:
        handle = c_void_p()
        with self, self.relaxed_capture():  # loading allocates memory, which a capture forbids
            self._call("module_load", "load a module of kernels", ctypes.byref(handle), image)
        return handle.value or 0

    def unload_module(self, module: int) -> None:
        with self, self.relaxed_capture():
            self._call("module_unload", "unload a module of kernels", module)

    def function_of(self, module: int, name: str) -> int:
        handle, what = c_void_p(), f"find the kernel {name} in its module"
        with self, self.relaxed_capture():  # some drivers load it only now
            symbol = name.encode()
            self._call("module_function", what, ctypes.byref(handle), module, symbol)
        return handle.value or 0

    def launch(
        self, function: int, blocks: int, threads: int, arguments: Sequence[bytes], stream: int
    ) -> None:
        # The places of the arguments; ctypes keeps the bytes and their addresses alive.
        places = (c_char_p * len(arguments))(*arguments)
        code = self._launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, places, None)
        if code:
            self.check(code, f"launch a kernel of {blocks} blocks of {threads} threads")

    # --- words ------------------------------------------------------------------------------------

    @property
    def can_wait_for_values(self) -> bool:
        raise NotImplementedError

    def stream_wait_value(self, stream: int, address: int, value: int) -> int:
        raise NotImplementedError

    def stream_write_value(self, stream: int, address: int, value: int) -> int:
        return self._quick("stream_write_value", stream, address, value & _WORD, 0)

    def _quick(self, name: str, *arguments: Any) -> int:
        function = self._functions.get(name)
        return _MISSING if function is None else int(function(*arguments))

    # --- memory that other devices write ----------------------------------------------------------

    def flush_remote_writes(self) -> None:
        """Do nothing: see `remote_writes_problem`."""

    @property
    def remote_writes_problem(self) -> str:
        return "its driver does not tell when streams see what a NIC has written"

    # --- host memory ------------------------------------------------------------------------------

    def allocate_pinned(self, size_bytes: int) -> int:
        found = c_void_p()
        arguments = ctypes.byref(found), max(size_bytes, 1), _PORTABLE_AND_MAPPED
        with self, self.relaxed_capture():
            code = self._functions["host_allocate"](*arguments)
        if code == _OUT_OF_MEMORY:
            raise MemoryError(
                f"{self.label}: no {size_bytes} bytes of page-locked host memory: have less of it "
                "elsewhere, or raise the limits (ulimit -l, the container's memory)"
            )
        self.check(code, f"allocate {size_bytes} bytes of page-locked host memory")
        return found.value or 0

    def free_pinned(self, address: int) -> None:
        with self:
            self._call("host_free", "free page-locked host memory", address)

    def register_host(self, address: int, size_bytes: int) -> int:
        what, found = f"page-lock {size_bytes} bytes of host memory", c_void_p()
        with self, self.relaxed_capture():
            self._call("host_register", what, address, size_bytes, _PORTABLE_AND_MAPPED)
            arguments = ctypes.byref(found), address, 0
            code = self._functions["host_device_address"](*arguments)
            if code:
                self._functions["host_unregister"](address)
        self.check(code, "see page-locked host memory")
        return found.value or 0

    def unregister_host(self, address: int) -> None:
        with self:
            self._call("host_unregister", "let page-locked host memory go", address)

    # --- other processes' memory ------------------------------------------------------------------

    def export_memory(self, address: int) -> Exported | None:
        if self.is_managed(address):
            return None
        base, size, handle = c_void_p(), c_size_t(), IpcHandle()
        with self, self.relaxed_capture():
            places = ctypes.byref(base), ctypes.byref(size)
            code = self._functions["memory_range"](*places, address)
            code = code or self._functions["memory_export"](ctypes.byref(handle), base)
        if code in _CANNOT_BE_EXPORTED:
            return None
        self.check(code, "export memory to other processes")
        return Exported(bytes(handle), address - (base.value or 0), size.value)

    def open_exported(self, handle: bytes) -> int:
        if len(handle) != _HANDLE_BYTES:
            raise ValueError(f"a handle of GPU memory has {_HANDLE_BYTES} bytes; got {len(handle)}")
        base, given = c_void_p(), IpcHandle.from_buffer_copy(handle)
        with self, self.relaxed_capture():
            what = "open another process's memory"
            self._call("memory_open", what, ctypes.byref(base), given, _LAZY_PEER_ACCESS)
        return base.value or 0

    def close_exported(self, base: int) -> None:
        with self:
            self._call("memory_close", "close another process's memory", base)

    def can_access(self, number: int) -> bool:
        if number == self.number:
            return True
        answer = c_int()
        what = f"tell whether it reads {self.kind}:{number}'s memory"
        self._call("can_access_peer", what, ctypes.byref(answer), self.number, number)
        return answer.value != 0

    def is_managed(self, address: int) -> bool:
        answer = c_uint(0)  # drivers write one byte of it, or all four
        with self:
            arguments = ctypes.byref(answer), _IS_MANAGED, address
            code = self._functions["pointer_attribute"](*arguments)
        return code == 0 and answer.value != 0

    # --- facts ------------------------------------------------------------------------------------

    def attribute(self, name: str) -> int | None:
        number = self.driver.vendor.attributes.get(name)
        if number is None:
            return None
        value = c_int()
        arguments = ctypes.byref(value), number, self.number
        return None if self._functions["device_attribute"](*arguments) else value.value

    def driver_version(self) -> str:
        return str(self.driver.number("driver_version"))


def _shortest(pattern: bytes, count: int) -> tuple[bytes, int]:
    """Return the shortest pattern that gives the same memory, and how often it is repeated."""
    size = len(pattern)
    for shorter in (1, 2, 4):
        if shorter < size and pattern == pattern[:shorter] * (size // shorter):
            return pattern[:shorter], count * (size // shorter)
    return pattern, count
