"""Calls of horovod.tensorflow that Horovod's tests leave out, on two ranks; says which passed."""

import sys
import threading
import time

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from gpucoll.integrations.horovod.basics import engine_of

hvd.init()
RANK = hvd.rank()
N = 50


def many_operations_of_a_graph_run_together():
    @tf.function
    def reduced(x):
        return [hvd.allreduce(x * i, op=hvd.Sum) for i in range(N)]

    for _ in range(3):
        results = reduced(tf.fill([100], RANK + 1.0))
        assert [float(x[99]) for x in results] == [3.0 * i for i in range(N)]


def graphs_that_threads_run_at_once_do_not_wait_for_each_other():
    graphs = [
        tf.function(lambda x, i=i: hvd.allreduce(x * i, name=f"thread_{i}")) for i in range(4)
    ]
    results = {}

    def run(i):
        results[i] = float(graphs[i](tf.constant(RANK + 1.0)))

    order = range(4) if RANK == 0 else reversed(range(4))
    threads = [threading.Thread(target=run, args=(i,)) for i in order]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join(20)
    assert results == {i: 1.5 * i for i in range(4)}


def the_same_name_twice_is_an_error_at_once():
    x = tf.constant([RANK + 1.0])
    if RANK == 0:
        results = []
        first = threading.Thread(target=lambda: results.append(hvd.allreduce(x, op=hvd.Sum)))
        first.start()
        until = time.monotonic() + 10
        while engine_of(0).is_idle and time.monotonic() < until:
            time.sleep(0.001)
        with pytest.raises(tf.errors.InvalidArgumentError, match="same name"):
            hvd.allreduce(x)
        hvd.broadcast_object("go on", 0)
        first.join(20)
        assert results[0].numpy().tolist() == [3.0]
    else:
        hvd.broadcast_object(None, 0, name="str")
        hvd.allreduce(x, op=hvd.Sum)


def what_ranks_differ_in_is_told_inside_a_graph_and_the_next_call_works():
    @tf.function(reduce_retracing=True)
    def reduced(x):
        return hvd.allreduce(x, op=hvd.Sum, name="differing")

    with pytest.raises(tf.errors.FailedPreconditionError, match="One rank sent a tensor of shape"):
        reduced(tf.ones([3 + RANK]))
    assert reduced(tf.ones([2])).numpy().tolist() == [2.0, 2.0]


def bfloat16_is_reduced():
    x = tf.cast(tf.fill([5], RANK + 0.5), tf.bfloat16)
    assert hvd.allreduce(x, op=hvd.Sum).numpy().tolist() == [2.0] * 5


def adasum_is_that_of_the_formula():
    one, two = np.array([1.0, 2.0, 3.0]), np.array([2.0, -1.0, 1.0])
    dot = one @ two
    expected = (1 - dot / (2 * one @ one)) * one + (1 - dot / (2 * two @ two)) * two
    mine = tf.constant(one if RANK == 0 else two)
    assert np.allclose(hvd.allreduce(mine, op=hvd.Adasum), expected)


def optimizers_of_tensorflow_1_reduce_gradients_or_their_steps():
    v1 = tf.compat.v1

    def trained(passes, op, average, n_runs):
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.Variable([4.0, 8.0])
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(0.5),
                backward_passes_per_step=passes,
                op=op,
                average_aggregated_gradients=average,
            )
            step = optimizer.minimize(tf.reduce_sum(x * [1.0, 2.0 + RANK]))
            session.run(v1.global_variables_initializer())
            session.run(v1.local_variables_initializer())
            for _ in range(n_runs):
                session.run(step)
            return session.run(x).tolist()

    assert trained(1, hvd.Average, False, 2) == [3.0, 5.5]
    assert trained(2, hvd.Average, False, 3) == [3.0, 5.5]  # the third pass is not applied yet
    assert trained(2, hvd.Average, True, 4) == [3.0, 5.5]
    moved = trained(1, hvd.Adasum, False, 1)
    one, two = np.array([-0.5, -1.0]), np.array([-0.5, -1.5])
    dot = one @ two
    expected = (1 - dot / (2 * one @ one)) * one + (1 - dot / (2 * two @ two)) * two
    assert np.allclose(moved, expected + np.array([4.0, 8.0]))


def a_tape_keeps_the_structure_of_its_sources():
    x, y = tf.Variable([1.0]), tf.Variable([2.0])
    with tf.GradientTape(persistent=True) as tape:
        z = tf.reduce_sum(x * (RANK + 1.0) + y * 3.0)
    tape = hvd.DistributedGradientTape(tape)
    assert tape.gradient(z, x).numpy().tolist() == [1.5]
    both = tape.gradient(z, {"x": x, "y": y})
    assert {name: grad.numpy().tolist() for name, grad in both.items()} == {"x": [1.5], "y": [3.0]}


def a_loop_of_a_graph_gets_new_results_each_time():
    @tf.function
    def looped(x):
        for _ in tf.range(5):
            x = hvd.allreduce(x + RANK, op=hvd.Sum)
        return x

    assert float(looped(tf.constant(0.0))) == sum(2**i for i in range(5))


CHECKS = [value for name, value in list(globals().items()) if callable(value) and "_" in name]
CHECKS = [check for check in CHECKS if check.__module__ == "__main__"]

for check in CHECKS:
    check()
    print(f"passed {check.__name__}", flush=True)
hvd.shutdown()
sys.exit(0)
