"""The threads of Host devices' streams, compiled, and the functions that enqueue commands.

Each stream is a ring of commands and one thread, which runs them in order and never takes the
interpreter. Everything works on the memory that `gpucoll.devices.host.words` describes; `state` is
its address. Functions return a code as a vendor's driver does.
"""

from __future__ import annotations

import numpy as np

from gpucoll.devices.host.words import (
    EVENT_HANDLES,
    EVENT_IS_NEW,
    EVENTS_AT,
    HANDLE_STEP,
    MOST_DEVICES,
    MOST_EVENTS,
    MOST_STREAMS,
    RECORDED_SHIFT,
    ROW_WORDS,
    ROWS,
    STREAM_HANDLES,
    STREAM_WORDS,
    STREAMS_AT,
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
    get,
    load32_acquire,
    load32_ordered,
    load64_acquire,
    load64_ordered,
    put,
    signed32,
    store32_release,
)

# Plain ints, which Numba freezes into the code.
_STREAM_HANDLES, _EVENT_HANDLES, _HANDLE_STEP = STREAM_HANDLES, EVENT_HANDLES, HANDLE_STEP
_THREAD_KEY, _IS_FORKED, _STOP = int(State.THREAD_KEY), int(State.IS_FORKED), int(State.STOP)
_ERRORS, _DEFAULT_STREAMS = int(State.ERRORS), int(State.DEFAULT_STREAMS)
_DEVICE, _IS_OPEN, _LOCK = int(Stream.DEVICE), int(Stream.IS_OPEN), int(Stream.LOCK)
_TAIL, _DONE, _BELL = int(Stream.TAIL), int(Stream.DONE), int(Stream.BELL)
_DONE_BELL, _TIMEOUT = int(Stream.DONE_BELL), int(Stream.FUTEX_TIMEOUT)
_IS_RUNNING, _STATE, _RING = int(Stream.IS_RUNNING), int(Stream.STATE), int(Stream.RING)
_EVENTS_AT, _STREAMS_AT, _STREAM_WORDS = int(EVENTS_AT), int(STREAMS_AT), int(STREAM_WORDS)
_NOTHING, _CALL, _COPY, _FILL = (
    int(Command.NOTHING),
    int(Command.CALL),
    int(Command.COPY),
    int(Command.FILL),
)
_WAIT_FOR_STREAM, _WRITE_VALUE = int(Command.WAIT_FOR_STREAM), int(Command.WRITE_VALUE)
_WAIT_FOR_VALUE, _DELAY = int(Command.WAIT_FOR_VALUE), int(Command.DELAY)
_FAIL, _EXIT = int(Command.FAIL), int(Command.EXIT)
_INVALID_VALUE, _INVALID_DEVICE = int(Code.INVALID_VALUE), int(Code.INVALID_DEVICE)
_INVALID_HANDLE, _NOT_READY = int(Code.INVALID_HANDLE), int(Code.NOT_READY)
_NOT_INITIALISED = int(Code.NOT_INITIALISED)
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
def _wake(word):
    _syscall(_SYS_FUTEX, word, _FUTEX_WAKE, _EVERYBODY, 0, 0, 0)


@inline
def _ring(bell):
    """Wake threads that sleep on a bell; what they must see was stored with a full fence."""
    if load32_ordered(bell + 4) > 0:
        add32(bell, 1)
        _wake(bell)


@inline
def _announce(bell):
    """Announce a sleeper; return the bell's count. The caller must then check everything again."""
    add32(bell + 4, 1)
    return load32_ordered(bell)


@inline
def _sleep(word, seen, timeout):
    """Sleep while a 32-bit word has the value seen, at most for the timespec, if there is one."""
    _syscall(_SYS_FUTEX, word, _FUTEX_WAIT, np.int64(seen), timeout, 0, 0)


@inline
def _leave(bell):
    add32(bell + 4, -1)


# --- handles --------------------------------------------------------------------------------------


@inline
def _stream_at(state, place):
    return state + 8 * (_STREAMS_AT + place * _STREAM_WORDS)


@inline
def _current(state):
    """Return the number of the thread's current device, by default 0."""
    number = _getspecific(np.int32(get(state, _THREAD_KEY)))
    return number - 1 if number > 0 else 0


@inline
def _place_of(state, handle):
    """Return a stream's place, or -1: there is no such stream."""
    if 0 <= handle <= 2:
        handle = get(state, _DEFAULT_STREAMS + _current(state))
    place = (handle - _STREAM_HANDLES) // _HANDLE_STEP
    if handle < _STREAM_HANDLES or place >= MOST_STREAMS or handle % _HANDLE_STEP != 0:
        return -1
    return place if get(_stream_at(state, place), _IS_OPEN) != 0 else -1


@inline
def _event_at(state, handle):
    """Return the address of an event's word, or 0: there is no such event."""
    place = (handle - _EVENT_HANDLES) // _HANDLE_STEP
    if handle < _EVENT_HANDLES or place >= MOST_EVENTS or handle % _HANDLE_STEP != 0:
        return 0
    address = state + 8 * (_EVENTS_AT + place)
    return address if load64_acquire(address) != 0 else 0


@inline
def _failure(state, number):
    """Return the code that every call on a device returns, or 0."""
    if get(state, _IS_FORKED) != 0:
        return _NOT_INITIALISED
    return load64_acquire(state + 8 * (_ERRORS + number))


@inline
def _is_over(state, recorded):
    """Return whether the command to which an event refers is done."""
    stream = _stream_at(state, (recorded >> RECORDED_SHIFT) - 1)
    return load64_acquire(stream + 8 * _DONE) >= recorded & _NUMBER_MASK


# --- enqueuing commands ---------------------------------------------------------------------------


@inline
def _lock(state, stream):
    while get(state, _IS_FORKED) == 0 and exchange64(stream + 8 * _LOCK, 1) != 0:
        _sched_yield()


@inline
def _wait_for_room(state, stream):
    """Wait until the ring has room for one more command; the caller holds the lock."""
    bell = stream + 8 * _DONE_BELL
    tail = get(stream, _TAIL)
    while tail - load64_acquire(stream + 8 * _DONE) >= ROWS and get(state, _STOP) == 0:
        seen = _announce(bell)
        if tail - load64_ordered(stream + 8 * _DONE) >= ROWS and get(state, _STOP) == 0:
            _sleep(bell, seen, 0)
        _leave(bell)


@inline
def _append(state, place, command, a, b, row):
    """Enqueue a command with two arguments, or a whole row; return the command's number."""
    stream = _stream_at(state, place)
    _lock(state, stream)
    _wait_for_room(state, stream)
    tail = get(stream, _TAIL)
    to = stream + 8 * (_RING + (tail % ROWS) * ROW_WORDS)
    if row != 0:
        _memmove(to, row, 8 * ROW_WORDS)
    else:
        put(to, 0, command)
        put(to, 1, a)
        put(to, 2, b)
    exchange64(stream + 8 * _TAIL, tail + 1)
    exchange64(stream + 8 * _LOCK, 0)
    _ring(stream + 8 * _BELL)
    return tail + 1


@inline
def _check(state, place):
    """Return the code for why the calling thread cannot enqueue on a stream, or 0."""
    if place < 0:
        return _INVALID_HANDLE
    number = get(_stream_at(state, place), _DEVICE)
    code = _failure(state, number)
    if code != 0:
        return code
    return 0 if number == _current(state) else _INVALID_HANDLE


@compiled_when_used()
def put_command(state, handle, row):
    """Enqueue a row; return the command's number, or a negative code."""
    place = _place_of(state, handle)
    code = _check(state, place)
    return -code if code != 0 else _append(state, place, 0, 0, 0, row)


@compiled_when_used()
def put_exit(state, place):
    """Let a stream's thread end after its present commands; it accepts no more."""
    put(_stream_at(state, place), _IS_OPEN, 0)
    return _append(state, place, _EXIT, 0, 0, 0)


@compiled_when_used()
def record_event(state, event, handle):
    """Record an event on a stream."""
    place = _place_of(state, handle)
    code = _check(state, place)
    if code != 0:
        return code
    word = _event_at(state, event)
    if word == 0:
        return _INVALID_HANDLE
    number = _append(state, place, _NOTHING, 0, 0, 0)
    exchange64(word, ((place + 1) << RECORDED_SHIFT) | number)
    return 0


@compiled_when_used()
def stream_wait_event(state, handle, event, flags):
    """Make later work on a stream wait for an event of any device."""
    place, word = _place_of(state, handle), _event_at(state, event)
    if place < 0 or word == 0:
        return _NOT_INITIALISED if get(state, _IS_FORKED) != 0 else _INVALID_HANDLE
    code = _failure(state, get(_stream_at(state, place), _DEVICE))
    if code != 0:
        return code
    if flags != 0:
        return _INVALID_VALUE
    recorded = load64_acquire(word)
    if recorded != EVENT_IS_NEW and not _is_over(state, recorded):
        other = (recorded >> RECORDED_SHIFT) - 1
        _append(state, place, _WAIT_FOR_STREAM, other, recorded & _NUMBER_MASK, 0)
    return 0


@compiled_when_used()
def query_event(state, event):
    """Return 0 if an event is reached or was never recorded."""
    word = _event_at(state, event)
    if word == 0:
        return _NOT_INITIALISED if get(state, _IS_FORKED) != 0 else _INVALID_HANDLE
    recorded = load64_acquire(word)
    if recorded == EVENT_IS_NEW:
        return _NOT_INITIALISED if get(state, _IS_FORKED) != 0 else 0
    stream = _stream_at(state, (recorded >> RECORDED_SHIFT) - 1)
    is_over = _is_over(state, recorded)
    code = _failure(state, get(stream, _DEVICE))
    if code != 0:
        return code
    return 0 if is_over else _NOT_READY


@compiled_when_used()
def stream_wait_value(state, handle, address, value):
    """Make later work on a stream wait until a 32-bit word is at least `value`, modulo 2**32."""
    place = _place_of(state, handle)
    code = _check(state, place)
    if code == 0 and (address == 0 or address % 4 != 0):
        code = _INVALID_VALUE
    if code == 0:
        _append(state, place, _WAIT_FOR_VALUE, address, value, 0)
    return code


@compiled_when_used()
def stream_write_value(state, handle, address, value):
    """Store a 32-bit word after all present work on the stream, and after all its stores."""
    place = _place_of(state, handle)
    code = _check(state, place)
    if code == 0 and (address == 0 or address % 4 != 0):
        code = _INVALID_VALUE
    if code == 0:
        _append(state, place, _WRITE_VALUE, address, value, 0)
    return code


@compiled_when_used()
def is_capturing(state, handle, answer):
    """Report that no graph is captured: these devices have none."""
    store32_release(answer, 0)
    return 0 if _place_of(state, handle) >= 0 else _INVALID_HANDLE


@compiled_when_used()
def get_device(state, answer):
    """Store the number of the thread's current device."""
    store32_release(answer, _current(state))
    return 0


@compiled_when_used()
def set_device(state, number):
    """Make a device the thread's current one."""
    number = signed32(number)
    if number < 0 or number >= MOST_DEVICES or get(state, _DEFAULT_STREAMS + number) == 0:
        return _INVALID_DEVICE
    _setspecific(np.int32(get(state, _THREAD_KEY)), number + 1)
    return 0


# --- looking at streams ---------------------------------------------------------------------------


@compiled_when_used()
def place_of(state, handle):
    """Return a stream's place, or -1, for Python."""
    return _place_of(state, handle)


@compiled_when_used()
def wait_for(state, place, number, timeout):
    """Sleep until a command is done, at most for the timespec; return whether it is."""
    stream = _stream_at(state, place)
    bell, looks = stream + 8 * _DONE_BELL, 0
    while load64_acquire(stream + 8 * _DONE) < number and looks < _LOOKS:
        _sched_yield()
        looks += 1
    if load64_acquire(stream + 8 * _DONE) < number:
        seen = _announce(bell)
        if load64_ordered(stream + 8 * _DONE) < number and get(state, _IS_FORKED) == 0:
            _sleep(bell, seen, timeout)
        _leave(bell)
    return 1 if load64_acquire(stream + 8 * _DONE) >= number else 0


# --- the thread -----------------------------------------------------------------------------------


@inline
def _must_end(state, number):
    """Return whether a thread must stop waiting: the process ends, or its device has failed."""
    return (
        load64_acquire(state + 8 * _STOP) != 0
        or load64_acquire(state + 8 * (_ERRORS + number)) != 0
    )


@inline
def _set_timeout(stream, duration_ns):
    timeout = stream + 8 * _TIMEOUT
    put(timeout, 0, duration_ns // _BILLION)
    put(timeout, 1, duration_ns % _BILLION)
    return timeout


@inline
def _wait_for_stream(state, stream, place, number):
    """Wait for a command of another stream."""
    other, own = _stream_at(state, place), get(stream, _DEVICE)
    bell, looks = other + 8 * _DONE_BELL, 0
    while load64_acquire(other + 8 * _DONE) < number and not _must_end(state, own):
        if looks < _LOOKS:
            looks += 1
            _sched_yield()
            continue
        timeout = _set_timeout(stream, 20 * _SLICE_NS)
        seen = _announce(bell)
        if load64_ordered(other + 8 * _DONE) < number:
            _sleep(bell, seen, timeout)
        _leave(bell)


@inline
def _wait_for_value(state, stream, address, value):
    """Wait until a word is at least `value`, by the sign of their difference modulo 2**32."""
    looks, own = 0, get(stream, _DEVICE)
    while True:
        seen = load32_acquire(address)
        if np.int32(np.int64(seen) - signed32(value)) >= 0 or _must_end(state, own):
            return
        if looks < _LOOKS:
            looks += 1
            _sched_yield()
        else:
            _sleep(address, seen, _set_timeout(stream, _SLICE_NS))


@inline
def _delay(state, stream, duration_ns):
    """Do nothing for the duration, in slices."""
    own = get(stream, _DEVICE)
    while duration_ns > 0 and not _must_end(state, own):
        slice_ns = min(duration_ns, 10 * _SLICE_NS)
        _nanosleep(_set_timeout(stream, slice_ns), 0)
        duration_ns -= slice_ns


@inline
def _fill(row):
    """Write a pattern repeatedly: copy what is written already, twice as much each time."""
    address, size_bytes = get(row, 1), get(row, 2)
    whole = size_bytes * get(row, 5)
    if size_bytes == 1:
        _memset(address, np.int32(get(row, 3) & 255), whole)
        return
    done = min(size_bytes, whole)
    _memmove(address, row + 24, done)
    while done < whole:
        more = min(done, whole - done)
        _memmove(address + done, address, more)
        done += more


@inline
def _run(state, stream, row):
    """Run one command."""
    command = get(row, 0)
    if command == _CALL:
        call_words(
            get(row, 1),
            get(row, 2),
            get(row, 3),
            get(row, 4),
            get(row, 5),
            get(row, 6),
            get(row, 7),
            get(row, 8),
            get(row, 9),
        )
    elif command == _COPY:
        _memmove(get(row, 1), get(row, 2), get(row, 3))
    elif command == _FILL:
        _fill(row)
    elif command == _WAIT_FOR_STREAM:
        _wait_for_stream(state, stream, get(row, 1), get(row, 2))
    elif command == _WRITE_VALUE:
        exchange32(get(row, 1), get(row, 2))
        _wake(get(row, 1))
    elif command == _WAIT_FOR_VALUE:
        _wait_for_value(state, stream, get(row, 1), get(row, 2))
    elif command == _DELAY:
        _delay(state, stream, get(row, 1))
    elif command == _FAIL:
        exchange64(state + 8 * (_ERRORS + get(stream, _DEVICE)), get(row, 1))


@inline
def _wait_for_command(state, stream, done):
    """Sleep until there is a command."""
    looks, bell = 0, stream + 8 * _BELL
    while load64_acquire(stream + 8 * _TAIL) == done and looks < _LOOKS:
        looks += 1
        _sched_yield()
    if load64_acquire(stream + 8 * _TAIL) == done:
        seen = _announce(bell)
        if load64_ordered(stream + 8 * _TAIL) == done and load64_ordered(state + 8 * _STOP) == 0:
            _sleep(bell, seen, 0)
        _leave(bell)


@compiled_when_used()
def run_stream(stream):
    """Run a stream's commands in order: the start function for `pthread_create`."""
    state, done, goes_on = get(stream, _STATE), get(stream, _DONE), True
    while goes_on and load64_acquire(state + 8 * _STOP) == 0:
        if load64_acquire(stream + 8 * _TAIL) == done:
            _wait_for_command(state, stream, done)
            continue
        row = stream + 8 * (_RING + (done % ROWS) * ROW_WORDS)
        if get(row, 0) == _EXIT:
            goes_on = False
        elif load64_acquire(state + 8 * (_ERRORS + get(stream, _DEVICE))) == 0:
            _run(state, stream, row)
        done += 1
        exchange64(stream + 8 * _DONE, done)
        _ring(stream + 8 * _DONE_BELL)
    exchange64(stream + 8 * _IS_RUNNING, 0)
    return 0


@compiled_when_used()
def stop_all(state):
    """Let every thread end where it is, and wake all that sleep."""
    exchange64(state + 8 * _STOP, 1)
    for place in range(MOST_STREAMS):
        stream = _stream_at(state, place)
        if load64_acquire(stream + 8 * _IS_RUNNING) != 0:
            add32(stream + 8 * _BELL, 1)
            _wake(stream + 8 * _BELL)
            add32(stream + 8 * _DONE_BELL, 1)
            _wake(stream + 8 * _DONE_BELL)
    return 0
