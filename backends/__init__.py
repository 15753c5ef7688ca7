"""Who moves the bytes: one package per backend, found in one table."""

from __future__ import annotations

from types import MappingProxyType

BACKENDS = MappingProxyType({"cpu": "gpucoll.backends.cpu.backend"})
"""Backends of this version: name -> module, which has a ``create(group)``."""

PLANNED = ("nccl", "rccl", "mpi", "direct")
"""Names that are known but not served yet: asking for one says so."""
