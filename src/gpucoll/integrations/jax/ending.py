"""The end of calls that JAX has started and nobody has waited for."""

from __future__ import annotations

import atexit
import contextlib
import sys

import jax
from jax import numpy as jnp

from gpucoll.errors import BackendError
from gpucoll.integrations.jax.handlers import failures
from gpucoll.integrations.jax.sites import sites

__all__ = ["flush"]


@jax.jit
def _mark() -> jax.Array:
    return jnp.zeros(())


def flush() -> None:
    """Wait until every call has run that this thread's jitted functions have started.

    JAX starts a function and goes on. Whoever uses a result waits for it; this waits for the calls
    whose results nobody uses, such as a send.

    Raises
    ------
    BackendError
        A call without a result has failed since the last flush; the text is that of its error.
    """
    if not sites:
        return
    jax.effects_barrier()
    with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError):
        _mark().block_until_ready()  # a thread's functions run in order
    for array in jax.live_arrays():
        with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError):
            array.block_until_ready()  # other threads' functions
    if failures:
        text = failures.popleft()
        failures.clear()
        raise BackendError(f"a call of a jitted function that has no result failed: {text}")


def _flush_at_exit() -> None:
    try:
        flush()
    except BackendError as error:
        print(f"gpucoll: {error}", file=sys.stderr, flush=True)


atexit.register(_flush_at_exit)
