"""`horovod.tensorflow`: collectives as ops of TensorFlow, eagerly and in graphs."""

# ruff: noqa: F401, F403  # the names are the package

from __future__ import annotations

from gpucoll.integrations.horovod.tensorflow import elastic, mpi_ops, util
from gpucoll.integrations.horovod.tensorflow.compression import Compression
from gpucoll.integrations.horovod.tensorflow.functions import *
from gpucoll.integrations.horovod.tensorflow.gradient_aggregation import (
    LocalGradientAggregation as LocalGradientAggregationHelper,
)
from gpucoll.integrations.horovod.tensorflow.mpi_ops import *
from gpucoll.integrations.horovod.tensorflow.optimizer import DistributedOptimizer
from gpucoll.integrations.horovod.tensorflow.reductions import *
from gpucoll.integrations.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from gpucoll.integrations.horovod.tensorflow.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from gpucoll.integrations.horovod.tensorflow.util import (
    _executing_eagerly,
    _make_subgraph,
    refs_to_vars,
    vars_to_refs,
)


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether collectives take tensors of GPUs: not here."""
    return False
