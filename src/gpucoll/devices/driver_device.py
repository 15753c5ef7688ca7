"""A GPU through its vendor's driver, as far as CUDA and HIP are the same."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from typing import Any

from gpucoll.devices.device import Device, Identity
from gpucoll.devices.driver import Driver
from gpucoll.devices.foreign_library import address_of
from gpucoll.errors import BackendError, BackendUnavailableError

_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_RELAXED = 2
_OUT_OF_MEMORY = 2
_NOT_READY = 600


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
