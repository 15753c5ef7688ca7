"""A call on GPU arrays as one compiled step: posted, and put on its stream between two events.

The compiled code calls driver and library by address and releases the interpreter once. Through
ctypes, each of these six calls costs about as much as the whole step. Unusual cases are left to
Python, which receives how far the step got.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.backends.gpu.enqueue_words import (
    DRIVER_TABLE_WORDS,
    ENQUEUE_BLOCK_WORDS,
    POLLS,
    SETTINGS_AT,
    DriverTable,
    EnqueueBlock,
    Gone,
    Step,
)
from gpucoll.devices import Device
from gpucoll.entries.collectives import capsule_pointer, new_integer
from gpucoll.group.host.enqueued import post
from gpucoll.kernels.cpu.builtins import METH_FASTCALL, METH_NOARGS, builtin, capsule
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import (
    call_words,
    exchange64,
    get,
    load64_ordered,
    put,
    signed32,
)
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.words import Call

__all__ = ["Words", "driver_table_of", "enqueue_call", "enqueuer", "step_call", "stepper"]

Words: TypeAlias = npt.NDArray[np.int64]
"""Words that compiled code reads by address."""

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
_POLL, _IN_PROGRESS = int(EnqueueBlock.POLL), int(EnqueueBlock.IN_PROGRESS)
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
    """Return the int that a C function returned."""
    return signed32(word)


@inline
def _call(function, a, b):
    """Call a driver function of two arguments; return its code."""
    return _code(call_words(function, a, b, 0, 0, 0, 0, 0, 0))


@inline
def _result(step, code):
    return (step << 32) | (code & 0xFFFFFFFF)


@inline
def _is_capturing(driver_table, stream):
    """Return whether a graph is being captured from a stream; true also if the query fails."""
    put(driver_table, _ANSWER, 0)
    code = _call(get(driver_table, _IS_CAPTURING), stream, driver_table + 8 * _ANSWER)
    return code != 0 or get(driver_table, _ANSWER) != 0


@inline
def _follow(driver_table, stream, leader, event):
    """Make later work on a stream wait for the present work on its leader; return a code."""
    code = _call(get(driver_table, _RECORD), event, leader)
    if code:
        return code
    return _code(call_words(get(driver_table, _WAIT), stream, event, 0, 0, 0, 0, 0, 0))


@inline
def _settled(enqueue_block, communicator):
    """Poll the outcome of a call in progress; return `in_progress` if it takes longer."""
    driver_table, polls = get(enqueue_block, _DRIVER_TABLE), 0
    in_progress = get(enqueue_block, _IN_PROGRESS)
    while polls < POLLS:
        put(driver_table, _ANSWER, 0)
        code = _call(get(enqueue_block, _POLL), communicator, driver_table + 8 * _ANSWER)
        if code == 0:
            code = _code(get(driver_table, _ANSWER))
        if code != in_progress:
            return code
        _sched_yield()
        polls += 1
    return in_progress


@inline
def _step(driver_table):
    """Enter or leave the driver; other threads see later stores of this thread only afterwards."""
    exchange64(driver_table + 8 * _PLACE, get(driver_table, _PLACE) + 1)


@inline
def _is_gone(driver_table):
    """Return whether the communicator was given up; wait while that is being found out.

    This is the other half of `Monitor.look_from_outside`. This thread stores its place and then
    reads `GONE`; the other one stores `GONE` and then reads the place. Both have a full fence in
    between.
    """
    while load64_ordered(driver_table + 8 * _GONE) == _PERHAPS:
        _sched_yield()
    return load64_ordered(driver_table + 8 * _GONE) != _NO


@inline
def _put_on_stream(enqueue_block, stream, leader, start, end):
    """Post the call and enqueue it between its events; the context is current."""
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
    # An event must not come onto the stream before the work.
    if code == get(enqueue_block, _IN_PROGRESS):
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
    """Make the GPU current; return the previous device for `_leave`, or -1 if that failed."""
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


@compiled
def step_call(self, _):
    """Built-in without arguments; `self` is a capsule of a driver table. Returns a `Gone`.

    Enters or leaves the driver, as `_step` does.
    """
    driver_table = capsule_pointer(self, 0)
    _step(driver_table)
    return new_integer(load64_ordered(driver_table + 8 * _GONE))


@compiled
def enqueue_call(self, arguments, n_arguments):
    """Built-in of ``(source, destination, communicator, stream, leader, start, end)``, integers.

    `self` is a capsule of an enqueue block; two threads must not use its driver table at once.
    Later work on the stream waits for the present work on the leader, which may be the same stream.
    Returns 0, or a `Step` and a code. A function with fewer than `MOST_ARGUMENTS` arguments is
    still called with that number: by the calling conventions of x86-64 and arm64 it ignores the
    rest.
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


def driver_table_of(device: Device) -> Words:
    """Return the addresses of a GPU's driver functions, as `enqueuer` takes them."""
    words = np.zeros(DRIVER_TABLE_WORDS, np.int64)
    for place, address in device.addresses().items():
        words[DriverTable[place]] = address
    return words


def stepper(driver_table: Words) -> Callable[[], int]:
    """Return the built-in that enters or leaves the driver; it returns a `Gone`."""
    step: Any = builtin(step_call.address, METH_NOARGS, capsule(driver_table.ctypes.data))
    made: Callable[[], int] = step
    return made


def enqueuer(
    driver_table: Words,
    block: CallBlock,
    function: int,
    settings: Sequence[int],
    poll: int,
    in_progress: int,
) -> tuple[Callable[..., int], Words]:
    """Return the built-in that posts and enqueues a call, and the words that it reads.

    See `enqueue_call`. One thread at a time may use a driver table. The caller keeps the block and
    the words alive.

    Parameters
    ----------
    driver_table : array
        The result of `driver_table_of`.
    block : CallBlock
        The call to post; made for this rank's ring by `EnqueuedCalls.poster`.
    function : int
        Address of the library's function.
    settings : sequence of int
        Its arguments between the two addresses and the communicator.
    poll : int
        Address of the library's function that reports whether a communicator is busy.
    in_progress : int
        The code with which it reports that.
    """
    words = np.zeros(ENQUEUE_BLOCK_WORDS, np.int64)
    words[EnqueueBlock.DRIVER_TABLE] = driver_table.ctypes.data
    words[EnqueueBlock.CALL] = block.words.ctypes.data
    words[EnqueueBlock.FUNCTION] = function
    words[EnqueueBlock.POLL] = poll
    words[EnqueueBlock.IN_PROGRESS] = in_progress
    words[EnqueueBlock.N_SETTINGS] = len(settings)
    first = EnqueueBlock.ARGUMENTS + SETTINGS_AT
    words[first : first + len(settings)] = settings
    enqueue: Any = builtin(enqueue_call.address, METH_FASTCALL, capsule(words.ctypes.data))
    return enqueue, words
