"""Elastic training of models of the package `keras`."""

from __future__ import annotations

import keras

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
CommitStateCallback = _callback(keras, _impl.CommitState, __name__)
UpdateBatchStateCallback = _callback(keras, _impl.UpdateBatchState, __name__)
UpdateEpochStateCallback = _callback(keras, _impl.UpdateEpochState, __name__)
