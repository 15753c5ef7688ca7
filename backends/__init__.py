"""Who moves the bytes: one package per backend, found in one table."""

from __future__ import annotations

from types import MappingProxyType

BACKENDS = MappingProxyType(
    {
        "cpu": "host arrays of one host, through shared memory",
        "nccl": "arrays on NVIDIA GPUs, through NCCL",
        "rccl": "arrays on AMD GPUs, through RCCL",
    }
)
"""Backends of this version, and what they move."""

PLANNED = ("mpi", "direct")
"""Names that are known but not served yet: asking for one says so."""
