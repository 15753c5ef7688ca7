"""JAX programs on gpucoll: their own collectives between processes, and gpucoll's inside jit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpucoll.integrations.jax.processes import use_for_processes

__all__ = ["use_for_processes"]

_PLACES = {"use_for_processes": "processes"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
