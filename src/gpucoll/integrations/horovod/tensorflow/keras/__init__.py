"""`horovod.tensorflow.keras`: training of models of `tf.keras` on several ranks."""

# ruff: noqa: F401, F403  # the names are the package

from __future__ import annotations

from functools import partial

import tensorflow as tf

from gpucoll.integrations.horovod.tensorflow._keras import front as _front
from gpucoll.integrations.horovod.tensorflow._keras.front import *
from gpucoll.integrations.horovod.tensorflow.keras import callbacks, elastic

load_model = partial(_front.load_model, tf.keras)
