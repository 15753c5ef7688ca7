"""Elastic training of `tf.keras` models."""

from __future__ import annotations

import tensorflow as tf

from gpucoll.integrations.horovod.tensorflow._keras import elastic as _impl
from gpucoll.integrations.horovod.tensorflow._keras.callbacks import callback as _callback
from gpucoll.integrations.horovod.tensorflow.elastic import TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

KerasState = TensorFlowKerasState
CommitStateCallback = _callback(tf.keras, _impl.CommitState, __name__)
UpdateBatchStateCallback = _callback(tf.keras, _impl.UpdateBatchState, __name__)
UpdateEpochStateCallback = _callback(tf.keras, _impl.UpdateEpochState, __name__)
