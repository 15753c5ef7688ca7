"""A call on GPU arrays as one compiled step: posted, and put on its stream between two events.

Driver and library are called by address, with the interpreter released once: through ctypes each
of these six calls costs about as much as all of it here. Whatever is not the ordinary case is left
to Python, which is told how far this got.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import types

from gpucoll.control.enqueued_entry import post
from gpucoll.control.entry import capsule_pointer, new_integer
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import (
    call_words,
    exchange64,
    get,
    load64_acquire,
    put,
)
from gpucoll.transport.words import Call

__all__ = [
    "IN_PROGRESS",
    "MOST_ARGUMENTS",
    "ROAD_WORDS",
    "TICKET_WORDS",
    "Gone",
    "Road",
    "Step",
    "Ticket",
    "depart_call",
]

MOST_ARGUMENTS = 8
"""Of a library's function, communicator and stream included."""


class Road(IntEnum):
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


ROAD_WORDS = int(Road.ANSWER) + 1


class Gone(IntEnum):
    """Whether the library's communicator is still there; another thread may give it up."""

    NO = 0
    PERHAPS = 1
    """That is just being found out: wait."""
    YES = 2


class Ticket(IntEnum):
    """Words of what is the same for all calls of a kind."""

    ROAD = 0
    CALL = 1
    """The call block that is posted."""
    FUNCTION = 2
    """The library's."""
    POLL = 3
    """Of the library, too: says of a communicator whether it is still busy with a call."""
    N_SETTINGS = 4
    """How many of the function's arguments lie between the two addresses and the communicator."""
    ARGUMENTS = 5
    """All of them; the settings are filled in when the ticket is made."""


SETTINGS_AT = 2
"""Place of the first setting among the arguments."""
TICKET_WORDS = int(Ticket.ARGUMENTS) + MOST_ARGUMENTS
IN_PROGRESS = 7
"""ncclInProgress: a thread of the library's own is about to put the work on the stream."""
POLLS = 256
"""So often that is waited for here, a CPU's time slice between: as a rule it takes some 20 us."""


class Step(IntEnum):
    """How far a departure got that did not succeed: the upper half of what it returns."""

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


_PUSH, _CONTEXT, _POP = int(Road.PUSH), int(Road.CONTEXT), int(Road.POP)
_GET_DEVICE, _SET_DEVICE = int(Road.GET_DEVICE), int(Road.SET_DEVICE)
_NUMBER = int(Road.NUMBER)
_IS_CAPTURING, _RECORD = int(Road.IS_CAPTURING), int(Road.RECORD)
_WAIT, _ANSWER = int(Road.WAIT), int(Road.ANSWER)
_ROAD, _CALL_BLOCK, _FUNCTION = int(Ticket.ROAD), int(Ticket.CALL), int(Ticket.FUNCTION)
_POLL = int(Ticket.POLL)
_N_SETTINGS, _ARGUMENTS = int(Ticket.N_SETTINGS), int(Ticket.ARGUMENTS)
_SETTINGS_AT = SETTINGS_AT
_PLACE, _GONE = int(Road.PLACE), int(Road.GONE)
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
def _is_capturing(road, stream):
    """Return whether a graph is being captured from a stream, or that cannot be told."""
    put(road, _ANSWER, 0)
    code = _call(get(road, _IS_CAPTURING), stream, road + 8 * _ANSWER)
    return code != 0 or get(road, _ANSWER) != 0


@inline
def _follow(road, stream, leader, event):
    """Make what comes on a stream wait for what is on its leader now; return a code."""
    code = _call(get(road, _RECORD), event, leader)
    if code:
        return code
    return _code(call_words(get(road, _WAIT), stream, event, 0, 0, 0, 0, 0, 0))


@inline
def _settled(ticket, communicator):
    """Return what has become of a call that was in progress; the same where it takes longer."""
    road, polls = get(ticket, _ROAD), 0
    while polls < POLLS:
        put(road, _ANSWER, 0)
        code = _call(get(ticket, _POLL), communicator, road + 8 * _ANSWER)
        if code == 0:
            code = _code(get(road, _ANSWER))
        if code != IN_PROGRESS:
            return code
        _sched_yield()
        polls += 1
    return np.int64(IN_PROGRESS)


@inline
def _step(road):
    """Enter the driver, or leave it; what comes afterwards is seen to come afterwards."""
    exchange64(road + 8 * _PLACE, get(road, _PLACE) + 1)


@inline
def _is_gone(road):
    """Return whether the communicator was given up; wait where that is being found out."""
    while load64_acquire(road + 8 * _GONE) == _PERHAPS:
        _sched_yield()
    return load64_acquire(road + 8 * _GONE) != _NO


@inline
def _put_on_stream(ticket, stream, leader, start, end):
    """Do it all, with the context current and the driver entered."""
    road, call = get(ticket, _ROAD), get(ticket, _CALL_BLOCK)
    if _is_capturing(road, stream):
        return _result(_NOTHING, 0)
    # Once the wait is enqueued, its event may be recorded again.
    if leader != stream and (_is_capturing(road, leader) or _follow(road, stream, leader, end)):
        return _result(_NOTHING, 0)
    if post(get(call, _CALL_CONTEXT), call):
        return _result(_NOTHING, 0)
    code = _call(get(road, _RECORD), start, stream)
    if code:
        return _result(_START, code)
    _step(road)
    if _is_gone(road):
        _step(road)
        return _result(_GIVEN_UP, 0)
    given = ticket + 8 * _ARGUMENTS
    code = _code(
        call_words(
            get(ticket, _FUNCTION),
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
        code = _settled(ticket, get(given + 8 * (_SETTINGS_AT + get(ticket, _N_SETTINGS)), 0))
    _step(road)
    if code:
        return _result(_CALL, code)
    code = _call(get(road, _RECORD), end, stream)
    return _result(_END, code) if code else 0


@inline
def _enter(road):
    """Make the GPU current; return which was before, as `_leave` wants it, or -1: impossible."""
    if get(road, _GET_DEVICE) == 0:
        return -1 if _call(get(road, _PUSH), get(road, _CONTEXT), 0) else 0
    put(road, _ANSWER, 0)
    if _call(get(road, _GET_DEVICE), road + 8 * _ANSWER, 0):
        return -1
    before = get(road, _ANSWER)
    if before != get(road, _NUMBER) and _call(get(road, _SET_DEVICE), get(road, _NUMBER), 0):
        return -1
    return before


@inline
def _leave(road, before):
    if get(road, _GET_DEVICE) == 0:
        _call(get(road, _POP), road + 8 * _ANSWER, 0)
    elif before != get(road, _NUMBER):
        _call(get(road, _SET_DEVICE), before, 0)


@compiled(_i64(_i64, _i64, _i64))
def depart_call(self, arguments, n_arguments):
    """Built-in of ``(source, destination, communicator, stream, leader, start, end)``, integers.

    `self` is a capsule of a ticket; two threads must not be on its road at once. What comes on the
    stream waits for what is on the leader now, which may be the stream itself. Returns 0, or a
    `Step` and a code. A function of at most `MOST_ARGUMENTS` gets so many: by the calling
    conventions of x86-64 and arm64 it does not see those beyond its own.
    """
    ticket = capsule_pointer(self, 0)
    if n_arguments != _N_ARGUMENTS:
        return new_integer(_result(_NOTHING, 0))
    given = ticket + 8 * _ARGUMENTS
    last = given + 8 * (_SETTINGS_AT + get(ticket, _N_SETTINGS))
    put(given, 0, _as_integer(get(arguments, 0)))
    put(given, 1, _as_integer(get(arguments, 1)))
    put(last, 0, _as_integer(get(arguments, 2)))
    stream, leader = _as_integer(get(arguments, 3)), _as_integer(get(arguments, 4))
    put(last, 1, stream)
    start, end = _as_integer(get(arguments, 5)), _as_integer(get(arguments, 6))
    road = get(ticket, _ROAD)
    thread = _save_thread()
    before, result = _enter(road), _result(_NOTHING, 0)
    if before >= 0:
        _step(road)
        result = _put_on_stream(ticket, stream, leader, start, end)
        _step(road)
        _leave(road, before)
    _restore_thread(thread)
    return new_integer(result)
