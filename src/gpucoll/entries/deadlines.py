"""The deadline of one call of a compiled entry, if the call has its own."""

from __future__ import annotations

from gpucoll.arrays.numpy_struct import OBJECT_TYPE
from gpucoll.config import LONGEST_TIMEOUT_S
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.memory import load64
from gpucoll.transport.shared.words import Context

SLICE_S = 0.02
"""Time after which a wait looks whether to continue."""
LEAST_SLICE_S = 1e-4

USUAL = 0
"""In place of nanoseconds: the communicator's deadline."""
UNKNOWN = -1
"""In place of nanoseconds: Python must check the argument."""

_MOST_SLICE_NS, _LEAST_SLICE_NS = int(SLICE_S * 1e9), int(LEAST_SLICE_S * 1e9)
_LONGEST_S = float(LONGEST_TIMEOUT_S)
_i64 = types.int64
_as_double = types.ExternalFunction("PyFloat_AsDouble", types.float64(_i64))
_clear_error = types.ExternalFunction("PyErr_Clear", types.void())


@inline
def deadline_ns(seconds: int, none: int, int_type: int, float_type: int) -> int:
    """Return a ``timeout_s`` in nanoseconds, if it is a plain float or int in range."""
    if seconds == none:
        return USUAL
    kind = load64(seconds + OBJECT_TYPE)
    if kind != float_type and kind != int_type:
        return UNKNOWN
    number = _as_double(seconds)
    if number > 0 and number <= _LONGEST_S:
        return max(1, int(number * 1e9))
    _clear_error()  # an int that no float can hold sets one
    return UNKNOWN


@inline
def set_deadline(context: Context, timeout_ns: int) -> None:
    """Set the deadline of the next call."""
    context.timeout_ns = timeout_ns
    context.slice_ns = max(min(_MOST_SLICE_NS, timeout_ns), _LEAST_SLICE_NS)


@inline
def usual_deadline_ns(context: Context) -> int:
    """Return the communicator's current deadline."""
    return context.timeout_ns
