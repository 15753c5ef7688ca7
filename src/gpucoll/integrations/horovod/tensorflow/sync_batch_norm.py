"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gpucoll.integrations.horovod.basics import Average, size
from gpucoll.integrations.horovod.tensorflow.mpi_ops import _allreduce

__all__ = ["SyncBatchNormalization"]


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Normalizes by the mean and variance of the whole batch: that of all ranks together.

    Parameters
    ----------
    fused : bool
        Must be False.
    **kwargs
        Those of Keras' ``BatchNormalization``.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        kwargs["name"] = kwargs.get("name") or "sync_batch_normalization"
        if _IS_KERAS_2:
            kwargs["fused"] = fused
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mean, variance = super()._moments(inputs, *args, **kwargs)
        if size() == 1:
            return mean, variance
        both = tf.stack([mean, variance + tf.math.square(mean)])
        mean, mean_of_squares = tf.unstack(_allreduce(both, op=Average))
        return mean, mean_of_squares - tf.math.square(mean)


_IS_KERAS_2 = not hasattr(tf.keras.layers.BatchNormalization, "quantize")
