"""Horovod's API for PyTorch: ``import gpucoll.integrations.horovod.torch as hvd``.

Programs that say ``import horovod.torch as hvd`` run by
``python -m gpucoll.integrations.horovod program.py``.
"""

# ruff: noqa: F401  # the names are the package

from __future__ import annotations

import importlib
from types import ModuleType

from gpucoll.integrations.horovod.torch import mpi_ops
from gpucoll.integrations.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from gpucoll.integrations.horovod.torch.mpi_ops import *  # noqa: F403
from gpucoll.integrations.horovod.torch.optimizer import DistributedOptimizer
from gpucoll.integrations.horovod.torch.sync_batch_norm import SyncBatchNorm


def __getattr__(name: str) -> ModuleType:
    """Load `elastic` when it is asked for."""
    if name == "elastic":
        return importlib.import_module(f"{__name__}.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
