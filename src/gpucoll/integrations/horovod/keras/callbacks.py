"""Callbacks for the package `keras`."""

from __future__ import annotations

import keras

from gpucoll.integrations.horovod.tensorflow._keras import callbacks as _impl

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

BroadcastGlobalVariablesCallback = _impl.callback(keras, _impl.BroadcastGlobalVariables, __name__)
MetricAverageCallback = _impl.callback(keras, _impl.MetricAverage, __name__)
LearningRateScheduleCallback = _impl.callback(keras, _impl.LearningRateSchedule, __name__)
LearningRateWarmupCallback = _impl.callback(keras, _impl.LearningRateWarmup, __name__)
BestModelCheckpoint = _impl.checkpoint(keras, __name__)
