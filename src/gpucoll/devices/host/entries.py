"""A driver's functions: compiled functions with the process's state already bound.

Libraries call a driver's functions by address. So each of them gets a few instructions, made here,
that put the address of the state before the arguments.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from gpucoll.devices.host import loop

__all__ = ["Entries", "entries"]


class Entries:
    """The functions of a driver's library.

    Attributes
    ----------
    addresses : dict
        Their addresses, by the names of `gpucoll.backends.gpu.enqueue_words.DriverTable`.
    """

    def __init__(self, state: int) -> None:
        self.record_event = _entry("record_event", state, loop.record_event, 2)
        self.stream_wait_event = _entry("stream_wait_event", state, loop.stream_wait_event, 3)
        self.query_event = _entry("query_event", state, loop.query_event, 1)
        self.stream_wait_value = _entry("stream_wait_value", state, loop.stream_wait_value, 3)
        self.stream_write_value = _entry("stream_write_value", state, loop.stream_write_value, 3)
        self.is_capturing = _entry("is_capturing", state, loop.is_capturing, 2)
        self.get_device = _entry("get_device", state, loop.get_device, 1)
        self.set_device = _entry("set_device", state, loop.set_device, 1)
        self.addresses = {
            "RECORD": _address(self.record_event),
            "WAIT": _address(self.stream_wait_event),
            "IS_CAPTURING": _address(self.is_capturing),
            "GET_DEVICE": _address(self.get_device),
            "SET_DEVICE": _address(self.set_device),
        }

    def current_device(self) -> int:
        """Return the number of the thread's current device."""
        number = ctypes.c_int()
        self.get_device(ctypes.addressof(number))
        return number.value


def _entry(name: str, state: int, function: Any, n_arguments: int) -> Callable[..., int]:
    """Return a function of `n_arguments` words that calls another one with the state first."""
    from llvmlite import ir

    from gpucoll.kernels.cpu.codegen import I64, compile_function

    module = ir.Module(name=name)
    kind = ir.FunctionType(I64, [I64] * n_arguments)
    made = ir.Function(module, kind, name=f"gpucoll_host_{name}")
    b = ir.IRBuilder(made.append_basic_block("entry"))
    target = ir.FunctionType(I64, [I64] * (n_arguments + 1)).as_pointer()
    called = b.inttoptr(I64(function.address), target)
    b.ret(b.call(called, [I64(state), *made.args]))
    words = [ctypes.c_int64] * n_arguments
    result: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int64, *words)(compile_function(made))
    return result


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def entries(state: int) -> Entries:
    """Return the entries of a process's state."""
    return Entries(state)
