"""Built-ins that wait for started calls, query them, and note their end."""

from __future__ import annotations

from gpucoll.entries.collectives import capsule_pointer, new_integer
from gpucoll.entries.pending import (
    BUSY,
    E_CALL,
    E_FUTEX,
    E_SEQUENCE,
    E_STATUS,
    IDLE,
    NEEDS_PYTHON,
    Q_BELL,
    Q_CONTEXT,
    Q_DONE,
    Q_POSTED,
    Q_REAPED,
    Q_THREAD,
    Q_WANTED,
    STATE,
    T_BELL,
    begin_running,
    end_running,
    entry_of,
    run_pending,
    sleep_on,
)
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import (
    exchange64,
    get,
    load32_acquire,
    load64,
    load64_acquire,
    load64_ordered,
    pause,
    put,
)
from gpucoll.transport.shared.flags import (
    HELD,
    INTERPRETER,
    NANOSECONDS,
    begin_to_sleep,
    behind,
    end_sleep,
    release_interpreter,
    ring,
)
from gpucoll.transport.shared.layout import HEADER_WORD
from gpucoll.transport.shared.steps import (
    HEADER_SOURCE,
    LARGEST_BYTES,
    NOT_SHARED,
    OK,
    SIZE_BYTES,
    WORLD_SIZE,
    slot_of,
)
from gpucoll.transport.shared.words import Context, Status

_PENDING = int(Context.PENDING)
_HOLDS = int(Context.HOLDS)
_RAISED = int(Context.RAISED)
_SIGNAL, _NO_ROOM = int(Status.SIGNAL), int(Status.NO_ROOM)
_LONGEST_SLICE_NS, _SHORTEST_SLICE_NS = 20_000_000, 100_000
_WAIT_SPINS = 200
"""Number of looks whether the thread is done, before a waiter sleeps: about 10 us."""
_LONG_BYTES = 8 << 10
_i64 = types.int64
_save_thread = types.ExternalFunction("PyEval_SaveThread", _i64())
_restore_thread = types.ExternalFunction("PyEval_RestoreThread", types.void(_i64))
_restore_error = types.ExternalFunction("PyErr_Restore", types.void(_i64, _i64, _i64))
_check_signals = types.ExternalFunction("PyErr_CheckSignals", types.int32())
_as_integer = types.ExternalFunction("PyLong_AsLongLong", _i64(_i64))


@inline
def _reap(queue, context, number):
    """Free the entry of a call that has ended; False if it is not the next, or is free already."""
    if get(queue, Q_REAPED) != number - 1:
        return False
    put(queue, Q_REAPED, number)
    put(context, _PENDING, get(context, _PENDING) - 1)
    return True


@inline
def _run_here(queue, context, until):
    """Run calls in this thread, which has the interpreter; return the last status."""
    put(context, INTERPRETER, HELD)
    call = get(entry_of(queue, until), E_CALL)
    if max(get(call, SIZE_BYTES), get(call, LARGEST_BYTES)) > _LONG_BYTES:
        release_interpreter(context)
    status = run_pending(queue, context, until)
    thread = get(context, INTERPRETER)
    put(context, INTERPRETER, 0)
    if thread != HELD:
        _restore_thread(thread)
    end_running(queue, context, status)
    if status == _SIGNAL:
        _restore_error(get(context, _RAISED), get(context, _RAISED + 1), get(context, _RAISED + 2))
    return status


@inline
def _sleep_until(queue, context, number, timeout):
    """Sleep once, without the interpreter, until a call has ended or no thread runs calls."""
    bell = queue + 8 * Q_BELL
    for _ in range(_WAIT_SPINS):
        if load64_acquire(queue + 8 * Q_DONE) >= number:
            return
        pause()
    thread = _save_thread()
    seen = begin_to_sleep(bell)
    is_running = load64_ordered(context + 8 * STATE) == BUSY
    if load64_ordered(queue + 8 * Q_DONE) < number and is_running:
        sleep_on(bell, seen, timeout)
    end_sleep(bell)
    _restore_thread(thread)


@inline
def _set_timeout(entry, timeout_ns):
    """Fill in the timespec for a thread that waits for a call; return its address."""
    put(entry, E_FUTEX, timeout_ns // NANOSECONDS)
    put(entry, E_FUTEX + 1, timeout_ns % NANOSECONDS)
    return entry + 8 * E_FUTEX


@compiled
def wait_started(self, arguments, n_arguments):
    """Built-in of (number); `self` is a capsule of the queue: run calls until that one has ended.

    Returns 0 if the call succeeded and this has reaped it; otherwise Python must check.
    """
    queue = capsule_pointer(self, 0)
    context, number = get(queue, Q_CONTEXT), _as_integer(get(arguments, 0))
    while load64_acquire(queue + 8 * Q_DONE) < number:
        state = begin_running(queue, context)
        if state == IDLE:
            status = _run_here(queue, context, number)
            if status == _SIGNAL:
                return 0
            if status == _NO_ROOM:
                return new_integer(1)
        elif state == NEEDS_PYTHON:
            return new_integer(1)
        else:
            timeout = _set_timeout(entry_of(queue, number), _LONGEST_SLICE_NS)
            _sleep_until(queue, context, number, timeout)
            if _check_signals() != 0:
                return 0
    ended_well = get(entry_of(queue, number), E_STATUS) == OK
    return new_integer(0 if ended_well and _reap(queue, context, number) else 1)


@inline
def _has_arrived(context, sequence):
    """Return whether all ranks have posted a call with arrays that are not shared."""
    for rank in range(get(context, WORLD_SIZE)):
        slot = slot_of(context, sequence, rank)
        if behind(load32_acquire(slot + HEADER_WORD), sequence):
            return False
        if load64(slot + HEADER_SOURCE) != NOT_SHARED:
            return False
    return True


@inline
def _finish_arrived(queue, context, number):
    """Finish calls up to this one that need no waiting for other ranks; return a status."""
    status, done = OK, load64_acquire(queue + 8 * Q_DONE)
    while status == OK and done < number:
        is_alone = get(context, WORLD_SIZE) == 1
        if not is_alone and (
            done + 1 > get(queue, Q_POSTED)
            or not _has_arrived(context, get(entry_of(queue, done + 1), E_SEQUENCE))
        ):
            return status
        done += 1
        status = run_pending(queue, context, done)
    return status


@compiled
def poll_started(self, arguments, n_arguments):
    """Built-in of (number, whether the thread should run it); return whether that call has ended.

    Never waits for other ranks. Unless the thread is told of the calls, they are only finished if
    all ranks have arrived.
    """
    queue = capsule_pointer(self, 0)
    context, number = get(queue, Q_CONTEXT), _as_integer(get(arguments, 0))
    if load64_acquire(queue + 8 * Q_DONE) < number and begin_running(queue, context) == IDLE:
        put(context, INTERPRETER, HELD)
        status = _finish_arrived(queue, context, number)
        thread = get(context, INTERPRETER)
        put(context, INTERPRETER, 0)
        if thread != HELD:
            _restore_thread(thread)
        end_running(queue, context, status)
        if status == _SIGNAL:
            _restore_error(
                get(context, _RAISED), get(context, _RAISED + 1), get(context, _RAISED + 2)
            )
            return 0
    if load64_acquire(queue + 8 * Q_DONE) >= number:
        return new_integer(1)
    if _as_integer(get(arguments, 1)) != 0 and get(queue, Q_WANTED) < number:
        exchange64(queue + 8 * Q_WANTED, number)
        ring(get(queue, Q_THREAD) + 8 * T_BELL)
    return new_integer(0)


@compiled
def sleep_started(self, arguments, n_arguments):
    """Built-in of (number, ns): sleep until that call has ended, at most for the given time.

    Runs nothing. Returns whether it has ended.
    """
    queue = capsule_pointer(self, 0)
    context, number = get(queue, Q_CONTEXT), _as_integer(get(arguments, 0))
    bell = queue + 8 * Q_BELL
    timeout = _set_timeout(entry_of(queue, number), _as_integer(get(arguments, 1)))
    thread = _save_thread()
    seen = begin_to_sleep(bell)
    state = load64_ordered(context + 8 * STATE)
    if load64_ordered(queue + 8 * Q_DONE) < number and state != NEEDS_PYTHON:
        sleep_on(bell, seen, timeout)
    end_sleep(bell)
    _restore_thread(thread)
    return new_integer(load64_acquire(queue + 8 * Q_DONE) >= number)


@compiled
def reap_started(self, arguments, n_arguments):
    """Built-in of (number), for a call that has ended: free its entry for reuse.

    Returns whether the caller must note how the call ended.
    """
    queue = capsule_pointer(self, 0)
    number = _as_integer(get(arguments, 0))
    return new_integer(_reap(queue, get(queue, Q_CONTEXT), number))


@compiled
def skip_started(self, arguments, n_arguments):
    """Built-in of (number), for the next call, which has not begun: skip it.

    Returns whether this succeeded: it fails while another thread runs calls.
    """
    queue = capsule_pointer(self, 0)
    context, number = get(queue, Q_CONTEXT), _as_integer(get(arguments, 0))
    if begin_running(queue, context) != IDLE:
        return new_integer(0)
    if load64_acquire(queue + 8 * Q_DONE) == number - 1:
        put(entry_of(queue, number), E_STATUS, _NO_ROOM)
        put(queue, Q_POSTED, number)
        exchange64(queue + 8 * Q_DONE, number)
    end_running(queue, context, OK)
    return new_integer(1)


@compiled
def hold_started(context, n_reasons):
    """Make compiled entries leave all calls to Python while there are reasons. For Python."""
    put(context, _PENDING, get(context, _PENDING) + n_reasons - get(context, _HOLDS))
    put(context, _HOLDS, n_reasons)
    return 0
