"""The backends, which move the bytes: one package each, found through one table."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import Any, NamedTuple


class KnownBackend(NamedTuple):
    """Facts about a backend that are needed before it is imported."""

    module: str
    """Where its ``create`` (host arrays) or ``connect`` and ``adopt`` (GPU arrays) are."""
    enqueues: bool
    """Whether its calls go onto streams of a GPU; else they run in the calling thread."""
    between_hosts: str = ""
    """The module for ranks on several hosts; empty: the same."""


BACKENDS = MappingProxyType(
    {
        # Host arrays: of one host through shared memory, between hosts over its links.
        "cpu": KnownBackend(
            "gpucoll.backends.cpu.host.backend",
            enqueues=False,
            between_hosts="gpucoll.backends.cpu.world.backend",
        ),
        # Host arrays through MPI, wherever the ranks are.
        "mpi": KnownBackend(
            "gpucoll.backends.mpi.backend",
            enqueues=False,
            between_hosts="gpucoll.backends.mpi.world",
        ),
        # Arrays on GPUs, through their vendor's library.
        "nccl": KnownBackend("gpucoll.backends.nccl.connected", enqueues=True),
        "rccl": KnownBackend("gpucoll.backends.nccl.connected", enqueues=True),
        "oneccl": KnownBackend("gpucoll.backends.oneccl.connected", enqueues=True),
        # Arrays on GPUs, without a vendor's library.
        "direct": KnownBackend("gpucoll.backends.direct.connected", enqueues=True),
    }
)
"""The backends of this version, by name. A backend is imported only when it is used."""


def load(name: str, *, spans_hosts: bool = False) -> Any:
    """Return the module of a backend, for ranks of one host or of several.

    A `gpucoll.backends.protocol.HostBackends` or a `gpucoll.backends.gpu.protocol.GpuBackends`.
    """
    known = BACKENDS[name]
    module = known.between_hosts if spans_hosts and known.between_hosts else known.module
    return importlib.import_module(module)
