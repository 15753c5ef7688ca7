"""Streams and events of this process's Host devices: rings of commands, each with a thread.

They are made with the first device and never freed, so that the use of an old handle is detected. A
forked child has a copy in which nothing runs, and its calls report that.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpucoll.devices.foreign_library import address_of
from gpucoll.devices.host import loop
from gpucoll.devices.host.words import (
    EVENT_HANDLES,
    EVENT_IS_NEW,
    HANDLE_STEP,
    MOST_DEVICES,
    MOST_EVENTS,
    MOST_STREAMS,
    RECORDED_SHIFT,
    ROW_WORDS,
    STREAM_HANDLES,
    Code,
    Command,
    State,
    Stream,
)
from gpucoll.errors import BackendError

# --- a driver's functions: compiled functions with the process's state already bound --------------

# Libraries call a driver's functions by address. So each of them gets a few instructions, made
# here, that put the address of the state before the arguments.


class Entries:
    """The functions of a driver's library.

    Attributes
    ----------
    addresses : dict
        Their addresses, by the names of `gpucoll.backends.gpu.enqueue_words.DriverTable`.
    """

    def __init__(self, state: int) -> None:
        self.record_event = _entry("record_event", state, loop.record_event, 2)
        self.stream_wait_event = _entry("stream_wait_event", state, loop.stream_wait_event, 3)
        self.query_event = _entry("query_event", state, loop.query_event, 1)
        self.stream_wait_value = _entry("stream_wait_value", state, loop.stream_wait_value, 3)
        self.stream_write_value = _entry("stream_write_value", state, loop.stream_write_value, 3)
        self.is_capturing = _entry("is_capturing", state, loop.is_capturing, 2)
        self.get_device = _entry("get_device", state, loop.get_device, 1)
        self.set_device = _entry("set_device", state, loop.set_device, 1)
        self.addresses = {
            "RECORD": address_of(self.record_event),
            "WAIT": address_of(self.stream_wait_event),
            "IS_CAPTURING": address_of(self.is_capturing),
            "GET_DEVICE": address_of(self.get_device),
            "SET_DEVICE": address_of(self.set_device),
        }

    def current_device(self) -> int:
        """Return the number of the thread's current device."""
        number = ctypes.c_int()
        self.get_device(ctypes.addressof(number))
        return number.value


def _entry(name: str, state: int, function: Any, n_arguments: int) -> Callable[..., int]:
    """Return a function of `n_arguments` words that calls another one with the state first."""
    from llvmlite import ir

    from gpucoll.kernels.cpu.codegen import I64, compile_function

    module = ir.Module(name=name)
    kind = ir.FunctionType(I64, [I64] * n_arguments)
    made = ir.Function(module, kind, name=f"gpucoll_host_{name}")
    b = ir.IRBuilder(made.append_basic_block("entry"))
    target = ir.FunctionType(I64, [I64] * (n_arguments + 1)).as_pointer()
    called = b.inttoptr(I64(function.address), target)
    b.ret(b.call(called, [I64(state), *made.args]))
    words = [ctypes.c_int64] * n_arguments
    result: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int64, *words)(compile_function(made))
    return result


@functools.cache
def entries(state: int) -> Entries:
    """Return the entries of a process's state."""
    return Entries(state)


# --- streams and events ---------------------------------------------------------------------------


_SIG_SETMASK, _SIGNAL_SET_BYTES = 2, 128
_STACK_BYTES = 1 << 20
_WAIT_NS = 20_000_000
"""How long a wait lasts before it lets Python check for signals."""


class _Kept:
    """Objects that a stream's commands use, until the commands are done."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries: deque[tuple[int, object]] = deque()

    def let_go(self, done: int) -> None:
        """Release objects of commands that are done; the caller holds the lock."""
        while self.entries and self.entries[0][0] <= done:
            self.entries.popleft()


class Streams:
    """All streams and events of this process.

    Attributes
    ----------
    address : int
        Address of the memory for the compiled functions.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, State.n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.state = State.over(np.frombuffer(self._memory, np.int64))
        self.address = self.state.address
        self._libc = ctypes.CDLL(None)
        key = ctypes.c_uint()
        if self._libc.pthread_key_create(ctypes.byref(key), None):
            raise BackendError("host: no thread-specific key is left in this process")
        self.state.thread_key = key.value
        self._lock = threading.RLock()
        self._threads: dict[int, ctypes.c_ulong] = {}
        self._free_events: list[int] = []
        self._events_made = 0
        self._kept: dict[int, _Kept] = {}
        self._wait = np.frombuffer(bytearray(16), np.int64)
        self._wait[1] = _WAIT_NS
        put: Callable[[int, int, int], int] = loop.put_command.ctypes
        self._put = put
        self._wait_for: Callable[..., int] = loop.wait_for.ctypes
        self._place: Callable[[int, int], int] = loop.place_of.ctypes

    # --- streams ----------------------------------------------------------------------------------

    def stream(self, place: int) -> Stream:
        """Return the words of a stream."""
        return Stream(self.state.streams.address + Stream.n_bytes * place)

    def create(self, number: int) -> int:
        """Return a new stream of a device."""
        with self._lock:
            self._join_ended()
            if (place := self._free_place()) is None:
                raise BackendError(f"host:{number}: there are {MOST_STREAMS} streams already")
            stream = self.stream(place)
            stream.device, stream.state, stream.is_running = number, self.state, 1
            self._kept[place] = _Kept()
            try:
                self._threads[place] = self._start_thread(stream.address, number)
            except BaseException:
                stream.is_running = 0
                raise
            stream.is_open = 1
        return STREAM_HANDLES + place * HANDLE_STEP

    def _free_place(self) -> int | None:
        return next((place for place in range(MOST_STREAMS) if place not in self._threads), None)

    def _start_thread(self, stream: int, number: int) -> ctypes.c_ulong:
        everything = (ctypes.c_ubyte * _SIGNAL_SET_BYTES)(*[255] * _SIGNAL_SET_BYTES)
        before = (ctypes.c_ubyte * _SIGNAL_SET_BYTES)()
        attributes, handle = (ctypes.c_ubyte * 128)(), ctypes.c_ulong()
        function, libc = ctypes.c_void_p(loop.run_stream.address), self._libc
        libc.pthread_attr_init(attributes)
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK_BYTES))
        libc.pthread_sigmask(_SIG_SETMASK, everything, before)  # the thread inherits the mask
        try:
            given = ctypes.byref(handle), attributes, function, ctypes.c_void_p(stream)
            code = libc.pthread_create(*given)
        finally:
            libc.pthread_sigmask(_SIG_SETMASK, before, None)
            libc.pthread_attr_destroy(attributes)
        if code:
            raise BackendError(f"host:{number}: no thread for a stream: {os.strerror(code)}")
        return handle

    def place(self, handle: int, what: str) -> int:
        """Return a stream's place; BackendError if there is no such stream."""
        self.check_process(what)
        place = self._place(self.address, handle)
        if place < 0:
            raise BackendError(f"host: cannot {what}: there is no stream {handle:#x}")
        return place

    def destroy(self, handle: int) -> None:
        """Let a stream's thread end after its present commands."""
        with self._lock:
            place = self.place(handle, "destroy a stream")
            if handle in map(self.state.default_streams.__getitem__, range(MOST_DEVICES)):
                raise BackendError("host: the default stream cannot be destroyed")
            loop.put_exit.ctypes(self.address, place)

    def _join_ended(self) -> None:
        """Join threads that have ended, whose places become free."""
        for place, handle in list(self._threads.items()):
            if not self.stream(place).is_running:
                self._libc.pthread_join(handle, None)
                del self._threads[place], self._kept[place]

    def running(self) -> int:
        """Return the number of threads that have not ended."""
        with self._lock:
            self._join_ended()
            return len(self._threads)

    def of_device(self, number: int) -> list[int]:
        """Return the places of a device's streams, including destroyed ones that still run."""
        with self._lock:
            self._join_ended()
            return [place for place in self._threads if self.stream(place).device == number]

    # --- commands ---------------------------------------------------------------------------------

    def put(self, handle: int, command: Command, arguments: Sequence[int], keep: object) -> int:
        """Enqueue a command; return its number, or a negative code.

        `keep` stays alive until the command is done.
        """
        row = np.zeros(ROW_WORDS, np.int64)
        row[0] = command
        row[1 : 1 + len(arguments)] = arguments
        place = self._place(self.address, handle)
        if (kept := self._kept.get(place)) is None:
            return self._put(self.address, handle, row.ctypes.data)  # returns the reason as a code
        with kept.lock:  # a lock of this stream only, because a full ring makes this wait
            number = self._put(self.address, handle, row.ctypes.data)
            kept.let_go(self.stream(place).done)
            if number > 0 and keep is not None:
                kept.entries.append((number, keep))
        return number

    def tail(self, place: int) -> int:
        """Return the number of the last command that was enqueued on a stream."""
        return self.stream(place).tail

    def is_done(self, place: int, number: int) -> bool:
        """Return whether a command is done, and release the objects that it used."""
        done = self.stream(place).done
        if (kept := self._kept.get(place)) is not None:
            with kept.lock:
                kept.let_go(done)
        return done >= number

    def wait(self, place: int, number: int) -> None:
        """Wait until a command is done; Ctrl-C interrupts the wait."""
        while not self._wait_for(self.address, place, number, self._wait.ctypes.data):
            self.check_process("wait for a stream")
        self.is_done(place, number)

    # --- events -----------------------------------------------------------------------------------

    def create_event(self) -> int:
        """Return a new event."""
        self.check_process("make an event")
        with self._lock:
            if self._free_events:
                place = self._free_events.pop()
            elif self._events_made < MOST_EVENTS:
                place, self._events_made = self._events_made, self._events_made + 1
            else:
                raise BackendError(f"host: there are {MOST_EVENTS} events already")
            self.state.events[place] = EVENT_IS_NEW
        return EVENT_HANDLES + place * HANDLE_STEP

    def destroy_event(self, event: int) -> None:
        """Destroy an event."""
        place, rest = divmod(event - EVENT_HANDLES, HANDLE_STEP)
        with self._lock:
            self.check_process("destroy an event")
            is_one = event >= EVENT_HANDLES and not rest and place < self._events_made
            if not is_one or not self.state.events[place]:
                raise BackendError(f"host: cannot destroy an event: there is none {event:#x}")
            self.state.events[place] = 0
            self._free_events.append(place)

    def recorded(self, event: int) -> tuple[int, int]:
        """Return the stream's place and the command to which an event refers; (-1, 0): none."""
        place, rest = divmod(event - EVENT_HANDLES, HANDLE_STEP)
        word = self.state.events[place] if 0 <= place < MOST_EVENTS and not rest else 0
        if word == EVENT_IS_NEW or not word:
            return -1, 0
        return (word >> RECORDED_SHIFT) - 1, word & ((1 << RECORDED_SHIFT) - 1)

    def events(self) -> int:
        """Return the number of events."""
        return self._events_made - len(self._free_events)

    # --- the end ----------------------------------------------------------------------------------

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child's copy."""
        return bool(self.state.is_forked)

    def check_process(self, what: str) -> None:
        """Raise BackendError in a forked child."""
        if self.is_forked:
            raise BackendError(
                f"host: cannot {what}: this process was forked from one that uses Host devices, "
                "whose threads it does not have: start processes by spawn, or fork before the "
                "first use, as with a GPU"
            )

    def failure(self, number: int) -> int:
        """Return the code that every call on a device returns, or 0."""
        return int(Code.NOT_INITIALISED) if self.is_forked else self.state.errors[number]

    def stop(self) -> None:
        """End every thread where it is, whatever work is left on its stream."""
        if self.is_forked:
            return
        loop.stop_all.ctypes(self.address)
        while self.running():
            loop.stop_all.ctypes(self.address)  # a thread may just have begun to sleep
            time.sleep(0.0002)


_streams: Streams | None = None
_making = threading.Lock()


def streams() -> Streams:
    """Return this process's streams; the first call makes them."""
    global _streams
    with _making:
        if _streams is None:
            made = Streams()
            atexit.register(made.stop)
            _streams = made
    return _streams


def _after_fork() -> None:
    global _making
    _making = threading.Lock()
    if _streams is not None:
        _streams.state.is_forked = 1
        _streams._lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
