"""Who moves the bytes: one package per backend, found in one table."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import Any, NamedTuple


class KnownBackend(NamedTuple):
    """What is known of a backend before anything of it is imported."""

    module: str
    """Where its ``create`` (host arrays) or ``connect`` and ``adopt`` (GPU arrays) are."""
    enqueues: bool
    """Whether its calls go onto streams of a GPU; else they run in the calling thread."""


BACKENDS = MappingProxyType(
    {
        # Host arrays of one host, through shared memory.
        "cpu": KnownBackend("gpucoll.backends.cpu.host.backend", enqueues=False),
        # Arrays on GPUs, through their vendor's library.
        "nccl": KnownBackend("gpucoll.backends.nccl.connected", enqueues=True),
        "rccl": KnownBackend("gpucoll.backends.nccl.connected", enqueues=True),
    }
)
"""Backends of this version, by name. Nothing is imported before it is asked for."""

PLANNED = ("mpi", "direct")
"""Names that are known but not served yet: asking for one says so."""


def load(name: str) -> Any:
    """Return the module of a backend.

    A `gpucoll.backends.protocol.HostBackends` or a `gpucoll.backends.gpu.protocol.GpuBackends`.
    """
    return importlib.import_module(BACKENDS[name].module)
