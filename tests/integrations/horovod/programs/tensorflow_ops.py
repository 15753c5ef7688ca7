"""Ops of TensorFlow that are written in Python, below Horovod's; says which checks passed."""

import gc
import resource
import threading

import numpy as np
import pytest
import tensorflow as tf

from gpucoll.integrations.tensorflow.c_api import Code, OperationError
from gpucoll.integrations.tensorflow.operations import Operation, register, running_here
from gpucoll.integrations.tensorflow.shapes import Shapes

threads = []


def doubled(call):
    """Answer later, from another thread, unless the caller waits."""
    (x,) = call.inputs()
    y = call.output(0, x.shape, x.dtype)

    def answer():
        y[...] = x * call.node.attributes["factor"]
        call.finish()

    threads.append(threading.get_ident())
    if call.is_here:
        answer()
    else:
        gc.collect()
        threading.Timer(0.01, answer).start()


def failing(call):
    raise OperationError(Code(call.node.attributes["code"]), "the reason")


def broken(call):
    raise KeyError("a fault")


NUMBERS = "T: {float, double, int32, bfloat16, bool}"
OPS = register(
    [
        Operation(
            *("GpucollDouble", doubled, ("x: T",), ("y: T",)),
            attributes=(NUMBERS, "factor: int = 2"),
            shapes=Shapes.rows,
        ),
        Operation(
            *("GpucollFail", failing, ("x: T",), ("y: T",)),
            attributes=(NUMBERS, "code: int"),
            shapes=Shapes.same,
        ),
        Operation("GpucollBreak", broken, (), ("y: int32",)),
    ]
)


@tf.RegisterGradient("GpucollDouble")
def _gradient(op, grad):
    return OPS.gpucoll_double(grad, factor=op.get_attr("factor"))


def an_eager_call_runs_where_it_is_made():
    threads.clear()
    with running_here():
        assert OPS.gpucoll_double(tf.constant([1.0, 2.0])).numpy().tolist() == [2.0, 4.0]
    assert threads == [threading.get_ident()]


def a_call_may_end_later_in_another_thread():
    assert OPS.gpucoll_double([1, 2], factor=5).numpy().tolist() == [5, 10]
    many = tf.function(lambda x: [OPS.gpucoll_double(x * i) for i in range(20)])
    for _ in range(3):
        assert [float(y[0]) for y in many(tf.ones([3]))] == [2.0 * i for i in range(20)]


def shapes_and_dtypes_are_those_of_the_description():
    graph = tf.function(OPS.gpucoll_double)
    described = graph.get_concrete_function(tf.TensorSpec([4, 3], tf.bfloat16))
    assert described.output_shapes.as_list() == [None, 3]
    assert described.output_dtypes == tf.bfloat16
    assert graph(tf.zeros([0, 7])).shape == (0, 7)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not in the list of allowed values"):
        OPS.gpucoll_double(tf.constant("text"))


def a_tape_sees_the_gradient():
    x = tf.Variable([3.0])
    with tf.GradientTape() as tape:
        y = OPS.gpucoll_double(x) * x
    assert tape.gradient(y, x).numpy().tolist() == [12.0]

    @tf.function
    def inside(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = OPS.gpucoll_double(x) * x
        return tape.gradient(y, x)

    assert inside(tf.constant([3.0])).numpy().tolist() == [12.0]


def errors_are_of_the_class_that_the_code_says():
    for code, error in (
        (Code.INVALID_ARGUMENT, tf.errors.InvalidArgumentError),
        (Code.FAILED_PRECONDITION, tf.errors.FailedPreconditionError),
        (Code.UNKNOWN, tf.errors.UnknownError),
    ):
        for call in (OPS.gpucoll_fail, tf.function(OPS.gpucoll_fail)):
            with pytest.raises(error, match="the reason"):
                call(tf.ones([2]), code=int(code))
    with pytest.raises(tf.errors.InternalError, match="a fault"):
        OPS.gpucoll_break()


def a_name_is_registered_once():
    with pytest.raises(RuntimeError, match="an op GpucollBreak already"):
        register([Operation("GpucollBreak", broken, (), ("y: int32",))])


def most_memory_kib(who=resource.RUSAGE_SELF):
    return resource.getrusage(who).ru_maxrss


def memory_is_given_back():
    x = tf.zeros([1 << 20])
    before = 0
    for n in range(600):  # 2.4 GB
        with running_here():
            OPS.gpucoll_double(x)
        if n == 100:
            before = most_memory_kib()
    assert most_memory_kib() - before < 100_000
    assert np.all(x == 0)


def calls_in_a_graph_are_neither_merged_nor_folded():
    n_before = len(threads)
    x = tf.constant([1.0, 2.0])
    graph = tf.function(lambda: sum(OPS.gpucoll_double(x) for _ in range(10)))
    for n in range(1, 4):
        assert float(graph()[0]) == 20.0
        assert len(threads) == n_before + 10 * n


CHECKS = [value for name, value in list(globals().items()) if callable(value) and "_" in name]
CHECKS = [
    check
    for check in CHECKS
    if check.__module__ == "__main__" and check not in (_gradient, most_memory_kib)
]

for check in CHECKS:
    check()
    print(f"passed {check.__name__}", flush=True)
