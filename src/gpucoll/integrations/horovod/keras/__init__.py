"""`horovod.keras`: training of models of the package `keras` on several ranks."""

# ruff: noqa: F401, F403  # the names are the package

from __future__ import annotations

from functools import partial

import keras

from gpucoll.integrations.horovod.keras import callbacks, elastic
from gpucoll.integrations.horovod.tensorflow._keras import front as _front
from gpucoll.integrations.horovod.tensorflow._keras.front import *

load_model = partial(_front.load_model, keras)
