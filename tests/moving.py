"""One rank's call without ranks: what a backend does with buffers, done by `memmove`."""

from __future__ import annotations

import ctypes
from typing import Any

from gpucoll.arrays.operands import prepare


def move(x: Any, out: Any = None, **how: Any) -> Any:
    """Copy x's bytes to where the result goes, again and again if that is larger; finish."""
    arguments = prepare(x, out, **how)
    source, destination = arguments.source, arguments.destination
    assert source.device == destination.device == "cpu"
    assert destination.dtype == source.dtype
    data = ctypes.string_at(source.address, source.size_bytes)
    size_bytes = destination.size_bytes
    repeated = (data * (size_bytes // max(len(data), 1) + 1))[:size_bytes]
    ctypes.memmove(destination.address, repeated, size_bytes)
    return arguments.finish()
