"""The threads of Host devices' streams, compiled, and the functions that enqueue commands.

Each stream is a ring of commands and one thread, which runs them in order and never takes the
interpreter. Everything works on the memory that `gpucoll.devices.host.words` describes; `state` is
its address. Functions return a code as a vendor's driver does.
"""

from __future__ import annotations

import numpy as np

from gpucoll.blocks import Words
from gpucoll.devices.host.words import (
    EVENT_HANDLES,
    EVENT_IS_NEW,
    HANDLE_STEP,
    MOST_DEVICES,
    MOST_EVENTS,
    MOST_STREAMS,
    RECORDED_SHIFT,
    ROW_WORDS,
    ROWS,
    STREAM_HANDLES,
    Code,
    Command,
    State,
    Stream,
)
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import (
    MACHINE,
    add32,
    call_words,
    exchange32,
    exchange64,
    load32_acquire,
    load32_ordered,
    load64_acquire,
    load64_ordered,
    signed32,
    store32_release,
)

_NUMBER_MASK = (1 << RECORDED_SHIFT) - 1

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}.get(MACHINE, -1)
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYBODY = 0, 1, 2**31 - 1
_LOOKS = 30
"""How often a thread looks again, a CPU time slice apart, before it sleeps."""
_SLICE_NS = 500_000
"""Longest sleep of a thread that waits for a value, because the writer need not wake it."""
_BILLION = 1_000_000_000

_i64, _i32 = types.int64, types.int32
_syscall = types.ExternalFunction("syscall", _i64(_i64, _i64, _i64, _i64, _i64, _i64, _i64))
_sched_yield = types.ExternalFunction("sched_yield", _i32())
_memmove = types.ExternalFunction("memmove", _i64(_i64, _i64, _i64))
_memset = types.ExternalFunction("memset", _i64(_i64, _i32, _i64))
_nanosleep = types.ExternalFunction("nanosleep", _i32(_i64, _i64))
_getspecific = types.ExternalFunction("pthread_getspecific", _i64(_i32))
_setspecific = types.ExternalFunction("pthread_setspecific", _i32(_i32, _i64))


# --- sleeping and waking --------------------------------------------------------------------------


@inline
def _wake(word: int) -> None:
    _syscall(_SYS_FUTEX, word, _FUTEX_WAKE, _EVERYBODY, 0, 0, 0)


@inline
def _ring(bell: int) -> None:
    """Wake threads that sleep on a bell; what they must see was stored with a full fence."""
    if load32_ordered(bell + 4) > 0:
        add32(bell, 1)
        _wake(bell)


@inline
def _announce(bell: int) -> int:
    """Announce a sleeper; return the bell's count. The caller must then check everything again."""
    add32(bell + 4, 1)
    return load32_ordered(bell)


@inline
def _sleep(word: int, seen: int, timeout: int) -> None:
    """Sleep while a 32-bit word has the value seen, at most for the timespec, if there is one."""
    _syscall(_SYS_FUTEX, word, _FUTEX_WAIT, signed32(seen), timeout, 0, 0)


@inline
def _leave(bell: int) -> None:
    add32(bell + 4, -1)


# --- handles --------------------------------------------------------------------------------------


@inline
def _stream_at(state: State, place: int) -> Stream:
    return Stream(state.streams.address + Stream.n_bytes * place)


@inline
def _current(state: State) -> int:
    """Return the number of the thread's current device, by default 0."""
    number = _getspecific(np.int32(state.thread_key))
    return number - 1 if number > 0 else 0


@inline
def _place_of(state: State, handle: int) -> int:
    """Return a stream's place, or -1: there is no such stream."""
    if 0 <= handle <= 2:
        handle = state.default_streams[_current(state)]
    place = (handle - STREAM_HANDLES) // HANDLE_STEP
    if handle < STREAM_HANDLES or place >= MOST_STREAMS or handle % HANDLE_STEP != 0:
        return -1
    return place if _stream_at(state, place).is_open != 0 else -1


@inline
def _event_at(state: State, handle: int) -> int:
    """Return the address of an event's word, or 0: there is no such event."""
    place = (handle - EVENT_HANDLES) // HANDLE_STEP
    if handle < EVENT_HANDLES or place >= MOST_EVENTS or handle % HANDLE_STEP != 0:
        return 0
    address = state.events.address + 8 * place
    return address if load64_acquire(address) != 0 else 0


@inline
def _failure(state: State, number: int) -> int:
    """Return the code that every call on a device returns, or 0."""
    if state.is_forked != 0:
        return Code.NOT_INITIALISED
    return load64_acquire(state.errors.address + 8 * number)


@inline
def _is_over(state: State, recorded: int) -> bool:
    """Return whether the command to which an event refers is done."""
    stream = _stream_at(state, (recorded >> RECORDED_SHIFT) - 1)
    return load64_acquire(stream.at.done) >= recorded & _NUMBER_MASK


# --- enqueuing commands ---------------------------------------------------------------------------


@inline
def _lock(state: State, stream: Stream) -> None:
    while state.is_forked == 0 and exchange64(stream.at.lock, 1) != 0:
        _sched_yield()


@inline
def _wait_for_room(state: State, stream: Stream) -> None:
    """Wait until the ring has room for one more command; the caller holds the lock."""
    bell = stream.at.done_bell
    tail = stream.tail
    while tail - load64_acquire(stream.at.done) >= ROWS and state.stop == 0:
        seen = _announce(bell)
        if tail - load64_ordered(stream.at.done) >= ROWS and state.stop == 0:
            _sleep(bell, seen, 0)
        _leave(bell)


@inline
def _append(state: State, place: int, command: int, a: int, b: int, row: int) -> int:
    """Enqueue a command with two arguments, or a whole row; return the command's number."""
    stream = _stream_at(state, place)
    _lock(state, stream)
    _wait_for_room(state, stream)
    tail = stream.tail
    to = Words(stream.ring.address + 8 * (tail % ROWS) * ROW_WORDS)
    if row != 0:
        _memmove(to.address, row, 8 * ROW_WORDS)
    else:
        to[0] = command
        to[1] = a
        to[2] = b
    exchange64(stream.at.tail, tail + 1)
    exchange64(stream.at.lock, 0)
    _ring(stream.at.bell)
    return tail + 1


@inline
def _check(state: State, place: int) -> int:
    """Return the code for why the calling thread cannot enqueue on a stream, or 0."""
    if place < 0:
        return Code.INVALID_HANDLE
    number = _stream_at(state, place).device
    code = _failure(state, number)
    if code != 0:
        return code
    return 0 if number == _current(state) else Code.INVALID_HANDLE


@compiled_when_used()
def put_command(state: State, handle: int, row: int) -> int:
    """Enqueue a row; return the command's number, or a negative code."""
    place = _place_of(state, handle)
    code = _check(state, place)
    return -code if code != 0 else _append(state, place, 0, 0, 0, row)


@compiled_when_used()
def put_exit(state: State, place: int) -> int:
    """Let a stream's thread end after its present commands; it accepts no more."""
    _stream_at(state, place).is_open = 0
    return _append(state, place, Command.EXIT, 0, 0, 0)


@compiled_when_used()
def record_event(state: State, event: int, handle: int) -> int:
    """Record an event on a stream."""
    place = _place_of(state, handle)
    code = _check(state, place)
    if code != 0:
        return code
    word = _event_at(state, event)
    if word == 0:
        return Code.INVALID_HANDLE
    number = _append(state, place, Command.NOTHING, 0, 0, 0)
    exchange64(word, ((place + 1) << RECORDED_SHIFT) | number)
    return 0


@compiled_when_used()
def stream_wait_event(state: State, handle: int, event: int, flags: int) -> int:
    """Make later work on a stream wait for an event of any device."""
    place, word = _place_of(state, handle), _event_at(state, event)
    if place < 0 or word == 0:
        return Code.NOT_INITIALISED if state.is_forked != 0 else Code.INVALID_HANDLE
    code = _failure(state, _stream_at(state, place).device)
    if code != 0:
        return code
    if flags != 0:
        return Code.INVALID_VALUE
    recorded = load64_acquire(word)
    if recorded != EVENT_IS_NEW and not _is_over(state, recorded):
        other = (recorded >> RECORDED_SHIFT) - 1
        _append(state, place, Command.WAIT_FOR_STREAM, other, recorded & _NUMBER_MASK, 0)
    return 0


@compiled_when_used()
def query_event(state: State, event: int) -> int:
    """Return 0 if an event is reached or was never recorded."""
    word = _event_at(state, event)
    if word == 0:
        return Code.NOT_INITIALISED if state.is_forked != 0 else Code.INVALID_HANDLE
    recorded = load64_acquire(word)
    if recorded == EVENT_IS_NEW:
        return Code.NOT_INITIALISED if state.is_forked != 0 else 0
    stream = _stream_at(state, (recorded >> RECORDED_SHIFT) - 1)
    is_over = _is_over(state, recorded)
    code = _failure(state, stream.device)
    if code != 0:
        return code
    return 0 if is_over else Code.NOT_READY


@compiled_when_used()
def stream_wait_value(state: State, handle: int, address: int, value: int) -> int:
    """Make later work on a stream wait until a 32-bit word is at least `value`, modulo 2**32."""
    place = _place_of(state, handle)
    code = _check(state, place)
    if code == 0 and (address == 0 or address % 4 != 0):
        code = Code.INVALID_VALUE
    if code == 0:
        _append(state, place, Command.WAIT_FOR_VALUE, address, value, 0)
    return code


@compiled_when_used()
def stream_write_value(state: State, handle: int, address: int, value: int) -> int:
    """Store a 32-bit word after all present work on the stream, and after all its stores."""
    place = _place_of(state, handle)
    code = _check(state, place)
    if code == 0 and (address == 0 or address % 4 != 0):
        code = Code.INVALID_VALUE
    if code == 0:
        _append(state, place, Command.WRITE_VALUE, address, value, 0)
    return code


@compiled_when_used()
def is_capturing(state: State, handle: int, answer: int) -> int:
    """Report that no graph is captured: these devices have none."""
    store32_release(answer, 0)
    return 0 if _place_of(state, handle) >= 0 else Code.INVALID_HANDLE


@compiled_when_used()
def get_device(state: State, answer: int) -> int:
    """Store the number of the thread's current device."""
    store32_release(answer, _current(state))
    return 0


@compiled_when_used()
def set_device(state: State, number: int) -> int:
    """Make a device the thread's current one."""
    number = signed32(number)
    if number < 0 or number >= MOST_DEVICES or state.default_streams[number] == 0:
        return Code.INVALID_DEVICE
    _setspecific(np.int32(state.thread_key), number + 1)
    return 0


# --- looking at streams ---------------------------------------------------------------------------


@compiled_when_used()
def place_of(state: State, handle: int) -> int:
    """Return a stream's place, or -1, for Python."""
    return _place_of(state, handle)


@compiled_when_used()
def wait_for(state: State, place: int, number: int, timeout: int) -> int:
    """Sleep until a command is done, at most for the timespec; return whether it is."""
    stream = _stream_at(state, place)
    bell, looks = stream.at.done_bell, 0
    while load64_acquire(stream.at.done) < number and looks < _LOOKS:
        _sched_yield()
        looks += 1
    if load64_acquire(stream.at.done) < number:
        seen = _announce(bell)
        if load64_ordered(stream.at.done) < number and state.is_forked == 0:
            _sleep(bell, seen, timeout)
        _leave(bell)
    return 1 if load64_acquire(stream.at.done) >= number else 0


# --- the thread -----------------------------------------------------------------------------------


@inline
def _must_end(state: State, number: int) -> bool:
    """Return whether a thread must stop waiting: the process ends, or its device has failed."""
    return (
        load64_acquire(state.at.stop) != 0 or load64_acquire(state.errors.address + 8 * number) != 0
    )


@inline
def _set_timeout(stream: Stream, duration_ns: int) -> int:
    timeout = stream.futex_timeout
    timeout[0] = duration_ns // _BILLION
    timeout[1] = duration_ns % _BILLION
    return timeout.address


@inline
def _wait_for_stream(state: State, stream: Stream, place: int, number: int) -> None:
    """Wait for a command of another stream."""
    other, own = _stream_at(state, place), stream.device
    bell, looks = other.at.done_bell, 0
    while load64_acquire(other.at.done) < number and not _must_end(state, own):
        if looks < _LOOKS:
            looks += 1
            _sched_yield()
            continue
        timeout = _set_timeout(stream, 20 * _SLICE_NS)
        seen = _announce(bell)
        if load64_ordered(other.at.done) < number:
            _sleep(bell, seen, timeout)
        _leave(bell)


@inline
def _wait_for_value(state: State, stream: Stream, address: int, value: int) -> None:
    """Wait until a word is at least `value`, by the sign of their difference modulo 2**32."""
    looks, own = 0, stream.device
    while True:
        seen = load32_acquire(address)
        if signed32(signed32(seen) - signed32(value)) >= 0 or _must_end(state, own):
            return
        if looks < _LOOKS:
            looks += 1
            _sched_yield()
        else:
            _sleep(address, seen, _set_timeout(stream, _SLICE_NS))


@inline
def _delay(state: State, stream: Stream, duration_ns: int) -> None:
    """Do nothing for the duration, in slices."""
    own = stream.device
    while duration_ns > 0 and not _must_end(state, own):
        slice_ns = min(duration_ns, 10 * _SLICE_NS)
        _nanosleep(_set_timeout(stream, slice_ns), 0)
        duration_ns -= slice_ns


@inline
def _fill(row: Words) -> None:
    """Write a pattern repeatedly: copy what is written already, twice as much each time."""
    address, size_bytes = row[1], row[2]
    whole = size_bytes * row[5]
    if size_bytes == 1:
        _memset(address, np.int32(row[3] & 255), whole)
        return
    done = min(size_bytes, whole)
    _memmove(address, row.address + 24, done)
    while done < whole:
        more = min(done, whole - done)
        _memmove(address + done, address, more)
        done += more


@inline
def _run(state: State, stream: Stream, row: Words) -> None:
    """Run one command."""
    command = row[0]
    if command == Command.CALL:
        call_words(row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9])
    elif command == Command.COPY:
        _memmove(row[1], row[2], row[3])
    elif command == Command.FILL:
        _fill(row)
    elif command == Command.WAIT_FOR_STREAM:
        _wait_for_stream(state, stream, row[1], row[2])
    elif command == Command.WRITE_VALUE:
        exchange32(row[1], row[2])
        _wake(row[1])
    elif command == Command.WAIT_FOR_VALUE:
        _wait_for_value(state, stream, row[1], row[2])
    elif command == Command.DELAY:
        _delay(state, stream, row[1])
    elif command == Command.FAIL:
        exchange64(state.errors.address + 8 * stream.device, row[1])


@inline
def _wait_for_command(state: State, stream: Stream, done: int) -> None:
    """Sleep until there is a command."""
    looks, bell = 0, stream.at.bell
    while load64_acquire(stream.at.tail) == done and looks < _LOOKS:
        looks += 1
        _sched_yield()
    if load64_acquire(stream.at.tail) == done:
        seen = _announce(bell)
        if load64_ordered(stream.at.tail) == done and load64_ordered(state.at.stop) == 0:
            _sleep(bell, seen, 0)
        _leave(bell)


@compiled_when_used()
def run_stream(stream: Stream) -> int:
    """Run a stream's commands in order: the start function for `pthread_create`."""
    state, done, goes_on = stream.state, stream.done, True
    while goes_on and load64_acquire(state.at.stop) == 0:
        if load64_acquire(stream.at.tail) == done:
            _wait_for_command(state, stream, done)
            continue
        row = Words(stream.ring.address + 8 * (done % ROWS) * ROW_WORDS)
        if row[0] == Command.EXIT:
            goes_on = False
        elif load64_acquire(state.errors.address + 8 * stream.device) == 0:
            _run(state, stream, row)
        done += 1
        exchange64(stream.at.done, done)
        _ring(stream.at.done_bell)
    exchange64(stream.at.is_running, 0)
    return 0


@compiled_when_used()
def stop_all(state: State) -> int:
    """Let every thread end where it is, and wake all that sleep."""
    exchange64(state.at.stop, 1)
    for place in range(MOST_STREAMS):
        stream = _stream_at(state, place)
        if load64_acquire(stream.at.is_running) != 0:
            add32(stream.at.bell, 1)
            _wake(stream.at.bell)
            add32(stream.at.done_bell, 1)
            _wake(stream.at.done_bell)
    return 0
