"""Training with Keras 2 or 3 on two ranks gives the weights of one process; says what passed."""

import os
import sys
import tempfile

import horovod.keras
import horovod.tensorflow
import numpy as np
import pytest
import tensorflow as tf

IS_KERAS_3 = hasattr(tf.keras, "ops")
if not IS_KERAS_3:
    import horovod.tensorflow.keras as hvd
else:
    import horovod.keras as hvd

keras = tf.keras
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
BATCH, EPOCHS = 16, 3
random = np.random.default_rng(0)
X = random.normal(size=(64, 8)).astype(np.float32)
Y = (X @ random.normal(size=(8, 3))).astype(np.float32)
MINE = np.arange(64).reshape(-1, SIZE, BATCH // SIZE)[:, RANK].ravel()


def model_of(optimizer, seed=0):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(16, activation="relu", input_shape=(8,)), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile(loss="mse", optimizer=optimizer)
    return model


def fit(model, rows, batch_size, callbacks=(), epochs=EPOCHS):
    how = {"shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
    return model.fit(X[rows], Y[rows], batch_size=batch_size, epochs=epochs, **how).history


def ours(**options):
    return hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), **options)


def ranks_get_the_weights_of_one_process():
    alone = model_of(keras.optimizers.SGD(0.05, momentum=0.9))
    alone_history = fit(alone, np.arange(64), BATCH)
    model = model_of(ours())
    history = fit(model, MINE, BATCH // SIZE, [hvd.callbacks.MetricAverageCallback()])
    for x, y in zip(alone.get_weights(), model.get_weights(), strict=True):
        assert np.allclose(x, y, atol=1e-5)
    assert np.allclose(alone_history["loss"], history["loss"], rtol=1e-4)


def callbacks_make_ranks_equal_and_set_the_rate():
    model = model_of(ours(), seed=RANK)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.04, warmup_epochs=2, verbose=1),
        hvd.callbacks.LearningRateScheduleCallback(0.04, 0.5, start_epoch=2),
    ]
    history = fit(model, MINE, BATCH // SIZE, callbacks, epochs=4)
    assert np.allclose(history["lr"], [0.03, 0.04, 0.04, 0.02])
    for x in model.get_weights():
        assert np.allclose(x, hvd.broadcast(x, 0))


def a_loaded_model_reduces_and_has_its_state():
    model = model_of(ours())
    fit(model, MINE, BATCH // SIZE, epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        loaded = hvd.load_model(path)
    fit(model, MINE, BATCH // SIZE, epochs=1)
    fit(loaded, MINE, BATCH // SIZE, epochs=1)
    for x, y in zip(model.get_weights(), loaded.get_weights(), strict=True):
        assert np.allclose(x, y, atol=1e-6)
        assert np.allclose(y, hvd.broadcast(y, 0))


def batches_of_all_ranks_are_normalized_together():
    alone = keras.layers.BatchNormalization(momentum=0.5)
    ours = horovod.tensorflow.SyncBatchNormalization(momentum=0.5)
    expected = alone(X[:32], training=True)
    got = ours(X[RANK * 16 : RANK * 16 + 16], training=True)
    assert np.allclose(expected[RANK * 16 : RANK * 16 + 16], got, atol=1e-5)
    assert np.allclose(alone.moving_mean, ours.moving_mean, atol=1e-6)
    assert np.allclose(alone.moving_variance, ours.moving_variance, atol=1e-5)


def layers_may_be_left_to_each_rank():
    model = model_of("sgd")
    of_own = model.layers[0]
    optimizer = horovod.keras.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.05), local_layers=of_own
    )
    model.compile(loss="mse", optimizer=optimizer)
    fit(model, MINE, BATCH // SIZE, epochs=1)
    equal = [np.allclose(x, hvd.broadcast(x, 0)) for x in model.get_weights()]
    if RANK == 1:
        assert equal == [False, False, True, True]


def gradients_of_several_passes_are_added_up():
    if IS_KERAS_3:
        with pytest.raises(ValueError, match="gradient_accumulation_steps=2"):
            ours(backward_passes_per_step=2)
        return
    alone = model_of(keras.optimizers.SGD(0.05, momentum=0.9))
    fit(alone, np.arange(64), BATCH)
    model = model_of(ours(backward_passes_per_step=2, average_aggregated_gradients=True))
    fit(model, MINE, BATCH // SIZE // 2)
    for x, y in zip(alone.get_weights(), model.get_weights(), strict=True):
        assert np.allclose(x, y, atol=1e-5)


def the_state_of_elastic_training_is_that_of_rank_0():
    model = model_of(ours(), seed=RANK)
    fit(model, MINE, BATCH // SIZE, epochs=1)
    state = hvd.elastic.KerasState(model, epoch=3 + RANK)
    state.sync()
    assert state.epoch == 3
    kept = model.get_weights()
    fit(model, MINE, BATCH // SIZE, [hvd.elastic.UpdateEpochStateCallback(state)], epochs=1)
    assert state.epoch == 4
    state.restore()
    assert state.epoch == 3
    for x, y in zip(kept, model.get_weights(), strict=True):
        assert np.array_equal(x, y)
        assert np.array_equal(x, hvd.broadcast(x, 0))


CHECKS = [value for name, value in list(globals().items()) if callable(value) and "_" in name]
CHECKS = [check for check in CHECKS if check.__module__ == "__main__" and check is not model_of]

for check in CHECKS:
    check()
    print(f"passed {check.__name__}", flush=True)
hvd.shutdown()
sys.exit(0)
