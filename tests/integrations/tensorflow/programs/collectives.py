"""On 2 ranks: every collective, eagerly, in a tf.function and under XLA, with its gradient.

Its arguments say how: "eager", "function", "compiled". Prints the name of what passed.
"""

import sys

import numpy as np
import tensorflow as tf

import gpucoll
import gpucoll.integrations.tensorflow as gct

HOW = ""
comm = gpucoll.init()
rank, P = comm.rank, comm.world_size


def the_way(function):
    if HOW == "eager":
        return function
    return tf.function(function, jit_compile=HOW == "compiled")


def near(x, y):
    np.testing.assert_allclose(np.asarray(x, np.complex128), np.asarray(y, np.complex128), 1e-5)


def rows(n, of=rank):
    return np.arange(n * 3.0, dtype=np.float32).reshape(n, 3) * (of + 1) + of


def check(call, reference, n_rows=4, weights=None):
    """Compare a call with NumPy; and its gradient, of the sum over the ranks of a weighted result.

    `reference` computes the results of all ranks from the inputs of all ranks. It is linear: so the
    gradient of this rank's input is the weights' product with the result of each unit input.
    """
    inputs = [rows(n_rows[r] if isinstance(n_rows, list) else n_rows, r) for r in range(P)]
    x = tf.constant(inputs[rank])
    expected = reference(inputs)
    near(the_way(call)(x), expected[rank])
    weights = [
        np.arange(y.size, dtype=np.float32).reshape(y.shape) + r for r, y in enumerate(expected)
    ]

    def gradient(x, weight):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(call(x) * weight)
        return tape.gradient(loss, x)

    slope = np.zeros_like(inputs[rank])
    for index in np.ndindex(slope.shape):
        unit = [np.zeros_like(y) for y in inputs]
        unit[rank][index] = 1
        slope[index] = sum((w * y).sum() for w, y in zip(weights, reference(unit), strict=True))
    near(the_way(gradient)(x, tf.constant(weights[rank])), slope)


def everywhere(result):
    return [result] * P


def on_root(result, root=1):
    return [result if r == root else np.zeros_like(result) for r in range(P)]


def test_reductions():
    check(gct.all_reduce, lambda xs: everywhere(sum(xs)))
    check(lambda x: gct.all_reduce(x, "avg"), lambda xs: everywhere(sum(xs) / P))
    halved = gpucoll.ReduceOp.scaled_sum(0.5)
    check(lambda x: gct.all_reduce(x, halved), lambda xs: everywhere(sum(xs) / 2))
    check(lambda x: gct.reduce(x, root=1), lambda xs: on_root(sum(xs)))
    check(lambda x: gct.reduce(x, "avg", 1), lambda xs: on_root(sum(xs) / P))
    check(gct.scan, lambda xs: list(np.cumsum(xs, 0)))
    check(gct.exclusive_scan, lambda xs: list(np.cumsum([np.zeros_like(xs[0]), *xs[:-1]], 0)))
    near(the_way(lambda x: gct.all_reduce(x, "max"))(tf.constant(rows(4))), rows(4, P - 1))


def test_blocks():
    check(gct.all_gather, lambda xs: everywhere(np.concatenate(xs)))
    check(gct.reduce_scatter, lambda xs: np.split(sum(xs), P))
    check(lambda x: gct.reduce_scatter(x, "avg"), lambda xs: np.split(sum(xs) / P, P))
    check(lambda x: gct.scatter(x, 1), lambda xs: np.split(xs[1], P))
    check(
        gct.all_to_all,
        lambda xs: [np.concatenate([np.split(x, P)[r] for x in xs]) for r in range(P)],
    )

    def gathered(xs):
        return [np.concatenate(xs) if r == 1 else np.zeros((0, 3), np.float32) for r in range(P)]

    check(lambda x: gct.gather(x, 1), gathered)
    near(the_way(gct.all_gather)(tf.constant(rank)), range(P))


def test_blocks_of_different_sizes():
    check(
        lambda x: gct.all_gather(x, counts=[1, 3]),
        lambda xs: everywhere(np.concatenate(xs)),
        [1, 3],
    )
    check(lambda x: gct.scatter(x, 1, counts=[1, 3]), lambda xs: np.split(xs[1], [1]))
    check(lambda x: gct.reduce_scatter(x, counts=[1, 3]), lambda xs: np.split(sum(xs), [1]))

    def gathered(xs):
        return [np.concatenate(xs) if r == 1 else np.zeros((0, 3), np.float32) for r in range(P)]

    check(lambda x: gct.gather(x, 1, counts=[1, 3]), gathered, [1, 3])
    if HOW == "compiled":
        return
    check(
        lambda x: gct.all_gather(x, counts="auto"),
        lambda xs: everywhere(np.concatenate(xs)),
        [1, 3],
    )
    splits = [[1, 3], [2, 2]]
    received = the_way(lambda x: gct.all_to_all(x, splits=splits[rank]))(rows(4))[1]
    assert received.numpy().tolist() == [s[rank] for s in splits]

    def exchanged(xs):
        parts = [np.split(x, s[:1]) for x, s in zip(xs, splits, strict=True)]
        return [np.concatenate([part[r] for part in parts]) for r in range(P)]

    check(lambda x: gct.all_to_all(x, splits=splits[rank])[0], exchanged)


def flat(ys):
    return np.concatenate([np.ravel(tf.cast(y, tf.float64).numpy()) for y in ys])


def test_lists():
    mixed = [tf.ones([2]) * (rank + 1), tf.constant([rank], tf.int64), tf.ones([], tf.bfloat16)]
    call = the_way(lambda *xs: gct.all_reduce(list(xs)))
    near(flat(call(*mixed)), [3, 3, 1, 2])
    sent = the_way(lambda *xs: gct.broadcast(list(xs), 1))(*mixed)
    near(flat(sent), [2, 2, 1, 1])
    combined = the_way(lambda *xs: gct.reduce(list(xs), root=1))(*mixed)
    near(flat(combined), np.array([3, 3, 1, 2]) * rank)
    assert gct.all_reduce([]) == []

    def gradients(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            z = gct.all_reduce([x, y])
            loss = tf.reduce_sum(z[0]) * (rank + 1)  # nothing depends on the second
        return tape.gradient(loss, [x, y], unconnected_gradients="zero")

    dx, dy = the_way(gradients)(mixed[0], tf.ones([2], tf.float64))
    near(dx, [3, 3])
    near(dy, [0, 0])
    assert dy.dtype == tf.float64


def test_dtypes():
    for dtype in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    ):
        x = tf.cast(tf.constant([0, 1]), dtype)
        y = the_way(gct.all_reduce)(x)
        assert y.dtype == x.dtype
        near(tf.cast(y, tf.complex128), [0, 1 if dtype == "bool" else 2])
        assert the_way(gct.all_gather)(x).shape == (4,)


def test_no_rows():
    assert the_way(gct.all_reduce)(tf.zeros([0, 3])).shape == (0, 3)
    assert the_way(gct.all_gather)(tf.zeros([0, 3])).shape == (0, 3)


def test_slices():
    x = tf.IndexedSlices(tf.ones([rank + 1, 2]) * (rank + 1), tf.range(rank + 1), [5, 2])

    def call(values, indices):
        y = gct.all_reduce(tf.IndexedSlices(values, indices, [5, 2]), "avg")
        return tf.convert_to_tensor(y)

    y = the_way(call)(x.values, x.indices)
    near(y, [[1.5, 1.5], [1, 1], [0, 0], [0, 0], [0, 0]])
    if HOW == "compiled":
        return
    one, other = gct.all_reduce([x, tf.ones(2)])
    assert isinstance(one, tf.IndexedSlices)
    near(other, [2, 2])


def test_second_order():
    def curvature(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(gct.all_reduce(x) ** 3)
            slope = inner.gradient(loss, x)
        return outer.gradient(slope, x)

    near(the_way(curvature)(tf.constant([1.0])), [P * P * 6 * P])


def test_shapes_are_inferred():
    if HOW != "function":
        return
    some, none = tf.TensorSpec([None, 3]), tf.TensorSpec(None)

    def shape(call, spec=some):
        return tf.function(call).get_concrete_function(spec).structured_outputs.shape

    assert shape(gct.all_reduce).as_list() == [None, 3]
    assert shape(gct.all_gather).as_list() == [None, 3]
    assert shape(gct.all_gather, tf.TensorSpec([4, 3])).as_list() == [8, 3]
    assert shape(gct.reduce_scatter, tf.TensorSpec([4, 3])).as_list() == [2, 3]
    assert shape(lambda x: gct.all_gather(x, counts=[1, 2])).as_list() == [3, 3]
    assert shape(gct.all_reduce, none).rank is None
    assert shape(gct.all_gather, none).rank is None


for HOW in sys.argv[1:]:
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("passed", name, HOW, flush=True)
comm.close()
