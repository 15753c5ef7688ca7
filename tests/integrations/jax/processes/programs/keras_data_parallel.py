"""Train a small model, each process with its part of every batch; print losses and weights."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

N, RANK = jax.process_count(), jax.process_index()
BATCH = 16


class Parts(keras.utils.PyDataset):
    """This process's part of each batch."""

    def __init__(self):
        super().__init__()
        self.x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
        self.y = self.x.sum(axis=1, keepdims=True)

    def __len__(self):
        return len(self.x) // BATCH

    def __getitem__(self, index):
        size = BATCH // N
        start = index * BATCH + RANK * size
        return self.x[start : start + size], self.y[start : start + size]


keras.utils.set_random_seed(3)
if N > 1:
    devices = keras.distribution.list_devices()
    parallel = keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False)
    keras.distribution.set_distribution(parallel)
layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)]
model = keras.Sequential([keras.layers.Input((8,)), *layers])
model.compile("adam", "mse")
history = model.fit(Parts(), epochs=3, verbose=0, shuffle=False)
weights = [np.asarray(v.value.addressable_data(0)).ravel() for v in model.trainable_variables]
print(*history.history["loss"], *(float(np.abs(part).sum()) for part in weights))
