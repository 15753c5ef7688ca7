"""On 2 ranks: the order of calls, training, data, and what is refused. Prints what passed."""

import contextlib
import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

import gpucoll
import gpucoll.integrations.tensorflow as gct

with pytest.raises(gpucoll.StateError, match=r"call comm = gpucoll.init\(\)"):
    gct.all_reduce(1.0)
comm = gpucoll.init(timeout_s=20)
rank, P = comm.rank, comm.world_size


def test_importing_them_registers_nothing():
    import gpucoll.integrations.horovod.tensorflow  # noqa: F401  # it uses what is there

    assert "all_reduce" in dir(gct)
    assert op_def_registry.get("HorovodAllreduce") is not None
    assert op_def_registry.get("GpucollAllReduce") is None


def test_communicators():
    with pytest.raises(gpucoll.ArgumentTypeError, match=r"must be a gpucoll.Communicator"):
        gct.all_reduce(tf.ones(2), comm="world")
    with comm.duplicate() as other:
        assert gct.all_reduce(1, comm=other).numpy() == P
    assert gct.all_reduce(1).numpy() == P


@contextlib.contextmanager
def watched():
    """Yield a list of the first elements of what is gathered; fail if two calls run at once."""
    from gpucoll.integrations.tensorflow import call_sites

    seen, inside = [], []
    run = call_sites.CallSite.run

    def watching(self, x, y, counts=None):
        inside.append(1)
        seen.append(int(np.ravel(x)[0]))
        time.sleep(0.001)
        run(self, x, y, counts)
        assert len(inside) == 1, "two calls at once"
        inside.pop()

    call_sites.CallSite.run = watching
    try:
        yield seen
    finally:
        call_sites.CallSite.run = run


def number(i):
    """Call a collective that Python makes, so that `watched` sees it."""
    x = tf.fill([100], tf.cast(i, tf.float32))
    return gct.all_reduce(gct.all_gather(x, counts=[100] * P), "max")


def test_order_in_functions():
    v, w = tf.Variable(1.0), tf.Variable(2.0)

    def straight():
        return [number(i) for i in range(8)]

    def loop():
        z = number(0)
        for i in tf.range(1, 7):
            z = number(i)
        number(7)  # nobody uses it
        return z

    def while_loop():
        def body(i, s):
            number(i)
            return i + 1, s + v

        _, s = tf.while_loop(lambda i, s: i < 7, body, (tf.constant(0), tf.constant(0.0)))
        return s, number(7)

    def branches():
        yes = tf.constant(True)
        number(0)
        a = tf.cond(yes, lambda: (number(1)[0] + v, number(2)[0])[0], lambda: w + 0)
        number(3)
        b = tf.cond(yes, lambda: w + 0, lambda: number(9)[0])
        number(4)
        c = tf.cond(yes, lambda: (number(5)[0], number(6)[0])[1], lambda: w + 0)
        return a + b + c, number(7)

    for compiled in (False, True):
        first = tf.function(
            lambda: (v.assign_add(1), number(0), number(1))[1:], jit_compile=compiled
        )
        second = tf.function(lambda: (w.assign_add(1), number(2)), jit_compile=compiled)

        def functions(first=first, second=second):
            return first(), second(), [number(i) for i in range(3, 8)]

        for way in (straight, loop, while_loop, branches, functions):
            call = tf.function(way, jit_compile=compiled and way is not functions)
            with watched() as seen:
                for _ in range(2):
                    seen.clear()
                    call()
                    assert seen == list(range(8)), (way.__name__, compiled, seen)


def test_calls_that_do_not_match():
    x = tf.ones(3 + rank)
    for compiled, error in (
        (None, "FailedPrecondition"),
        (False, "FailedPrecondition"),
        (True, "Internal"),
    ):
        call = gct.all_reduce
        if compiled is not None:
            call = tf.function(gct.all_reduce, jit_compile=compiled)
        with pytest.raises(tf.errors.OpError) as caught:
            call(x)
        assert type(caught.value).__name__ == f"{error}Error"
        assert "rank 1 called all_reduce(op=sum, float32, shape (4,))" in str(caught.value)
        assert gct.all_reduce(1.0).numpy() == P  # the communicator works on


def test_what_is_refused_before_anything_moves():
    for call, text in (
        (lambda: gct.all_reduce(tf.constant("a")), "does not take tensors of string; convert"),
        (lambda: gct.all_reduce(tf.constant([True]), "avg"), "avg"),
        (lambda: gct.all_reduce(tf.ones(2), "median"), "op must be"),
        (lambda: gct.broadcast(tf.ones(2), 2), "root must be a rank, 0 to 1"),
        (lambda: gct.all_gather(tf.ones(2), counts=[1]), "counts must be the rows of each of 2"),
        (lambda: gct.scatter(tf.ones(2), counts="auto"), "counts must be numbers"),
        (lambda: gct.all_to_all(tf.ones(2), splits=[1]), "splits must be 2 numbers"),
        (lambda: gct.reduce(tf.sparse.eye(2)), "takes tensors; got a SparseTensor"),
        (lambda: gct.all_reduce(tf.IndexedSlices(tf.ones([1, 2]), [0]), "max"), "'sum' or 'avg'"),
    ):
        with pytest.raises(gpucoll.UsageError, match=text):
            call()
        with pytest.raises(gpucoll.UsageError, match=text):
            tf.function(call)()
    for shape in ([3], []):
        with pytest.raises(gpucoll.ArgumentError, match=r"3 rows cannot be divided|x has no rows"):
            tf.function(gct.reduce_scatter)(tf.ones(shape))
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"cannot be divided|no rows|rank 0"
        ):
            gct.reduce_scatter(tf.ones(shape))
    for call, text in (
        (lambda: gct.all_gather(tf.ones(2), counts="auto"), "pass the counts as numbers"),
        (lambda: gct.all_to_all(tf.ones(2), splits=[1, 1]), "leave out splits"),
    ):
        with pytest.raises(gpucoll.ArgumentError, match=text):
            tf.function(call, jit_compile=True)()
    x = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        y = gct.all_reduce(x, "max")
    with pytest.raises(gpucoll.ArgumentError, match="'max' has no gradient"):
        tape.gradient(y, x)


def test_a_missing_symbol_says_to_leave_out_jit_compile(monkeypatch):
    from gpucoll.integrations.tensorflow import c_api, xla

    def missing(name):
        raise AttributeError(name)

    monkeypatch.setattr(c_api, "symbol", missing)
    xla._register.cache_clear()
    with pytest.raises(gpucoll.BackendUnavailableError, match="leave out jit_compile"):
        tf.function(gct.all_reduce, jit_compile=True)(tf.ones(2))


def test_barrier():
    begin = time.monotonic()
    if rank == 0:
        time.sleep(0.3)

    @tf.function
    def step():
        gct.barrier()
        return tf.constant(1)

    step()
    assert time.monotonic() - begin > 0.29
    gct.barrier()
    tf.function(lambda: (gct.barrier(), tf.constant(1))[1], jit_compile=True)()


def test_tapes():
    def step(x, v, w):
        with gct.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(x * v)
        return tape.gradient(loss, {"v": v, "w": w})

    v, w = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    for how in (step, tf.function(step), tf.function(step, jit_compile=True)):
        grads = how(tf.ones(2) * (rank + 1), v, w)
        assert grads["v"].numpy().tolist() == [1.5, 1.5]
        assert grads["w"] is None
    table = tf.Variable(tf.ones([4, 2]))
    with gct.DistributedGradientTape(tf.GradientTape(), comm, "sum") as tape:
        loss = tf.reduce_sum(tf.gather(table, [rank, 3]))
    grad = tape.gradient(loss, [table])[0]
    assert isinstance(grad, tf.IndexedSlices)
    assert tf.convert_to_tensor(grad).numpy()[:, 0].tolist() == [1, 1, 0, 2]


def test_variables():
    model = [tf.Variable(tf.ones([2, 2]) * rank), tf.Variable(rank, dtype=tf.int64)]
    gct.broadcast_variables(model, 1)
    assert float(tf.reduce_sum(model[0])) == 4
    assert int(model[1]) == 1
    model[0].assign(model[0] * rank)
    tf.function(lambda: gct.broadcast_variables(model))()
    assert float(tf.reduce_sum(model[0])) == 0


def test_training_is_that_of_one_process():
    inputs = tf.random.stateless_normal([64, 4], [1, 2])
    target = tf.reduce_sum(inputs, 1, keepdims=True)

    def trained(data, tape_of):
        model = tf.Variable(tf.ones([4, 1]))

        @tf.function(jit_compile=True)
        def step(x, y):
            with tape_of(tf.GradientTape()) as tape:
                loss = tf.reduce_mean((x @ model - y) ** 2)
            model.assign_sub(0.1 * tape.gradient(loss, model))

        for x, y in data:
            step(x, y)
        return model.numpy()

    data = tf.data.Dataset.from_tensor_slices((inputs, target))
    alone = trained(data.batch(16), lambda tape: tape)
    together = trained(gct.shard(data).batch(8), gct.DistributedGradientTape)
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_shards_have_equal_numbers_of_steps():
    numbers = tf.data.Dataset.range(7)
    assert list(gct.shard(numbers).as_numpy_iterator()) == [rank, rank + 2, rank + 4]
    assert int(gct.shard(numbers).cardinality()) == 3
    odd = numbers.filter(lambda x: x % 2 == 1)  # of unknown size: 1, 3, 5
    assert list(gct.shard(odd).as_numpy_iterator()) == [1 + 2 * rank]
    pairs = odd.map(lambda x: (x, {"twice": 2 * x}))
    assert [(int(x), int(y["twice"])) for x, y in gct.shard(pairs)] == [
        (1 + 2 * rank, 2 + 4 * rank)
    ]
    named = odd.map(lambda x: {"x": x, "y": [x, x]})
    assert [int(x["x"]) for x in gct.shard(named)] == [1 + 2 * rank]
    assert list(gct.shard(numbers.repeat()).take(4).as_numpy_iterator())[3] == (6 + rank) % 7
    with pytest.raises(gpucoll.ArgumentError, match="1 elements are too few for 2"):
        gct.shard(numbers.take(1))


def test_with_keras():
    import keras

    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2), keras.layers.Dense(1)])
    gct.broadcast_variables(model.variables)
    sums = [float(x.numpy().sum()) for x in model.variables]
    assert comm.all_reduce(np.array(sums), "max").tolist() == sums


def test_an_interrupt_is_the_programs():
    with comm.duplicate() as other:
        call = partial(gct.all_reduce, tf.ones(2), comm=other)
        call()
        if rank == 0:
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                call()
        else:
            time.sleep(1)
            with pytest.raises(tf.errors.AbortedError, match="rank 0 was interrupted"):
                call()


def test_each_thread_makes_its_own_call():
    from gpucoll.collectives import Collective
    from gpucoll.integrations.tensorflow.call_sites import site_of

    site = site_of(comm, Collective.BARRIER)

    def call(_):
        ran = []
        site.in_turn(lambda: (time.sleep(0.001), ran.append(threading.get_ident())))
        return ran == [threading.get_ident()]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(call, range(100)))


def test_after_close():
    other = comm.duplicate()
    comms = [other]
    traced = tf.function(lambda x: gct.all_reduce(x, comm=comms[0]))
    traced(tf.ones(2))
    other.close()
    with pytest.raises(gpucoll.StateError, match="is closed"):
        gct.all_reduce(tf.ones(2), comm=other)
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"is closed; compile it again"):
        traced(tf.ones(2))
    comms.clear()
    del other
    gc.collect()
    with pytest.raises(tf.errors.FailedPreconditionError, match="is closed"):
        traced(tf.ones(2))


for name, test in list(globals().items()):
    if name.startswith("test_"):
        with pytest.MonkeyPatch.context() as monkeypatch:
            test(monkeypatch) if test.__code__.co_argcount else test()
        print("passed", name, flush=True)
comm.close()
