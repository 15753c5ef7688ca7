"""Callbacks for `tf.keras`."""

from __future__ import annotations

import tensorflow as tf

from gpucoll.integrations.horovod.tensorflow._keras import callbacks as _impl

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

BroadcastGlobalVariablesCallback = _impl.callback(
    tf.keras, _impl.BroadcastGlobalVariables, __name__
)
MetricAverageCallback = _impl.callback(tf.keras, _impl.MetricAverage, __name__)
LearningRateScheduleCallback = _impl.callback(tf.keras, _impl.LearningRateSchedule, __name__)
LearningRateWarmupCallback = _impl.callback(tf.keras, _impl.LearningRateWarmup, __name__)
BestModelCheckpoint = _impl.checkpoint(tf.keras, __name__)
