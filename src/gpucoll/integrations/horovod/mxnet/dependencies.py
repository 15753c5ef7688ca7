"""MXNet's own engine knows what a request reads and writes, and when it is done.

MXNet's calls return before their work is done: its engine orders them by what they read and write.
A request is such a call, too. MXNet begins it when its arrays are ready, at once if they are (no
thread is woken), and later calls wait for the arrays until the request is done. A program that
waits for an array, by ``wait_to_read()``, ``asnumpy()`` or ``waitall()``, does the request itself.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from ctypes import byref
from threading import get_ident
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, check_call

from gpucoll.integrations.horovod.engine.engine import Engine
from gpucoll.integrations.horovod.engine.request import ReduceOp, Request
from gpucoll.integrations.horovod.exceptions import HorovodInternalError
from gpucoll.integrations.mxnet.arrays import address_of, check, view
from gpucoll.integrations.mxnet.engine import ASYNC, CPU, complete, completion_at, handles, push

__all__ = ["Operation", "last_of", "settle"]

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_FUNCTION = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _POINTER)

_pushed: dict[int, Operation] = {}
_writers: dict[int | None, Operation] = {}
"""What writes an array, by its handle. An operation keeps its arrays, and so their handles."""
_last: dict[str, Operation] = {}
"""What was last reduced or broadcast in place under a name, if it is small."""
_waiting: set[int] = set()
"""Threads that wait in MXNet for what may depend on requests."""
_LAST_BYTES = 1 << 16
_LAST_KEPT = 1024
_SETTLING_S = 5.0


class Operation(Request):
    """A request in MXNet's engine, without arrays until they are ready."""

    __slots__ = (
        *("address", "completion", "engine", "is_finished", "is_submitted", "is_waited_for"),
        *("reads", "writes"),
    )
    address: int | None
    """Of its array, if it may be repeated."""
    completion: Sequence[int]
    """What MXNet is told at the end."""

    def start(
        self,
        engine: Engine,
        reads: Sequence[mx.nd.NDArray],
        writes: Sequence[mx.nd.NDArray],
        priority: int,
    ) -> None:
        """Give it to MXNet's engine.

        Parameters
        ----------
        engine : Engine
            Of the process set.
        reads, writes : sequence of NDArray
            Arrays and outputs. An array that is both is among `writes` only.
        priority : int
            In MXNet's engine.
        """
        for tensor in (*reads, *writes):
            check(tensor)
        self.engine, self.reads, self.writes = engine, reads, writes
        self.finished = _finish
        self.is_waited_for = False
        self._push(priority)

    def repeat(self, priority: int) -> None:
        """Start it once more."""
        self.is_done = False
        self.error = None
        self._push(priority)

    def _push(self, priority: int) -> None:
        self.is_submitted = self.is_finished = False
        reads, writes, number = self.reads, self.writes, id(self)
        _pushed[number] = self
        for tensor in writes:
            _writers[tensor.handle.value] = self
        inputs, n_inputs = (handles(reads), len(reads)) if reads else (None, 0)
        outputs = byref(writes[0].handle) if len(writes) == 1 else handles(writes)
        # fmt: off
        if failed := push(
            _begin, _POINTER(number), None, CPU, inputs, n_inputs, outputs, len(writes), ASYNC,
            priority, b"horovod", 0,
        ):
            check_call(failed)
        # fmt: on

    def begin(self) -> None:
        """Submit it: its arrays are ready. Called by MXNet; raises nothing."""
        try:
            if self.form is not None and self.address == address_of(self.writes[0]):
                self.engine.submit(self, _is_awaited())
            else:
                self._begin_first()
            self.is_submitted = True
        except BaseException as error:
            self.error = error
            _finish(self)

    def _begin_first(self) -> None:
        self.form = None
        self.outputs = self.arrays = [view(x) for x in self.writes]
        if self.reads:
            self.arrays = [view(x) for x in self.reads]
        self.engine.submit(self, _is_awaited())
        if len(self.writes) == 1 and not self.reads and self.outputs[0].nbytes <= _LAST_BYTES:
            if len(_last) >= _LAST_KEPT:
                _last.clear()
            self.address = address_of(self.writes[0])
            _last[self.name] = self

    def reduces(
        self, engine: Engine, tensor: mx.nd.NDArray, op: ReduceOp, prescale: float, postscale: float
    ) -> bool:
        """Return whether it may be repeated to reduce an array in this way."""
        return (
            self.is_finished
            and not self.is_waited_for
            and self.writes[0] is tensor
            and self.engine is engine
            and self.op is op
            and self.prescale == prescale
            and self.postscale == postscale
        )


def last_of(name: str) -> Operation | None:
    """Return what was last started in place under a name, if it was small."""
    return _last.get(name)


def _finish(request: Any) -> None:
    """Tell MXNet that an operation is done. Called by the thread that did it."""
    for tensor in request.writes:
        handle = tensor.handle.value
        if _writers.get(handle) is request:
            del _writers[handle]
    completion = request.completion
    failure = request.error
    request.is_finished = True  # it may be repeated from here on
    if failure is None:
        complete(completion)
    else:
        with _Error(str(failure)) as error:
            complete(completion, error)


def settle() -> None:
    """Give what was started time to end: the job is about to."""
    end = time.monotonic() + _SETTLING_S
    while (_pushed or _writers) and time.monotonic() < end:
        time.sleep(0.001)
    _last.clear()


def _is_awaited() -> bool:
    """Return whether a thread waits in MXNet, and no operation will soon join those submitted."""
    return bool(_waiting) and not _pushed


def _begin_pushed(run_context: int, completion: int, number: int) -> None:
    operation = _pushed.pop(number)
    operation.completion = completion_at(completion)
    operation.begin()


_begin = _FUNCTION(_begin_pushed)


# --- the functions in which MXNet waits -------------------------------------------------------

_wait_to_read, _wait_all = _LIB.MXNDArrayWaitToRead, _LIB.MXNDArrayWaitAll
_copy_to_host = _LIB.MXNDArraySyncCopyToCPU


def _drive(operation: Operation) -> None:
    """Do a request whose end this thread waits for: faster than the engine's helper thread."""
    if operation.is_submitted:
        operation.is_waited_for = True
        try:
            operation.engine.wait(operation)
        except HorovodInternalError:
            pass  # MXNet raises it
        finally:
            operation.is_waited_for = False


def _wait_for(handle: ctypes.c_void_p, wait: Callable[..., Any], *more: Any) -> Any:
    operation = _writers.get(handle.value)
    if operation is not None and operation.is_submitted:
        _drive(operation)
        return wait(handle, *more)
    return _wait_outside(wait, handle, *more)


def _wait_outside(wait: Callable[..., Any], *arguments: Any) -> Any:
    """Wait in MXNet for what may depend on requests; driver threads do them when all are ready."""
    thread = get_ident()
    _waiting.add(thread)
    try:
        if not _pushed:
            for engine in {operation.engine for operation in [*_writers.values()]}:
                engine.hurry()
        return wait(*arguments)
    finally:
        _waiting.discard(thread)


def _drive_and_wait(handle: ctypes.c_void_p) -> Any:
    return _wait_for(handle, _wait_to_read) if _writers else _wait_to_read(handle)


def _drive_and_copy(handle: ctypes.c_void_p, data: Any, size: Any) -> Any:
    if _writers:
        return _wait_for(handle, _copy_to_host, data, size)
    return _copy_to_host(handle, data, size)


def _drive_all() -> Any:
    if not _pushed:  # else MXNet computes, and this thread would take the CPU from it
        for operation in [*_writers.values()]:
            _drive(operation)
    return _wait_outside(_wait_all) if _writers else _wait_all()


_LIB.MXNDArrayWaitToRead, _LIB.MXNDArrayWaitAll = _drive_and_wait, _drive_all
_LIB.MXNDArraySyncCopyToCPU = _drive_and_copy


_runtime = ctypes.CDLL("libstdc++.so.6")


class _Error:
    """A ``std::runtime_error``; MXNet copies it, and raises it where an array is waited for."""

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self._words = (ctypes.c_void_p * 2)()

    def __enter__(self) -> Any:
        _runtime._ZNSt13runtime_errorC1EPKc(self._words, self._text)
        return ctypes.cast(self._words, ctypes.c_void_p)

    def __exit__(self, *_: object) -> None:
        _runtime._ZNSt13runtime_errorD1Ev(self._words)
