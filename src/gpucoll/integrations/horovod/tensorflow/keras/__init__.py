"""`horovod.tensorflow.keras`: training of `tf.keras` models on several ranks."""

# ruff: noqa: F401  # the names are the package

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import tensorflow as tf

from gpucoll.integrations.horovod._keras import optimizer as _impl
from gpucoll.integrations.horovod._keras.front import (
    DistributedOptimizer,
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from gpucoll.integrations.horovod.basics import *  # noqa: F403
from gpucoll.integrations.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from gpucoll.integrations.horovod.tensorflow.compression import Compression
from gpucoll.integrations.horovod.tensorflow.keras import callbacks


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a saved model, with an optimizer that reduces gradients.

    Parameters
    ----------
    filepath : str or file of h5py
    custom_optimizers : list of classes, optional
        Optimizers that are not Keras' own.
    custom_objects : dict, optional
        As for Keras' ``load_model``.
    legacy_opts : bool
        Whether the model has an optimizer of ``keras.optimizers.legacy``.
    """

    def wrap(of: type) -> Any:
        return lambda **kwargs: DistributedOptimizer(of(**kwargs), compression=compression)

    return _impl.load_model(
        tf.keras, wrap, filepath, custom_optimizers, custom_objects, legacy_opts
    )


def __getattr__(name: str) -> ModuleType:
    """Load `elastic` when it is asked for."""
    if name == "elastic":
        return importlib.import_module(f"{__name__}.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
