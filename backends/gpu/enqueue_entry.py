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
    POLLS,
    SETTINGS_AT,
    DriverTable,
    EnqueueBlock,
    Gone,
    Step,
)
from gpucoll.blocks import Words
from gpucoll.devices import Device
from gpucoll.entries.collectives import capsule_pointer, new_integer
from gpucoll.group.host.enqueued import post
from gpucoll.kernels.cpu.builtins import METH_FASTCALL, METH_NOARGS, builtin, capsule
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import call_words, exchange64, load64_ordered, signed32
from gpucoll.transport.shared.call_block import CallBlock

__all__ = ["driver_table_of", "enqueue_call", "enqueuer", "step_call", "stepper"]

_Array: TypeAlias = npt.NDArray[np.int64]
"""Words that compiled code reads by address."""

_SETTINGS_AT = SETTINGS_AT
_NOTHING, _START, _CALL, _END, _GIVEN_UP = map(int, Step)
_N_ARGUMENTS = 7

_i64 = types.int64
_save_thread = types.ExternalFunction("PyEval_SaveThread", _i64())
_restore_thread = types.ExternalFunction("PyEval_RestoreThread", types.void(_i64))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_as_integer = types.ExternalFunction("PyLong_AsLongLong", _i64(_i64))


@inline
def _code(word: int) -> int:
    """Return the int that a C function returned."""
    return signed32(word)


@inline
def _call(function: int, a: int, b: int) -> int:
    """Call a driver function of two arguments; return its code."""
    return _code(call_words(function, a, b, 0, 0, 0, 0, 0, 0))


@inline
def _result(step: int, code: int) -> int:
    return (step << 32) | (code & 0xFFFFFFFF)


@inline
def _is_capturing(driver_table: DriverTable, stream: int) -> bool:
    """Return whether a graph is being captured from a stream; true also if the query fails."""
    driver_table.answer = 0
    code = _call(driver_table.is_capturing, stream, driver_table.at.answer)
    return code != 0 or driver_table.answer != 0


@inline
def _follow(driver_table: DriverTable, stream: int, leader: int, event: int) -> int:
    """Make later work on a stream wait for the present work on its leader; return a code."""
    code = _call(driver_table.record, event, leader)
    if code:
        return code
    return _code(call_words(driver_table.wait, stream, event, 0, 0, 0, 0, 0, 0))


@inline
def _settled(enqueue_block: EnqueueBlock, communicator: int) -> int:
    """Poll the outcome of a call in progress; return `in_progress` if it takes longer."""
    driver_table, polls = enqueue_block.driver_table, 0
    in_progress = enqueue_block.in_progress
    while polls < POLLS:
        driver_table.answer = 0
        code = _call(enqueue_block.poll, communicator, driver_table.at.answer)
        if code == 0:
            code = _code(driver_table.answer)
        if code != in_progress:
            return code
        _sched_yield()
        polls += 1
    return in_progress


@inline
def _step(driver_table: DriverTable) -> None:
    """Enter or leave the driver; other threads see later stores of this thread only afterwards."""
    exchange64(driver_table.at.place, driver_table.place + 1)


@inline
def _is_gone(driver_table: DriverTable) -> bool:
    """Return whether the communicator was given up; wait while that is being found out.

    This is the other half of `Monitor.look_from_outside`. This thread stores its place and then
    reads `gone`; the other one stores `gone` and then reads the place. Both have a full fence in
    between.
    """
    while load64_ordered(driver_table.at.gone) == Gone.PERHAPS:
        _sched_yield()
    return load64_ordered(driver_table.at.gone) != Gone.NO


@inline
def _put_on_stream(
    enqueue_block: EnqueueBlock, stream: int, leader: int, start: int, end: int
) -> int:
    """Post the call and enqueue it between its events; the context is current."""
    driver_table, call = enqueue_block.driver_table, enqueue_block.call
    if _is_capturing(driver_table, stream):
        return _result(_NOTHING, 0)
    # Once the wait is enqueued, its event may be recorded again.
    if leader != stream and (
        _is_capturing(driver_table, leader) or _follow(driver_table, stream, leader, end)
    ):
        return _result(_NOTHING, 0)
    if post(call.context, call):
        return _result(_NOTHING, 0)
    code = _call(driver_table.record, start, stream)
    if code:
        return _result(_START, code)
    _step(driver_table)
    if _is_gone(driver_table):
        _step(driver_table)
        return _result(_GIVEN_UP, 0)
    given = enqueue_block.arguments
    code = _code(
        call_words(
            enqueue_block.function,
            given[0],
            given[1],
            given[2],
            given[3],
            given[4],
            given[5],
            given[6],
            given[7],
        )
    )
    # An event must not come onto the stream before the work.
    if code == enqueue_block.in_progress:
        code = _settled(
            enqueue_block, Words(given.address + 8 * (_SETTINGS_AT + enqueue_block.n_settings))[0]
        )
    _step(driver_table)
    if code:
        return _result(_CALL, code)
    code = _call(driver_table.record, end, stream)
    return _result(_END, code) if code else 0


@inline
def _enter(driver_table: DriverTable) -> int:
    """Make the GPU current; return the previous device for `_leave`, or -1 if that failed."""
    if driver_table.get_device == 0:
        return -1 if _call(driver_table.push, driver_table.context, 0) else 0
    driver_table.answer = 0
    if _call(driver_table.get_device, driver_table.at.answer, 0):
        return -1
    before = driver_table.answer
    if before != driver_table.number and _call(driver_table.set_device, driver_table.number, 0):
        return -1
    return before


@inline
def _leave(driver_table: DriverTable, before: int) -> None:
    if driver_table.get_device == 0:
        _call(driver_table.pop, driver_table.at.answer, 0)
    elif before != driver_table.number:
        _call(driver_table.set_device, before, 0)


@compiled
def step_call(self: int, _: int) -> int:
    """Built-in without arguments; `self` is a capsule of a driver table. Returns a `Gone`.

    Enters or leaves the driver, as `_step` does.
    """
    driver_table = DriverTable(capsule_pointer(self, 0))
    _step(driver_table)
    return new_integer(load64_ordered(driver_table.at.gone))


@compiled
def enqueue_call(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of ``(source, destination, communicator, stream, leader, start, end)``, integers.

    `self` is a capsule of an enqueue block; two threads must not use its driver table at once.
    Later work on the stream waits for the present work on the leader, which may be the same stream.
    Returns 0, or a `Step` and a code. A function with fewer than `MOST_ARGUMENTS` arguments is
    still called with that number: by the calling conventions of x86-64 and arm64 it ignores the
    rest.
    """
    enqueue_block = EnqueueBlock(capsule_pointer(self, 0))
    if n_arguments != _N_ARGUMENTS:
        return new_integer(_result(_NOTHING, 0))
    given = enqueue_block.arguments
    last = Words(given.address + 8 * (_SETTINGS_AT + enqueue_block.n_settings))
    given[0] = _as_integer(arguments[0])
    given[1] = _as_integer(arguments[1])
    last[0] = _as_integer(arguments[2])
    stream, leader = _as_integer(arguments[3]), _as_integer(arguments[4])
    last[1] = stream
    start, end = _as_integer(arguments[5]), _as_integer(arguments[6])
    driver_table = enqueue_block.driver_table
    thread = _save_thread()
    before, result = _enter(driver_table), _result(_NOTHING, 0)
    if before >= 0:
        _step(driver_table)
        result = _put_on_stream(enqueue_block, stream, leader, start, end)
        _step(driver_table)
        _leave(driver_table, before)
    _restore_thread(thread)
    return new_integer(result)


def driver_table_of(device: Device) -> _Array:
    """Return the addresses of a GPU's driver functions, as `enqueuer` takes them."""
    words = np.zeros(DriverTable.n_words, np.int64)
    for place, address in device.addresses().items():
        words[DriverTable.fields[place.lower()]] = address
    return words


def stepper(driver_table: _Array) -> Callable[[], int]:
    """Return the built-in that enters or leaves the driver; it returns a `Gone`."""
    step: Any = builtin(step_call.address, METH_NOARGS, capsule(driver_table.ctypes.data))
    made: Callable[[], int] = step
    return made


def enqueuer(
    driver_table: _Array,
    block: CallBlock,
    function: int,
    settings: Sequence[int],
    poll: int,
    in_progress: int,
) -> tuple[Callable[..., int], _Array]:
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
    words = np.zeros(EnqueueBlock.n_words, np.int64)
    words[EnqueueBlock.driver_table] = driver_table.ctypes.data
    words[EnqueueBlock.call] = block.words.ctypes.data
    words[EnqueueBlock.function] = function
    words[EnqueueBlock.poll] = poll
    words[EnqueueBlock.in_progress] = in_progress
    words[EnqueueBlock.n_settings] = len(settings)
    first = EnqueueBlock.arguments + SETTINGS_AT
    words[first : first + len(settings)] = settings
    enqueue: Any = builtin(enqueue_call.address, METH_FASTCALL, capsule(words.ctypes.data))
    return enqueue, words
