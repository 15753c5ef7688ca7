"""`horovod.tensorflow`: collectives as ops of TensorFlow, eagerly and in graphs."""

# ruff: noqa: F401  # the names are the package

from __future__ import annotations

import importlib
from types import ModuleType

from gpucoll.integrations.horovod.basics import *  # noqa: F403
from gpucoll.integrations.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from gpucoll.integrations.horovod.tensorflow import mpi_ops, util
from gpucoll.integrations.horovod.tensorflow.compression import Compression
from gpucoll.integrations.horovod.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from gpucoll.integrations.horovod.tensorflow.gradient_aggregation import (
    LocalGradientAggregation as LocalGradientAggregationHelper,
)
from gpucoll.integrations.horovod.tensorflow.mpi_ops import (
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    check_num_rank_power_of_2,
    grouped_allgather,
    handle_average_backwards_compatibility,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from gpucoll.integrations.horovod.tensorflow.optimizer import DistributedOptimizer
from gpucoll.integrations.horovod.tensorflow.reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
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


def __getattr__(name: str) -> ModuleType:
    """Load `elastic` when it is asked for."""
    if name == "elastic":
        return importlib.import_module(f"{__name__}.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
