"""A call on GPU arrays as one compiled step: posted, and put on its stream between two events.

Driver and library are called by address, with the interpreter released once: through ctypes each
of these six calls costs about as much as all of it here. Whatever is not the ordinary case is left
to Python, which is told how far this got.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import types

from gpucoll.entries.collectives import capsule_pointer, new_integer
from gpucoll.group.host.enqueued_records import post
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import (
    call_words,
    exchange64,
    get,
    load64_acquire,
    put,
)
from gpucoll.transport.shared.words import Call

__all__ = [
    "IN_PROGRESS",
    "MOST_ARGUMENTS",
    "DRIVER_TABLE_WORDS",
    "ENQUEUE_BLOCK_WORDS",
    "Gone",
    "DriverTable",
    "Step",
    "EnqueueBlock",
    "enqueue_call",
]

MOST_ARGUMENTS = 8
"""Of a library's function, communicator and stream included."""


class DriverTable(IntEnum):
    """Words of what is the same for all calls on a GPU: addresses of the driver's functions."""

    PUSH = 0
    """CUDA: makes a context current, until it is popped."""
    CONTEXT = 1
    POP = 2
    GET_DEVICE = 3
    """HIP: says which device is current; 0 on CUDA."""
    SET_DEVICE = 4
    NUMBER = 5
    IS_CAPTURING = 6
    RECORD = 7
    WAIT = 8
    PLACE = 9
    """Counts: odd while a thread is in the driver, which may keep it there; even elsewhere."""
    GONE = 10
    """A `Gone`: who comes out of the driver looks at it before it calls the library."""
    ANSWER = 11
    """Where these functions write."""


DRIVER_TABLE_WORDS = int(DriverTable.ANSWER) + 1


class Gone(IntEnum):
    """Whether the library's communicator is still there; another thread may give it up."""

    NO = 0
    PERHAPS = 1
    """That is just being found out: wait."""
    YES = 2


class EnqueueBlock(IntEnum):
    """Words of what is the same for all calls of a kind."""

    DRIVER_TABLE = 0
    CALL = 1
    """The call block that is posted."""
    FUNCTION = 2
    """The library's."""
    POLL = 3
    """Of the library, too: says of a communicator whether it is still busy with a call."""
    N_SETTINGS = 4
    """How many of the function's arguments lie between the two addresses and the communicator."""
    ARGUMENTS = 5
    """All of them; the settings are filled in when the enqueue_block is made."""


SETTINGS_AT = 2
"""Place of the first setting among the arguments."""
ENQUEUE_BLOCK_WORDS = int(EnqueueBlock.ARGUMENTS) + MOST_ARGUMENTS
IN_PROGRESS = 7
"""ncclInProgress: a thread of the library's own is about to put the work on the stream."""
POLLS = 256
"""So often that is waited for here, a CPU's time slice between: as a rule it takes some 20 us."""


class Step(IntEnum):
    """How far a stream_call got that did not succeed: the upper half of what it returns."""

    NOTHING = 1
    """Nothing was posted and no work enqueued: it is for Python to do, or to refuse."""
    START = 2
    """Posted, but the first event could not be recorded."""
    CALL = 3
    """The library's function returned the code in the lower half."""
    END = 4
    """Enqueued, but the second event could not be recorded."""
    GONE = 5
    """Posted, but the communicator was given up while the driver kept this thread."""


_PUSH, _CONTEXT, _POP = int(DriverTable.PUSH), int(DriverTable.CONTEXT), int(DriverTable.POP)
_GET_DEVICE, _SET_DEVICE = int(DriverTable.GET_DEVICE), int(DriverTable.SET_DEVICE)
_NUMBER = int(DriverTable.NUMBER)
_IS_CAPTURING, _RECORD = int(DriverTable.IS_CAPTURING), int(DriverTable.RECORD)
_WAIT, _ANSWER = int(DriverTable.WAIT), int(DriverTable.ANSWER)
_DRIVER_TABLE, _CALL_BLOCK, _FUNCTION = (
    int(EnqueueBlock.DRIVER_TABLE),
    int(EnqueueBlock.CALL),
    int(EnqueueBlock.FUNCTION),
)
_POLL = int(EnqueueBlock.POLL)
_N_SETTINGS, _ARGUMENTS = int(EnqueueBlock.N_SETTINGS), int(EnqueueBlock.ARGUMENTS)
_SETTINGS_AT = SETTINGS_AT
_PLACE, _GONE = int(DriverTable.PLACE), int(DriverTable.GONE)
_PERHAPS, _NO = int(Gone.PERHAPS), int(Gone.NO)
_NOTHING, _START, _CALL, _END, _GIVEN_UP = map(int, Step)
_CALL_CONTEXT = int(Call.CONTEXT)
_N_ARGUMENTS = 7

_i64 = types.int64
_save_thread = types.ExternalFunction("PyEval_SaveThread", _i64())
_restore_thread = types.ExternalFunction("PyEval_RestoreThread", types.void(_i64))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_as_integer = types.ExternalFunction("PyLong_AsLongLong", _i64(_i64))


@inline
def _code(word):
    """Return what a C function returned as its int."""
    return np.int64(np.int32(word))


@inline
def _call(function, a, b):
    """Call a driver's function of two arguments; return its code."""
    return _code(call_words(function, a, b, 0, 0, 0, 0, 0, 0))


@inline
def _result(step, code):
    return (step << 32) | (code & 0xFFFFFFFF)


@inline
def _is_capturing(driver_table, stream):
    """Return whether a graph is being captured from a stream, or that cannot be told."""
    put(driver_table, _ANSWER, 0)
    code = _call(get(driver_table, _IS_CAPTURING), stream, driver_table + 8 * _ANSWER)
    return code != 0 or get(driver_table, _ANSWER) != 0


@inline
def _follow(driver_table, stream, leader, event):
    """Make what comes on a stream wait for what is on its leader now; return a code."""
    code = _call(get(driver_table, _RECORD), event, leader)
    if code:
        return code
    return _code(call_words(get(driver_table, _WAIT), stream, event, 0, 0, 0, 0, 0, 0))


@inline
def _settled(enqueue_block, communicator):
    """Return what has become of a call that was in progress; the same where it takes longer."""
    driver_table, polls = get(enqueue_block, _DRIVER_TABLE), 0
    while polls < POLLS:
        put(driver_table, _ANSWER, 0)
        code = _call(get(enqueue_block, _POLL), communicator, driver_table + 8 * _ANSWER)
        if code == 0:
            code = _code(get(driver_table, _ANSWER))
        if code != IN_PROGRESS:
            return code
        _sched_yield()
        polls += 1
    return np.int64(IN_PROGRESS)


@inline
def _step(driver_table):
    """Enter the driver, or leave it; what comes afterwards is seen to come afterwards."""
    exchange64(driver_table + 8 * _PLACE, get(driver_table, _PLACE) + 1)


@inline
def _is_gone(driver_table):
    """Return whether the communicator was given up; wait where that is being found out."""
    while load64_acquire(driver_table + 8 * _GONE) == _PERHAPS:
        _sched_yield()
    return load64_acquire(driver_table + 8 * _GONE) != _NO


@inline
def _put_on_stream(enqueue_block, stream, leader, start, end):
    """Do it all, with the context current and the driver entered."""
    driver_table, call = get(enqueue_block, _DRIVER_TABLE), get(enqueue_block, _CALL_BLOCK)
    if _is_capturing(driver_table, stream):
        return _result(_NOTHING, 0)
    # Once the wait is enqueued, its event may be recorded again.
    if leader != stream and (
        _is_capturing(driver_table, leader) or _follow(driver_table, stream, leader, end)
    ):
        return _result(_NOTHING, 0)
    if post(get(call, _CALL_CONTEXT), call):
        return _result(_NOTHING, 0)
    code = _call(get(driver_table, _RECORD), start, stream)
    if code:
        return _result(_START, code)
    _step(driver_table)
    if _is_gone(driver_table):
        _step(driver_table)
        return _result(_GIVEN_UP, 0)
    given = enqueue_block + 8 * _ARGUMENTS
    code = _code(
        call_words(
            get(enqueue_block, _FUNCTION),
            get(given, 0),
            get(given, 1),
            get(given, 2),
            get(given, 3),
            get(given, 4),
            get(given, 5),
            get(given, 6),
            get(given, 7),
        )
    )
    if code == IN_PROGRESS:  # an event must not come onto the stream before the work
        code = _settled(
            enqueue_block, get(given + 8 * (_SETTINGS_AT + get(enqueue_block, _N_SETTINGS)), 0)
        )
    _step(driver_table)
    if code:
        return _result(_CALL, code)
    code = _call(get(driver_table, _RECORD), end, stream)
    return _result(_END, code) if code else 0


@inline
def _enter(driver_table):
    """Make the GPU current; return which was before, as `_leave` wants it, or -1: impossible."""
    if get(driver_table, _GET_DEVICE) == 0:
        return -1 if _call(get(driver_table, _PUSH), get(driver_table, _CONTEXT), 0) else 0
    put(driver_table, _ANSWER, 0)
    if _call(get(driver_table, _GET_DEVICE), driver_table + 8 * _ANSWER, 0):
        return -1
    before = get(driver_table, _ANSWER)
    if before != get(driver_table, _NUMBER) and _call(
        get(driver_table, _SET_DEVICE), get(driver_table, _NUMBER), 0
    ):
        return -1
    return before


@inline
def _leave(driver_table, before):
    if get(driver_table, _GET_DEVICE) == 0:
        _call(get(driver_table, _POP), driver_table + 8 * _ANSWER, 0)
    elif before != get(driver_table, _NUMBER):
        _call(get(driver_table, _SET_DEVICE), before, 0)


@compiled(_i64(_i64, _i64, _i64))
def enqueue_call(self, arguments, n_arguments):
    """Built-in of ``(source, destination, communicator, stream, leader, start, end)``, integers.

    `self` is a capsule of a enqueue_block; two threads must not be on its driver_table at once. What comes on the
    stream waits for what is on the leader now, which may be the stream itself. Returns 0, or a
    `Step` and a code. A function of at most `MOST_ARGUMENTS` gets so many: by the calling
    conventions of x86-64 and arm64 it does not see those beyond its own.
    """
    enqueue_block = capsule_pointer(self, 0)
    if n_arguments != _N_ARGUMENTS:
        return new_integer(_result(_NOTHING, 0))
    given = enqueue_block + 8 * _ARGUMENTS
    last = given + 8 * (_SETTINGS_AT + get(enqueue_block, _N_SETTINGS))
    put(given, 0, _as_integer(get(arguments, 0)))
    put(given, 1, _as_integer(get(arguments, 1)))
    put(last, 0, _as_integer(get(arguments, 2)))
    stream, leader = _as_integer(get(arguments, 3)), _as_integer(get(arguments, 4))
    put(last, 1, stream)
    start, end = _as_integer(get(arguments, 5)), _as_integer(get(arguments, 6))
    driver_table = get(enqueue_block, _DRIVER_TABLE)
    thread = _save_thread()
    before, result = _enter(driver_table), _result(_NOTHING, 0)
    if before >= 0:
        _step(driver_table)
        result = _put_on_stream(enqueue_block, stream, leader, start, end)
        _step(driver_table)
        _leave(driver_table, before)
    _restore_thread(thread)
    return new_integer(result)
