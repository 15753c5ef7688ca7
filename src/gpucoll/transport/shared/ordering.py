"""Words of shared memory as Python loads and stores them: in the order that compiled code keeps.

A NumPy view of the same memory would do on x86-64 and not on arm64, where a flag may be seen before
the data that was stored first. So a flag is loaded or stored here, and its data, after or before
that, in any way. Every such pair is in docs/decisions/0029-memory-order.md.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from gpucoll.kernels.cpu.jit import compiled, types
from gpucoll.kernels.cpu.memory import fence_full, load64_acquire
from gpucoll.transport.shared.flags import event_compare_exchange, event_store

__all__ = ["compare_exchange", "load", "load_after", "store", "word_load", "word_load_after"]

_i64 = types.int64


@compiled(_i64(_i64))
def word_load(address: int) -> int:
    """Load a word. What is loaded afterwards is as new as it."""
    return load64_acquire(address)  # type: ignore[no-any-return]


@compiled(_i64(_i64))
def word_load_after(address: int) -> int:
    """Load a word after all that this thread has loaded and stored before, with a full fence."""
    fence_full()
    return load64_acquire(address)  # type: ignore[no-any-return]


def function(code: Any, n_arguments: int) -> Callable[..., int]:
    """Return compiled code as a function that keeps the interpreter: it is over in nanoseconds.

    So it is one step with what is around it also for compiled entries, which look whether they may
    run before they let other threads run.
    """
    words = [ctypes.c_int64] * n_arguments
    made: Callable[..., int] = ctypes.PYFUNCTYPE(ctypes.c_int64, *words)(code.address)
    return made


load = function(word_load, 1)
"""``load(address)``: a flag, before its data."""
load_after = function(word_load_after, 1)
"""``load_after(address)``: the other side's word of a handshake, or a flag behind its data."""
store = function(event_store, 2)
"""``store(address, value)``: a flag, behind its data and before all else; says what was."""
compare_exchange = function(event_compare_exchange, 3)
"""``compare_exchange(address, expected, desired)``: the same where `expected` is."""
