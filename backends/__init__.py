"""Who moves the bytes: one package per backend, found in one table."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """What is known of a backend before anything of it is imported."""

    moves: str
    """What it moves, for people."""
    module: str
    """Where its ``create`` (host arrays) or ``connect`` and ``adopt`` (GPU arrays) are."""
    enqueues: bool
    """Whether its calls go onto streams of a GPU; else they run in the calling thread."""


BACKENDS = MappingProxyType(
    {
        "cpu": Entry(
            "host arrays of one host, through shared memory",
            "gpucoll.backends.cpu.host.backend",
            enqueues=False,
        ),
        "nccl": Entry(
            "arrays on NVIDIA GPUs, through NCCL", "gpucoll.backends.nccl.connected", enqueues=True
        ),
        "rccl": Entry(
            "arrays on AMD GPUs, through RCCL", "gpucoll.backends.nccl.connected", enqueues=True
        ),
    }
)
"""Backends of this version, by name. Nothing is imported before it is asked for."""

PLANNED = ("mpi", "direct")
"""Names that are known but not served yet: asking for one says so."""


def load(name: str) -> Any:
    """Return the module of a backend: a `HostBackends` or a `GpuBackends` of `protocol`."""
    return importlib.import_module(BACKENDS[name].module)
