"""Load and store words of shared memory from Python, in the order that compiled code keeps.

A NumPy view of the same memory would suffice on x86-64, but not on arm64, where a rank may see a
flag before the data that was stored first. So these functions load and store flags; their data is
loaded after the flag and stored before it, by any means. docs/decisions/0029-memory-order.md lists
every such pair.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from gpucoll.kernels.cpu.jit import compiled
from gpucoll.kernels.cpu.memory import fence_full, load64_acquire
from gpucoll.transport.shared.flags import event_compare_exchange, event_store


@compiled
def word_load(address: int) -> int:
    """Load a word. Later loads see data at least as new as this word."""
    return load64_acquire(address)


@compiled
def word_load_after(address: int) -> int:
    """Load a word after all earlier loads and stores of this thread, with a full fence."""
    fence_full()
    return load64_acquire(address)


def function(code: Any, n_arguments: int) -> Callable[..., int]:
    """Return compiled code as a function that keeps the interpreter, since it takes nanoseconds.

    So it forms one step with the code around it, also with respect to compiled entries: they check
    whether they may run before they let other threads run.
    """
    words = [ctypes.c_int64] * n_arguments
    made: Callable[..., int] = ctypes.PYFUNCTYPE(ctypes.c_int64, *words)(code.address)
    return made


load = function(word_load, 1)
"""``load(address)``: loads a flag, before its data."""
load_after = function(word_load_after, 1)
"""``load_after(address)``: loads the other side's word of a handshake, or a flag after its data."""
store = function(event_store, 2)
"""``store(address, value)``: stores a flag after its data, before all else; returns what it was."""
compare_exchange = function(event_compare_exchange, 3)
"""``compare_exchange(address, expected, desired)``: does the same if the flag is `expected`."""
