"""Collectives on arrays of JAX: ``import gpucoll.integrations.jax as gcj``.

The functions have the names and parameters of `Communicator`'s methods, and work inside `jax.jit`,
`jax.grad`, `jax.vmap` and JAX's control flow (`docs/jax.md`).

>>> import gpucoll.integrations.jax as gcj
>>> comm = gpucoll.init()
>>> total = jax.jit(lambda x: gcj.all_reduce(x * 2))(x)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpucoll.integrations.jax.collectives import (
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        exclusive_scan,
        gather,
        recv,
        reduce,
        reduce_scatter,
        scan,
        scatter,
        send,
        send_recv,
    )
    from gpucoll.integrations.jax.ending import flush
    from gpucoll.integrations.jax.processes import use_for_processes

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "exclusive_scan",
    "flush",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "send",
    "send_recv",
    "use_for_processes",
]

_HOMES = {"flush": "ending", "use_for_processes": "processes"}


def __getattr__(name: str) -> object:
    """Import JAX when a function is first used: what prepares JAX itself must come before."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "collectives")
    if home != "processes":
        importlib.import_module(f"{__name__}.handlers").register()  # says which versions of JAX
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    return value
