"""MXNet's own engine knows what a request reads and writes, and when it is done.

MXNet's calls return before their work is done: its engine orders them by what they read and write.
A request is such a call, too. MXNet begins it when its arrays are ready, at once if they are (no
thread is woken), and later calls wait for the arrays until the request is done. A program that
waits for an array, by ``wait_to_read()``, ``asnumpy()`` or ``waitall()``, does the request itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, check_call

from gpucoll.integrations.horovod.engine.engine import Engine
from gpucoll.integrations.horovod.engine.request import Request
from gpucoll.integrations.horovod.exceptions import HorovodInternalError
from gpucoll.integrations.horovod.mxnet.arrays import view

__all__ = ["Operation"]

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_FUNCTION = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _POINTER)
_SHORT_FUNCTION = ctypes.PYFUNCTYPE(None, _POINTER, _POINTER, _POINTER)
"""A function that is too short to release Python's lock for it."""
_THREE_WORDS = ctypes.c_uint64 * 3

_push = ctypes.PyDLL(None, handle=_LIB._handle).MXEnginePushAsyncND
_push.argtypes = [_FUNCTION, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER]
_push.argtypes += [_INT, ctypes.c_char_p, ctypes.c_bool]

_CPU = ctypes.byref((ctypes.c_int32 * 2)(1, 0))
"""MXNet's context cpu(0)."""
_ASYNC = ctypes.byref(ctypes.c_int32(4))
"""The property of calls that do not block: the pushing thread begins them if they can begin."""

_pushed: dict[int, Operation] = {}
_writers: dict[int | None, Operation] = {}
"""What writes an array, by its handle. An operation keeps its arrays, and so their handles."""


class Operation:
    """A request in MXNet's engine.

    Parameters
    ----------
    engine : Engine
        Of the process set.
    request : Request
        Without arrays: the operation adds them when they are ready.
    reads, writes : sequence of NDArray
        Its arrays and outputs. An array that is both is among `writes` only.
    """

    __slots__ = ("complete", "engine", "is_submitted", "reads", "request", "writes")

    def __init__(
        self,
        engine: Engine,
        request: Request,
        reads: Sequence[mx.nd.NDArray],
        writes: Sequence[mx.nd.NDArray],
    ) -> None:
        self.engine, self.request = engine, request
        self.reads, self.writes = reads, writes
        self.is_submitted = False
        self.complete: Sequence[int] = ()
        """MXNet's function to call at the end, and its arguments."""

    def push(self, priority: int = 0) -> None:
        """Give it to MXNet's engine."""
        number = id(self)
        _pushed[number] = self
        for tensor in self.writes:
            _writers[tensor.handle.value] = self
        failed = _push(
            *(_begin, number, None, _CPU, _handles(self.reads), len(self.reads)),
            *(_handles(self.writes), len(self.writes), _ASYNC, priority, b"horovod", False),
        )
        if failed:
            check_call(failed)

    def begin(self) -> None:
        """Submit the request: its arrays are ready. Called by MXNet; raises nothing."""
        request = self.request
        try:
            request.outputs = request.arrays = [view(x) for x in self.writes]
            if self.reads:
                request.arrays = [view(x) for x in self.reads]
            request.finished = self._finish
            self.engine.submit(request)
            self.is_submitted = True
        except BaseException as error:
            request.error = error
            self._finish(request)

    def _finish(self, request: Request) -> None:
        """Tell MXNet that the request is done. Called by the thread that did it."""
        for tensor in self.writes:
            handle = tensor.handle.value
            if _writers.get(handle) is self:
                del _writers[handle]
        function, engine, argument = self.complete
        if request.error is None:
            _function_at(function)(engine, argument, None)
        else:
            with _Error(str(request.error)) as error:
                _function_at(function)(engine, argument, error)


def _handles(tensors: Sequence[mx.nd.NDArray]) -> Any:
    if len(tensors) == 1:
        return ctypes.byref(tensors[0].handle)
    return (_POINTER * len(tensors))(*[x.handle for x in tensors])


def _begin_pushed(run_context: int, complete: int, number: int) -> None:
    operation = _pushed.pop(number)
    operation.complete = _THREE_WORDS.from_address(complete)[:]
    operation.begin()


_begin = _FUNCTION(_begin_pushed)
_function_at = cache(_SHORT_FUNCTION)


# --- the functions in which MXNet waits -------------------------------------------------------

_wait_to_read, _wait_all = _LIB.MXNDArrayWaitToRead, _LIB.MXNDArrayWaitAll
_copy_to_host = _LIB.MXNDArraySyncCopyToCPU


def _drive(operation: Operation | None) -> None:
    """Do a request whose end this thread waits for: faster than the engine's helper thread."""
    if operation is not None and operation.is_submitted:
        try:
            operation.engine.wait(operation.request)
        except HorovodInternalError:
            pass  # MXNet raises it


def _drive_and_wait(handle: ctypes.c_void_p) -> Any:
    if _writers:
        _drive(_writers.get(handle.value))
    return _wait_to_read(handle)


def _drive_and_copy(handle: ctypes.c_void_p, data: Any, size: Any) -> Any:
    if _writers:
        _drive(_writers.get(handle.value))
    return _copy_to_host(handle, data, size)


def _drive_all() -> Any:
    for operation in [*_writers.values()]:
        _drive(operation)
    return _wait_all()


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
