"""Horovod's API over gpucoll: ``import gpucoll.integrations.horovod.torch as hvd``.

Programs written for Horovod run unchanged, on any of gpucoll's backends: `docs/horovod.md`.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.28.1"
__all__ = ["run"]


def __getattr__(name: str) -> Any:
    if name == "run":  # imported when it is used: few programs start ranks
        from gpucoll.integrations.horovod.runner import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
