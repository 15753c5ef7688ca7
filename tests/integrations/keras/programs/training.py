"""Keras over gpucoll on two ranks, on the backend that KERAS_BACKEND names; says what passed.

Arguments: names of checks, else all run. ``--thorough``: all optimizers and ways to compile, also
on backends where each takes seconds to compile.
"""

import functools
import os
import sys
import tempfile
import time

import keras
import numpy as np
import pytest

import gpucoll
import gpucoll.integrations.keras as gck

with pytest.raises(gpucoll.StateError, match=r"call comm = gpucoll.init\(\) before"):
    gck.DistributedOptimizer("sgd")
comm = gpucoll.init()
RANK, BACKEND = comm.rank, keras.backend.backend()
RANDOM = np.random.RandomState(0)
X = RANDOM.randn(64, 8).astype("float32")
Y = X.sum(1, keepdims=True) / 4
ALONE = slice(None)
OURS = slice(RANK, None, 2)


def network(seed=7, *more):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(16, activation="tanh"), *more, keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((8,)), *layers])


def fitted(optimizer, rows, *, epochs=3, callbacks=(), validates=False, **how):
    """Return a trained model and its history: over all ranks, if rows are not ALONE."""
    is_alone = rows == ALONE
    model = network(7 if is_alone else 7 + RANK)
    if not is_alone:
        optimizer = gck.DistributedOptimizer(optimizer)
        callbacks = [gck.DataParallel(), *callbacks]
    model.compile(optimizer, "mse", metrics=["mae"], **how)
    batch = 16 if is_alone else 8
    validation = (X[:32][rows], Y[:32][rows]) if validates else None
    history = model.fit(
        X[rows],
        Y[rows],
        batch,
        epochs,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks],
        validation_data=validation,
    )
    return model, history.history


@functools.cache
def alone(name, epochs=3):
    """Return weights and history of one process: rank 0."""
    if RANK:
        return comm.broadcast_object(None)
    model, history = fitted(OPTIMIZERS[name](), ALONE, epochs=epochs, validates=epochs == 3)
    return comm.broadcast_object((model.get_weights(), history))


def compare(ours, weights, tolerance=1e-6):
    for x, y in zip(ours.get_weights(), weights, strict=True):
        assert np.abs(x - y).max() < tolerance, np.abs(x - y).max()
    equal_on_all_ranks(ours)


def equal_on_all_ranks(model):
    mine = [x.tobytes() for x in model.get_weights()]
    assert comm.all_gather_object(mine) == [mine] * 2


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
    "clipped together": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    "clipped values": lambda: keras.optimizers.Adam(0.01, clipvalue=0.01),
    "accumulated": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2, global_clipnorm=0.1
    ),
    "decayed": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01, use_ema=True),
}
WAYS = {
    "torch": [{"run_eagerly": True}],
    "jax": [{"steps_per_execution": 2}, {"run_eagerly": True}],
    "tensorflow": [{"jit_compile": True}, {"steps_per_execution": 2}, {"run_eagerly": True}],
}[BACKEND]
THOROUGH = "--thorough" in sys.argv or BACKEND == "torch"


def two_ranks_equal_one_process():
    for name in OPTIMIZERS if THOROUGH else ("adam", "accumulated"):
        ours, logs = fitted(OPTIMIZERS[name](), OURS, validates=True)
        weights, expected = alone(name)
        compare(ours, weights)
        assert comm.all_gather_object(logs) == [logs] * 2
        assert {*logs} == {*expected} == {"loss", "mae", "val_loss", "val_mae"}
        for name, values in logs.items():
            assert np.allclose(values, expected[name], atol=1e-6), name


def steps_may_be_compiled_or_not():
    for how in WAYS if THOROUGH else WAYS[:1]:
        ours, _ = fitted(OPTIMIZERS["adam"](), OURS, **how)
        compare(ours, alone("adam")[0])


def fit_may_be_called_again():
    ours, _ = fitted(OPTIMIZERS["adam"](), OURS, epochs=2)
    weights, _ = alone("adam", 4)
    if RANK:
        ours.set_weights([0 * x for x in ours.get_weights()])  # rank 0's are taken
    options = {"shuffle": False, "verbose": 0, "callbacks": [gck.DataParallel(comm)]}
    ours.fit(X[OURS], Y[OURS], 8, 2, **options)
    compare(ours, weights)


def a_saved_model_goes_on():
    ours, _ = fitted(OPTIMIZERS["adam"](), OURS, epochs=2)
    weights, _ = alone("adam", 4)
    folder = comm.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None)
    path = os.path.join(folder, "model.keras")
    if RANK == 0:
        ours.save(path)
    comm.barrier()
    model = keras.models.load_model(path)
    comm.barrier()
    if RANK == 0:
        os.remove(path)
        os.rmdir(folder)
    assert type(model.optimizer) is type(keras.optimizers.Adam())
    options = {"shuffle": False, "verbose": 0, "callbacks": [gck.DataParallel(comm)]}
    with pytest.raises(ValueError, match=r"DistributedOptimizer\(model.optimizer\)"):
        model.fit(X[OURS], Y[OURS], 8, **options)
    gck.DistributedOptimizer(model.optimizer)
    model.fit(X[OURS], Y[OURS], 8, 2, **options)
    compare(model, weights)


def scaled_losses_overflow_on_all_ranks_or_none():
    scaling, adam = keras.optimizers.LossScaleOptimizer, OPTIMIZERS["sgd"]
    around = scaling(gck.DistributedOptimizer(adam()), initial_scale=2.0**14)
    inside = scaling(adam(), initial_scale=2.0**14)
    for optimizer in (around, inside):
        model = network(7 + RANK)
        model.compile(gck.DistributedOptimizer(optimizer), "mse", auto_scale_loss=False)
        targets = Y[OURS].copy()
        if RANK:
            targets[8:16] = 1e37  # the second batch overflows here
        model.fit(X[OURS], targets, 8, shuffle=False, verbose=0, callbacks=[gck.DataParallel()])
        equal_on_all_ranks(model)
        assert float(optimizer.dynamic_scale.numpy()) == 2.0**13
        assert int(optimizer.inner_optimizer.iterations.numpy()) == 3
        assert all(np.isfinite(x).all() for x in model.get_weights())


def half_precision_trains():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        ours, logs = fitted(OPTIMIZERS["adam"](), OURS)
        assert type(ours.optimizer) is keras.optimizers.LossScaleOptimizer
        assert not hasattr(ours.optimizer.inner_optimizer, "gpucoll_communicator")
        equal_on_all_ranks(ours)
        _, expected = alone("adam")
        assert np.allclose(logs["loss"], expected["loss"], rtol=2e-2)
    finally:
        keras.config.set_dtype_policy("float32")


def statistics_are_averaged_if_asked():
    for averages in (False, True):
        model = network(7, keras.layers.BatchNormalization())
        model.compile(gck.DistributedOptimizer("sgd"), "mse")
        first = gck.DataParallel(average_statistics=averages)
        logs = model.fit(X[OURS], Y[OURS], 8, 2, verbose=0, callbacks=[first], shuffle=False)
        mine = [x.numpy().tolist() for x in model.non_trainable_variables if "moving" in x.name]
        assert len(mine) == 2
        assert (comm.all_gather_object(mine) == [mine] * 2) is averages
        assert len(logs.history["loss"]) == 2


def callbacks_after_the_first_decide_alike():
    stops = keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=1)
    slows = keras.callbacks.ReduceLROnPlateau("loss", min_delta=10.0, patience=1, factor=0.5)
    model, logs = fitted(OPTIMIZERS["sgd"](), OURS, epochs=9, callbacks=[slows, stops])
    assert len(logs["loss"]) == 2
    rates = comm.all_gather_object(float(model.optimizer.learning_rate.numpy()))
    assert np.allclose(rates, 0.05)

    class StopsOnRank1(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = RANK == 1

    model = network()
    model.compile(gck.DistributedOptimizer("sgd"), "mse")
    with pytest.raises(ValueError, match=r"decisions to stop differ.*rank 0: False, rank 1: True"):
        model.fit(X, Y, 8, 2, verbose=0, callbacks=[StopsOnRank1(), gck.DataParallel()])


def the_learning_rate_warms_up():
    rates = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    model = network()
    model.compile(gck.DistributedOptimizer(keras.optimizers.SGD(5.0)), "mse")
    first = gck.DataParallel(learning_rate=0.1, warmup_epochs=2)
    model.fit(X[OURS], Y[OURS], 8, 3, verbose=0, callbacks=[first, Notes()])
    expected = [0.1 * (1 + step / 8) for step in range(1, 9)] + 4 * [0.2]
    assert np.allclose(rates, expected), rates
    for _ in range(2):
        first = gck.DataParallel(learning_rate=0.1)
        model.fit(X[OURS], Y[OURS], 8, verbose=0, callbacks=[first])
        assert np.isclose(float(model.optimizer.learning_rate.numpy()), 0.2)
    equal_on_all_ranks(model)


def a_rank_with_fewer_batches_is_told():
    def batches():
        for step in range(3 + RANK):
            yield X[step : step + 8], Y[step : step + 8]

    model = network()
    model.compile(gck.DistributedOptimizer("sgd"), "mse")
    options = {"verbose": 0, "callbacks": [gck.DataParallel()]}
    with pytest.raises(ValueError, match=r"numbers of epochs or steps differ.*'steps': 9"):
        model.fit(np.resize(X, (64 + 8 * RANK, 8)), np.resize(Y, (64 + 8 * RANK, 1)), 8, **options)
    text = (
        "rank 0 has ended epoch 1, and another rank goes on"
        if RANK == 0
        else "MismatchError|all_reduce"
    )
    with pytest.raises(Exception, match=text):
        model.fit(batches(), **options)
    assert comm.all_reduce(1) == 2


def losses_of_an_evaluation_are_averaged():
    model = network()
    model.compile(gck.DistributedOptimizer("sgd"), "mse", metrics=["mae"])
    mine = model.evaluate(X[OURS], Y[OURS], 8, verbose=0, return_dict=True)
    whole = model.evaluate(X, Y, 16, verbose=0, return_dict=True)
    ours = gck.average_logs(mine)
    assert ours.keys() == whole.keys()
    assert all(np.isclose(ours[name], whole[name]) for name in whole)
    assert gck.average_logs({"each": [RANK, 2.0]})["each"].tolist() == [0.5, 2.0]
    with pytest.raises(ValueError, match="different names"):
        gck.average_logs({f"loss {RANK}": 1.0})


def arrays_are_divided():
    x, (y, z) = gck.shard((X[:63], [Y[:63], {"z": X[:63, 0]}]))
    assert np.array_equal(x, X[:62][OURS])
    assert np.array_equal(y, Y[:62][OURS])
    assert np.array_equal(z["z"], X[:62, 0][OURS])
    assert len(gck.shard(keras.ops.convert_to_tensor(X))) == 32
    for wrong, error in (
        ((X, Y[1:]), ValueError),
        (X[:1], ValueError),
        ((row for row in X), TypeError),
        (3.0, TypeError),
    ):
        with pytest.raises(error, match=r"shard|rows|share"):
            gck.shard(wrong)


def data_sets_of_keras_are_divided():
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return X[8 * index : 8 * index + 8], Y[8 * index : 8 * index + 8]

    part = gck.shard(Batches(workers=2))
    assert part.num_batches == 2
    assert part.workers == 2
    assert np.array_equal(part[1][0], X[8 * (2 + RANK) : 8 * (3 + RANK)])
    model = network()
    model.compile(gck.DistributedOptimizer("sgd"), "mse")
    model.fit(part, epochs=2, verbose=0, callbacks=[gck.DataParallel()])
    assert int(model.optimizer.iterations.numpy()) == 4
    equal_on_all_ranks(model)


def data_loaders_are_divided():
    if BACKEND != "torch":
        pytest.skip("torch alone takes seconds to import")
    data = pytest.importorskip("torch").utils.data
    whole = data.DataLoader(range(33), batch_size=4, shuffle=True, drop_last=True)
    part = gck.shard(whole)
    epochs = [[int(x) for batch in part for x in batch] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for mine in epochs:
        seen = comm.all_reduce_object(set(mine), lambda x, y: x | y)
        assert len(mine) == 16
        assert len(seen) == 32
    kept = [int(x) for batch in gck.shard(data.DataLoader(range(9), 4)) for x in batch]
    assert kept == [*range(RANK, 8, 2)]
    for options in ({"batch_size": None}, {"sampler": [1, 2]}):
        with pytest.raises(TypeError, match="batch_sampler of its own"):
            gck.shard(data.DataLoader(range(4), **options))

    class Stream(data.IterableDataset):
        def __iter__(self):
            return iter(range(4))

    with pytest.raises(TypeError, match="IterableDataset"):
        gck.shard(data.DataLoader(Stream()))


def data_sets_of_tensorflow_are_divided():
    tf = pytest.importorskip("tensorflow")
    whole = tf.data.Dataset.from_tensor_slices((X[:63], Y[:63]))
    part = gck.shard(tf.data.Dataset.from_tensor_slices((X, Y))).batch(8)
    assert int(gck.shard(whole).cardinality()) == 31
    if BACKEND == "tensorflow":
        model = network(7)
        model.compile(gck.DistributedOptimizer(OPTIMIZERS["adam"]()), "mse")
        model.fit(part, epochs=3, verbose=0, callbacks=[gck.DataParallel()])
        compare(model, alone("adam")[0])


def embeddings_train():
    if BACKEND == "jax" and not THOROUGH:
        pytest.skip("gradients of embeddings are sparse on TensorFlow")
    numbers = (np.arange(64) * 7 % 20).reshape(64, 1)

    def trained(rows):
        is_alone = rows == ALONE
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((1,), dtype="int32"), *layers])
        optimizer = keras.optimizers.Adam(0.01)
        model.compile(optimizer if is_alone else gck.DistributedOptimizer(optimizer), "mse")
        callbacks = [] if is_alone else [gck.DataParallel()]
        model.fit(
            numbers[rows],
            Y[rows],
            16 if is_alone else 8,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
        return model

    ours = trained(OURS)
    weights = None if RANK else trained(ALONE).get_weights()
    compare(ours, comm.broadcast_object(weights))


def step_of(model, optimizer):
    """Return a step of a program's own for this backend."""
    loss_of = keras.losses.MeanSquaredError()
    if BACKEND == "torch":

        def step(x, y):
            model.zero_grad()
            loss_of(y, model(x)).backward()
            weights = model.trainable_weights
            optimizer.apply([w.value.grad for w in weights], weights)

        return step
    if BACKEND == "tensorflow":
        import tensorflow as tf

        @tf.function
        def graph_step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            weights = model.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        return graph_step
    import jax

    optimizer.build(model.trainable_variables)

    def loss(weights, others, x, y):
        return loss_of(y, model.stateless_call(weights, others, x)[0])

    @jax.jit
    def compiled(weights, others, state, x, y):
        gradients = jax.grad(loss)(weights, others, x, y)
        return optimizer.stateless_apply(state, gradients, weights)

    def jax_step(x, y):
        held = [
            [v.value for v in variables]
            for variables in (
                model.trainable_variables,
                model.non_trainable_variables,
                optimizer.variables,
            )
        ]
        found = compiled(*held, x, y)
        for variables, values in zip(
            (model.trainable_variables, optimizer.variables), found, strict=True
        ):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    return jax_step


def loops_of_ones_own_train():
    model = network(7 + RANK)
    optimizer = gck.DistributedOptimizer(OPTIMIZERS["adam"]())
    gck.broadcast_variables(model.variables)
    step = step_of(model, optimizer)
    for _ in range(3):
        for begin in range(0, 32, 8):
            step(X[OURS][begin : begin + 8], Y[OURS][begin : begin + 8])
    compare(model, alone("adam")[0])


def wrong_use_is_told():
    other = comm.duplicate()
    optimizer = gck.DistributedOptimizer("sgd", comm)
    assert gck.DistributedOptimizer(optimizer, comm) is optimizer
    with pytest.raises(ValueError, match=r"averages over .* already"):
        gck.DistributedOptimizer(optimizer, other)
    model = network()
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match="and DataParallel got"):
        model.fit(X, Y, verbose=0, callbacks=[gck.DataParallel(other)])
    with pytest.raises(ValueError, match="warmup_epochs needs learning_rate"):
        gck.DataParallel(warmup_epochs=1)
    if BACKEND == "tensorflow":
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(gck.DistributedOptimizer("sgd", comm), "mse")
        with pytest.raises(ValueError, match="the model is not built"):
            model.fit(X, Y, verbose=0, callbacks=[gck.DataParallel(comm)])
    other.close()


NAMES = {*sys.argv[1:]} - {"--thorough"}
CHECKS = [value for name, value in list(globals().items()) if name in NAMES or not NAMES]
CHECKS = [x for x in CHECKS if getattr(x, "__module__", "") == "__main__" and "_" in x.__name__]
for check in (x for x in CHECKS if not x.__code__.co_argcount):
    begin = time.monotonic()
    try:
        check()
    except pytest.skip.Exception as reason:
        print(f"skipped {check.__name__}: {reason}", flush=True)
    else:
        took = f"{time.monotonic() - begin:.1f} s"
        print(f"passed {check.__name__}", took, flush=True)
comm.barrier()
