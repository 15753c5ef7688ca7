"""The end of calls that JAX has started and nobody has waited for."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from typing import TYPE_CHECKING

import jax
from jax import numpy as jnp

from gpucoll.errors import BackendError
from gpucoll.integrations.jax.compiled.handler import Failed

if TYPE_CHECKING:
    from gpucoll.integrations.native import Door

__all__ = ["failed", "flush", "flush_before_close"]

failed = Failed.new()
"""Where the handlers leave the error of a call that has no result."""
_nothing = jax.jit(lambda: jnp.zeros(()))
_free = ctypes.CDLL(None).free
_free.restype, _free.argtypes = None, [ctypes.c_void_p]
_failures = (RuntimeError, ValueError)
"""What JAX raises in the place of a result; a deleted array is one, too."""


def flush() -> None:
    """Wait until every call has run that jitted functions have started.

    JAX starts a function and goes on. A program that uses a result waits for it; this waits for
    the calls whose results nobody uses, such as a send. `Communicator.close` and the end of the
    program call it.

    Raises
    ------
    BackendError
        A call without a result has failed since the last flush; the text is that of its error.
    """
    with contextlib.suppress(*_failures):
        jax.effects_barrier()
    with contextlib.suppress(*_failures):
        _nothing().block_until_ready()  # a thread's functions run in order
    for array in jax.live_arrays():  # those of other threads
        with contextlib.suppress(*_failures):
            array.block_until_ready()
    address, failed.text = failed.text, 0
    if address:
        text = ctypes.string_at(address).decode(errors="replace")
        _free(address)
        raise BackendError(f"a call of a jitted function that has no result failed: {text}")


def flush_before_close(door: Door) -> None:
    """Have the end of the door's communicator, and that of the program, wait for its calls."""
    if _flush_and_tell not in door.before_close:
        door.before_close.append(_flush_and_tell)
        atexit.unregister(_flush_and_tell)
        atexit.register(_flush_and_tell)


_process = os.getpid()


def _flush_and_tell(timeout_s: float = 0.0) -> None:
    if os.getpid() != _process:
        return  # a fork has none of XLA's threads: what it starts never runs
    try:
        flush()
    except BackendError as error:
        print(f"gpucoll: {error}", file=sys.stderr, flush=True)
