"""Horovod's API for MXNet 1.9: ``import gpucoll.integrations.horovod.mxnet as hvd``.

Arrays in the CPU's memory. MXNet is not developed any more, and needs NumPy below 2.
"""

# ruff: noqa: E402, F401, F403  # the names are the package

from __future__ import annotations

from gpucoll.integrations.old_numpy import restore

restore()

from gpucoll.integrations.horovod.mxnet.compression import Compression
from gpucoll.integrations.horovod.mxnet.functions import (
    allgather_object,
    broadcast_object,
    broadcast_parameters,
)
from gpucoll.integrations.horovod.mxnet.mpi_ops import *
from gpucoll.integrations.horovod.mxnet.trainer import DistributedOptimizer, DistributedTrainer
