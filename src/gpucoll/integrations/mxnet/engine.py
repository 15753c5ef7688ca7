"""MXNet's engine, which knows what has yet to read and write an array."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from functools import cache
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, check_call

__all__ = ["ASYNC", "CPU", "complete", "completion_at", "handles", "push", "wait_to_write"]

_POINTER = ctypes.c_void_p
_THREE_WORDS = ctypes.c_uint64 * 3

push = ctypes.PyDLL(None, handle=_LIB._handle).MXEnginePushAsyncND
"""Without types of its arguments: their conversion takes longer than the call."""
CPU = byref((ctypes.c_int32 * 2)(1, 0))
"""MXNet's context cpu(0)."""
ASYNC = byref(ctypes.c_int32(4))
"""The property of calls that do not block: the pushing thread begins them if they can begin."""

_function_at = cache(ctypes.PYFUNCTYPE(None, _POINTER, _POINTER, _POINTER))
"""A function that is too short to release Python's lock for it."""


def handles(tensors: Sequence[mx.nd.NDArray]) -> Any:
    """Return the handles of arrays, as the engine takes them."""
    return (_POINTER * len(tensors))(*[x.handle for x in tensors])


def completion_at(address: int) -> Sequence[int]:
    """Return what `complete` takes, from the second argument of a pushed function."""
    return _THREE_WORDS.from_address(address)[:]


def complete(completion: Sequence[int], error: Any = None) -> None:
    """Tell MXNet that a pushed function is done."""
    function, engine, argument = completion
    _function_at(function)(engine, argument, error)


@ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _POINTER)
def _nothing(run_context: int, completion: int, argument: int) -> None:
    complete(completion_at(completion))


def wait_to_write(tensors: Sequence[mx.nd.NDArray]) -> None:
    """Wait until nothing that was begun reads or writes arrays, each of which comes once.

    MXNet's function of this name wakes a thread for each array, also if there is nothing to wait
    for. This thread itself does a write of nothing if all arrays are ready.
    """
    # fmt: off
    if failed := push(
        _nothing, None, None, CPU, None, 0, handles(tensors), len(tensors), ASYNC, 0, b"gpucoll", 0
    ):
        check_call(failed)
    # fmt: on
    for x in tensors:
        check_call(_LIB.MXNDArrayWaitToRead(x.handle))
