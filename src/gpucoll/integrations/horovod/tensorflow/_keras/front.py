"""The functions that `horovod.keras` and `horovod.tensorflow.keras` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf

from gpucoll.integrations.horovod.basics import Average, Sum
from gpucoll.integrations.horovod.process_sets import ProcessSet, global_process_set
from gpucoll.integrations.horovod.tensorflow import functions, mpi_ops, reductions
from gpucoll.integrations.horovod.tensorflow._keras.optimizer import (
    Reducing,
    reducing_optimizer,
    take_state,
)
from gpucoll.integrations.horovod.tensorflow.compression import Compression
from gpucoll.integrations.horovod.tensorflow.gradients import checked_groups
from gpucoll.integrations.horovod.tensorflow.tape import checked_layers
from gpucoll.integrations.horovod.tensorflow.util import _executing_eagerly

__all__ = [
    *mpi_ops.__all__,
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allreduce",
    "broadcast_global_variables",
    "reducescatter",
]
globals().update({name: getattr(mpi_ops, name) for name in mpi_ops.__all__})


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer of Keras like this one that reduces gradients over the ranks.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
        Of Keras 2 (tf-keras) or Keras 3, with the TensorFlow backend.
    op : Average or Sum
    backward_passes_per_step : int
        How many passes' gradients are added up before they are reduced. Keras 3 has
        ``gradient_accumulation_steps`` instead.

    The others are as for `horovod.tensorflow.DistributedOptimizer`.
    """
    if op not in (Average, Sum):
        raise ValueError("op currently only supports Average and Sum")
    how = {
        "device_dense": device_dense,
        "device_sparse": device_sparse,
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "groups": checked_groups(num_groups, groups),
        "process_set": process_set,
    }
    passes = backward_passes_per_step, average_aggregated_gradients
    return reducing_optimizer(optimizer, Reducing(name, how, scale_local_gradients, *passes))


def PartialDistributedOptimizer(
    optimizer: Any, *options: Any, local_layers: Any = None, **named: Any
) -> Any:
    """Return a `DistributedOptimizer` that leaves the gradients of some layers on this rank."""
    made = DistributedOptimizer(optimizer, *options, **named)
    for layer in checked_layers(local_layers):
        for variable in layer.trainable_weights:
            made.register_local_var(variable)
    return made


def broadcast_global_variables(root_rank: int) -> Any:
    """Broadcast all variables of the session's graph."""
    return _result(functions.broadcast_global_variables(root_rank))


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduce what can be made a tensor, over the ranks."""
    reduced = reductions.allreduce(
        tf.constant(value, name=name),
        average=average,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        op=op,
        compression=compression,
    )
    return _result(reduced)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the values of all ranks, one after the other along axis 0."""
    return _result(mpi_ops.allgather(tf.constant(value, name=name)))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of one rank."""
    return _result(mpi_ops.broadcast(tf.constant(value, name=name), root_rank))


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> Any:
    """Reduce a value over the ranks and return this rank's part of the rows."""
    return _result(reductions.reducescatter(tf.constant(value, name=name), op=op))


def load_model(
    keras: ModuleType,
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a saved model, with an optimizer that reduces gradients.

    Parameters
    ----------
    keras : module
        The Keras of the model; not a parameter in `horovod.keras` and `horovod.tensorflow.keras`.
    filepath : str or file of h5py
    custom_optimizers : list of classes, optional
        Optimizers that are not Keras' own.
    custom_objects : dict, optional
        As for Keras' ``load_model``.
    compression : Compressor
    legacy_opts : bool
        Not needed here: the optimizer is of the class that the model was saved with.
    """
    known = {of.__name__: of for of in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    loaded = model.optimizer
    model.optimizer = DistributedOptimizer(loaded, compression=compression)
    take_state(model.optimizer, loaded, model.trainable_variables)
    return model


def _result(op_or_result: Any) -> Any:
    if _executing_eagerly():
        return op_or_result
    return tf.compat.v1.keras.backend.get_session().run(op_or_result)
