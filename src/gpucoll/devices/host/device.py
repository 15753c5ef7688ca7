"""A Host device: `gpucoll.devices.device.Device` over threads and memory of this host."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import uuid
from _ctypes import dlclose as _dlclose
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from gpucoll import config
from gpucoll.devices.device import Exported, Identity
from gpucoll.devices.host.faults import Faults
from gpucoll.devices.host.memory import Arena, OpenedArenas, Ranges, address_of
from gpucoll.devices.host.streams import Entries, Streams, entries, streams
from gpucoll.devices.host.words import MEANINGS, MOST_DEVICES, Code, Command
from gpucoll.errors import ArgumentError, BackendError, BackendUnavailableError

_DEFAULT_STREAMS: Final = (0, 1, 2)
_MULTIPROCESSORS: Final = 4
_NAMESPACE: Final = uuid.UUID("5b0e3c7a-0a53-4d0c-9a55-1c1f3f1f6f57")
_TEXT_CODES: Final = frozenset(int(code) for code in Code)

_opened: dict[int, HostDevice] = {}
_peers = OpenedArenas()
_pinned: dict[int, mmap.mmap] = {}
_registered = Ranges()
_host_memory = Ranges()
"""Pinned memory."""
_lock = threading.RLock()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def device_count() -> int:
    """Return how many Host devices this process may open."""
    return config.host_devices(MOST_DEVICES)


def open_device(number: int) -> HostDevice:
    """Return a new object for a device; `gpucoll.devices.open_device` keeps one for each."""
    return HostDevice(number)


def opened(number: int) -> HostDevice | None:
    """Return a device that this process has opened; None: it has not."""
    return _opened.get(number)


class _Driver:
    """The part of the driver that needs no device."""

    def device_of(self, address: int) -> int | None:
        """Return the number of the device that owns this memory."""
        return _owner_of(address)

    def device_count(self) -> int:
        """Return the number of devices."""
        return device_count()


@functools.cache
def load() -> _Driver:
    """Return the part of the driver that needs no device."""
    return _Driver()


def _owner_of(address: int) -> int | None:
    for number, device in list(_opened.items()):
        if device.holds(address):
            return number
    return None


class HostDevice:
    """One Host device of this process. `device.Device` describes the methods.

    Attributes
    ----------
    faults : Faults
        Faults that tests inject.
    """

    kind = "host"
    not_ready = int(Code.NOT_READY)
    can_wait_for_values = True
    remote_writes_problem = ""
    target = "host"

    def __init__(self, number: int) -> None:
        count = device_count()
        if not 0 <= number < count:
            raise BackendUnavailableError(
                f"host:{number} is not there: {config.HOST_DEVICES} says {count} devices"
                + (f", host:0 to host:{count - 1}" if count else "")
            )
        self.number = number
        self.label = f"host:{number}"
        self.identity = _identity(number)
        self.faults = Faults()
        self._arena: Arena
        self._managed: dict[int, mmap.mmap]
        self._streams: Streams = streams()
        self._entries: Entries = entries(self._streams.address)
        self._streams.check_process(f"open {self.label}")
        given = self._entries
        self.record_event: Callable[[int, int], int] = given.record_event
        self.stream_wait_event: Callable[[int, int, int], int] = given.stream_wait_event
        self.query_event: Callable[[int], int] = given.query_event
        self.stream_wait_value: Callable[[int, int, int], int] = given.stream_wait_value
        self.stream_write_value: Callable[[int, int, int], int] = given.stream_write_value
        with _lock:
            same = _opened.setdefault(number, self)
            is_first = same is self
            if is_first:
                self._begin()
        if not is_first:  # another object of the same device
            self._arena, self._managed, self.faults = same._arena, same._managed, same.faults
        self._modules: dict[int, tuple[ctypes.CDLL, int]] = {}
        self._before = _Before()

    def _begin(self) -> None:
        try:
            self._arena = Arena(self.number, config.host_device_memory())
            self._managed = {}
            made = self._streams.create(self.number)
        except BaseException:
            del _opened[self.number]
            raise
        self._streams.state.default_streams[self.number] = made

    def __repr__(self) -> str:
        return f"<{self.label}: {self.identity.name}>"

    # --- errors -----------------------------------------------------------------------------------

    def check(self, code: int, what: str) -> None:
        if code:
            text = MEANINGS[Code(code)] if code in _TEXT_CODES else "an unknown error"
            raise BackendError(f"{self.label}: cannot {what}: {text} (code {code})")

    def addresses(self) -> dict[str, int]:
        return {**self._entries.addresses, "NUMBER": self.number}

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child, which cannot use the device."""
        return self._streams.is_forked

    def _check_alive(self, what: str) -> None:
        self._streams.check_process(what)
        self.check(self._streams.failure(self.number), what)

    # --- current device ---------------------------------------------------------------------------

    def __enter__(self) -> HostDevice:
        before = self._entries.current_device()
        self.use()
        self._before.numbers.append(before)
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._before.numbers:
            raise BackendError(f"{self.label} is left more often than it was entered")
        self._entries.set_device(self._before.numbers.pop())

    def use(self) -> None:
        """Make it the thread's current device until another one becomes current."""
        self._streams.check_process("become the current device")
        self.check(self._entries.set_device(self.number), "become the current device")

    def current_number(self) -> int:
        """Return the number of the thread's current device."""
        return self._entries.current_device()

    def marks(self) -> list[tuple[int, int]]:
        """Return the present ends of its streams, for `are_reached`."""
        return [
            (place, self._streams.tail(place)) for place in self._streams.of_device(self.number)
        ]

    def are_reached(self, marks: Sequence[tuple[int, int]]) -> bool:
        """Return whether all work up to `marks` on its streams is done."""
        return all(self._streams.is_done(place, number) for place, number in marks)

    # --- streams and events -----------------------------------------------------------------------

    def create_stream(self, is_urgent: bool = False) -> int:
        self._check_alive("make a stream")
        return self._streams.create(self.number)

    def destroy_stream(self, stream: int) -> None:
        self._streams.destroy(stream)

    def is_stream_done(self, stream: int) -> bool:
        place = self._streams.place(stream, "look at a stream")
        is_done = self._streams.is_done(place, self._streams.tail(place))
        self.check(self._streams.failure(self.number), "go on: work on it has failed")
        return is_done

    def synchronize_stream(self, stream: int) -> None:
        place = self._streams.place(stream, "wait for a stream")
        self._streams.wait(place, self._streams.tail(place))
        self.check(self._streams.failure(self.number), "go on: work on it has failed")

    def is_capturing(self, stream: int) -> bool:
        self._streams.place(stream, "tell whether a graph is captured")
        return False

    def relaxed_capture(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def owns_stream(self, stream: int) -> bool:
        if stream in _DEFAULT_STREAMS:
            return True
        place = self._streams.place(stream, "look at a stream")
        return place in self._streams.of_device(self.number)

    def create_event(self) -> int:
        self._check_alive("make an event")
        return self._streams.create_event()

    def destroy_event(self, event: int) -> None:
        self._streams.destroy_event(event)

    def is_event_done(self, event: int) -> bool:
        code = self.query_event(event)
        if code == Code.NOT_READY:
            return False
        self.check(code, "go on: work on it has failed")
        return True

    def synchronize_event(self, event: int) -> None:
        place, number = self._streams.recorded(event)
        if place >= 0:
            self._streams.wait(place, number)
        self.check(self.query_event(event), "go on: work on it has failed")

    def synchronize(self) -> None:
        self._streams.check_process("wait for everything on it")
        for place in self._streams.of_device(self.number):
            self._streams.wait(place, self._streams.tail(place))
        self._check_alive("go on: work on it has failed")

    # --- memory -----------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> int:
        self._check_alive(f"allocate {size_bytes} bytes")
        found = None if self.faults.strikes("allocation") else self._arena.take(size_bytes)
        if found is None:
            free, total = self.memory_bytes()
            raise MemoryError(
                f"{self.label}: no {size_bytes} bytes: {free} of {total} bytes are free "
                f"({config.HOST_DEVICE_MEMORY} says how many there are)"
            )
        return found

    def free(self, address: int) -> None:
        self.synchronize()
        self.free_unused(address)

    def free_unused(self, address: int) -> None:
        """Free memory that no work uses any more, without waiting."""
        with _lock:
            managed = self._managed.pop(address, None)
        if managed is not None:
            managed.close()
        elif not self._arena.give(address):
            raise BackendError(f"{self.label}: cannot free memory: none begins at {address:#x}")

    def leave_unused(self, address: int) -> None:
        """Free memory of `allocate` as `free_unused` does, for finalizers: takes no lock."""
        self._arena.left.append(address)

    def allocate_managed(self, size_bytes: int) -> int:
        """Return memory that other processes can never map, like CUDA's managed memory."""
        self._check_alive(f"allocate {size_bytes} bytes")
        mapping = mmap.mmap(-1, max(size_bytes, 1))
        with _lock:
            address = address_of(mapping)
            self._managed[address] = mapping
        return address

    def is_managed(self, address: int) -> bool:
        with _lock:
            ranges = [(start, len(held)) for start, held in self._managed.items()]
        return any(start <= address < start + size for start, size in ranges)

    def holds(self, address: int) -> bool:
        """Return whether this is memory of the device that is allocated now."""
        return self._arena.used.start_of(address) is not None or self.is_managed(address)

    def device_of(self, address: int) -> int | None:
        return _owner_of(address)

    def memory_bytes(self) -> tuple[int, int]:
        return self._arena.free_bytes, self._arena.size_bytes

    def flush_remote_writes(self) -> None:
        """Do nothing, because it is host memory."""

    def allocate_pinned(self, size_bytes: int) -> int:
        self._check_alive(f"allocate {size_bytes} bytes of pinned memory")
        if self.faults.strikes("allocation"):
            raise MemoryError(f"{self.label}: no {size_bytes} bytes of page-locked host memory")
        mapping = mmap.mmap(-1, max(size_bytes, 1))
        with _lock:
            address = address_of(mapping)
            _pinned[address] = mapping
            _host_memory.add(address, len(mapping))
        return address

    def free_pinned(self, address: int) -> None:
        self.synchronize()
        with _lock:
            if _host_memory.remove(address) is None:
                raise BackendError(
                    f"{self.label}: cannot free pinned memory: none begins at {address:#x}"
                )
            _pinned.pop(address).close()

    def register_host(self, address: int, size_bytes: int) -> int:
        self._check_alive("register memory")
        with _lock:
            if not address or size_bytes < 1:
                self.check(Code.INVALID_VALUE, f"register {size_bytes} bytes at {address:#x}")
            if _registered.overlaps(address, size_bytes):
                self.check(Code.ALREADY_REGISTERED, f"register {size_bytes} bytes at {address:#x}")
            _registered.add(address, size_bytes)
        return address

    def unregister_host(self, address: int) -> None:
        with _lock:
            if _registered.remove(address) is None:
                self.check(Code.NOT_REGISTERED, f"unregister memory at {address:#x}")

    def export_memory(self, address: int) -> Exported | None:
        self._check_alive("export memory")
        if self.faults.strikes("ipc"):
            self.check(Code.INVALID_VALUE, f"export memory at {address:#x}")
        if self._arena.used.start_of(address) is None:
            if self.is_managed(address):
                return None
            self.check(Code.INVALID_VALUE, f"export memory at {address:#x}, which is not its own")
        arena = self._arena
        return Exported(arena.handle(), address - arena.address, arena.size_bytes)

    def open_exported(self, handle: bytes) -> int:
        self._check_alive("open memory of another process")
        if self.faults.strikes("ipc"):
            self.check(Code.INVALID_VALUE, "open memory of another process")
        return _peers.open(handle)

    def close_exported(self, base: int) -> None:
        self.synchronize()
        _peers.close(base)

    def can_access(self, number: int) -> bool:
        return 0 <= number < device_count()

    # --- work -------------------------------------------------------------------------------------

    def _put(
        self, stream: int, command: Command, arguments: Sequence[int], what: str, keep: object
    ) -> None:
        number = self._streams.put(stream, command, arguments, keep)
        if number < 0:
            self.check(-number, what)

    def _disturb(self, kind: str, stream: int) -> None:
        """Inject the faults that a test wants into work that is about to be enqueued."""
        if delay_ns := self.faults.delays_ns.get(kind):
            self._put(stream, Command.DELAY, (delay_ns,), f"enqueue a {kind}", None)
        if self.faults.strikes(kind):
            self.check(Code.LAUNCH_FAILED, f"enqueue a {kind}, as a test has requested")

    def copy(self, destination: int, source: int, size_bytes: int, stream: int) -> None:
        self._check_alive("copy")
        self._disturb("copy", stream)
        if size_bytes < 0:
            self.check(Code.INVALID_VALUE, f"copy {size_bytes} bytes")
        if not size_bytes:
            return
        keep = None
        if not self._is_known(source):  # pageable memory may change as soon as this returns
            keep = np.frombuffer(ctypes.string_at(source, size_bytes), np.uint8)
            source = keep.ctypes.data
        self._put(stream, Command.COPY, (destination, source, size_bytes), "copy", keep)
        if not self._is_known(destination):
            self.synchronize_stream(stream)  # as drivers do

    def _is_known(self, address: int) -> bool:
        """Return whether a GPU could access this memory directly."""
        ranges = (_host_memory, _registered, _peers.ranges)
        known = self._arena.used.start_of(address) is not None
        if known or any(each.start_of(address) is not None for each in ranges):
            return True
        return _owner_of(address) is not None

    def fill(self, address: int, pattern: bytes, count: int, stream: int) -> None:
        self._check_alive("fill memory")
        self._disturb("copy", stream)
        if len(pattern) not in (1, 2, 4, 8, 16) or count < 0:
            raise ArgumentError(f"{self.label}: a pattern has 1, 2, 4, 8 or 16 bytes: {pattern!r}")
        if count:
            low, high = np.frombuffer(pattern.ljust(16, b"\0"), np.int64).tolist()
            arguments = address, len(pattern), low, high, count
            self._put(stream, Command.FILL, arguments, "fill memory", None)

    def call(
        self,
        stream: int,
        calls: Sequence[tuple[int, ...]],
        keep: object,
        what: str,
        kind: str = "launch",
    ) -> None:
        """Enqueue a kernel: functions by address, each with at most eight words, run in order."""
        self._check_alive(what)
        self._disturb(kind, stream)
        if kind == "launch" and self.faults.strikes("run"):
            self._put(stream, Command.FAIL, (int(Code.LAUNCH_FAILED),), what, None)
            return
        for function_and_words in calls:
            self._put(stream, Command.CALL, function_and_words, what, keep)

    # --- kernels ----------------------------------------------------------------------------------

    def load_module(self, image: bytes) -> int:
        """Load a shared library of kernels ``void name(blocks, threads, arguments)``.

        The first two are 64-bit integers; the last one points to the addresses of the arguments.
        """
        self._check_alive("load a module")
        file = os.memfd_create("gpucoll-module", os.MFD_CLOEXEC)
        try:
            with open(file, "wb", closefd=False) as written:
                written.write(image)
            # The file stays open as long as the module, because the loader identifies libraries by
            # this name.
            library = ctypes.CDLL(f"/proc/self/fd/{file}", mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            os.close(file)
            raise BackendError(f"{self.label}: cannot load a module: {error}") from None
        module: int = library._handle
        self._modules[module] = library, file
        return module

    def unload_module(self, module: int) -> None:
        self._module(module)
        self.synchronize()
        _, file = self._modules.pop(module)
        _dlclose(module)
        os.close(file)

    def _module(self, module: int) -> ctypes.CDLL:
        if module not in self._modules:
            raise BackendError(f"{self.label}: there is no module {module:#x}")
        return self._modules[module][0]

    def function_of(self, module: int, name: str) -> int:
        try:
            function = self._module(module)[name]
        except AttributeError:
            raise BackendError(f"{self.label}: the module has no kernel {name}") from None
        address: int | None = ctypes.cast(function, ctypes.c_void_p).value
        return address or 0

    def launch(
        self, function: int, blocks: int, threads: int, arguments: Sequence[bytes], stream: int
    ) -> None:
        if blocks < 1 or threads < 1:
            self.check(Code.INVALID_VALUE, f"launch {blocks} blocks of {threads} threads")
        held = [np.frombuffer(bytes(argument), np.uint8) for argument in arguments]
        table = np.array([argument.ctypes.data for argument in held], np.int64)
        words = function, blocks, threads, table.ctypes.data
        self.call(stream, [words], (held, table), "launch a kernel")

    # --- facts ------------------------------------------------------------------------------------

    def attribute(self, name: str) -> int | None:
        return {"multiprocessor_count": _MULTIPROCESSORS, "stream_wait_value": 1}.get(name)

    def driver_version(self) -> str:
        return "1.0"

    def reset_failure(self) -> None:
        """Make the device work again after a kernel has failed, which a GPU never does."""
        self._streams.state.errors[self.number] = 0

    def counts(self) -> dict[str, int]:
        """Return counts: streams and bytes of the device, and other resources of the process."""
        free, total = self.memory_bytes()
        return {
            "streams": len(self._streams.of_device(self.number)),
            "events": self._streams.events(),
            "bytes": total - free,
            "pinned": len(_pinned),
            "registered": len(_registered.sizes),
            "opened": len(_peers.ranges.sizes),
        }


class _Before(threading.local):
    """Devices that were current before this thread entered this one."""

    def __init__(self) -> None:
        self.numbers: list[int] = []


def _identity(number: int) -> Identity:
    """Return the device's identity: the same for every process of this host."""
    host = config.variable(config.HOST_ID) or _boot_id()
    unique = uuid.uuid5(_NAMESPACE, f"{host}/{number}")
    return Identity("Host device (no GPU)", f"HOST-{unique}", f"host:{number}")


def _boot_id() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return os.uname().nodename
