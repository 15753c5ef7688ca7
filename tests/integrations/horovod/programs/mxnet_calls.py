"""Calls of horovod.mxnet that Horovod's own tests leave out, on two ranks; says which passed."""

import sys
import time
import warnings

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
import pytest

hvd.init()
RANK = hvd.rank()
N = 50


def raises(function, text, error=mx.base.MXNetError):
    with pytest.raises(error, match=text):
        function()


def opposite_orders_neither_block_nor_mix():
    arrays = [mx.nd.full((256,), RANK + i) for i in range(N)]
    for i in range(N) if RANK == 0 else reversed(range(N)):
        hvd.allreduce_(arrays[i], name=f"opposite.{i}", op=hvd.Sum)
    for i in range(N):
        assert (arrays[i].asnumpy() == 2 * i + 1).all()


def arrays_that_nobody_waits_for_are_reduced():
    x = mx.nd.full((8,), RANK)
    y = hvd.allreduce(x, name="unwatched", op=hvd.Sum) * 10  # MXNet waits, not this program
    z = mx.nd.zeros((8,))
    y.copyto(z)
    assert (z.asnumpy() == 10).all()


def a_call_sees_what_was_written_before_and_nothing_after():
    x = mx.nd.ones((512, 512))
    for _ in range(8):
        x = mx.nd.dot(x, x) / 512
    x *= RANK + 1
    start = time.perf_counter()
    y = hvd.allreduce(x, name="ordered", op=hvd.Sum)
    took = time.perf_counter() - start
    x += 100
    assert np.allclose(y.asnumpy(), 3), y
    assert np.allclose(x.asnumpy(), RANK + 101)
    assert took < 5


def a_name_may_come_again_before_it_is_done():
    x = mx.nd.ones((4,))
    for _ in range(3):
        hvd.allreduce_(x, name="again", op=hvd.Sum)
    assert (x.asnumpy() == 8).all()


def a_name_may_be_given_to_other_arrays_and_calls():
    x, y = mx.nd.full((4,), RANK + 1), mx.nd.full((2, 3), RANK + 1, dtype="int32")
    for _ in range(3):
        for op, expected in ((hvd.Sum, 3), (hvd.Max, 2)):
            for array in (x, x, y):
                array[:] = RANK + 1
                hvd.allreduce_(array, name="many", op=op)
                assert (array.asnumpy() == expected).all()
        x[:] = RANK + 1
        hvd.allreduce_(x, name="many", op=hvd.Sum, prescale_factor=2.0)
        assert (x.asnumpy() == 6).all()
        x = mx.nd.full((4,), RANK)


def two_arrays_of_one_name_are_refused():
    x, y = mx.nd.ones((4,)), mx.nd.ones((4,))
    if RANK == 0:
        hvd.allreduce_(x, name="twice", op=hvd.Sum)
        hvd.allreduce_(y, name="twice", op=hvd.Sum)
        raises(y.wait_to_read, "same name")
    else:
        time.sleep(0.2)
        hvd.allreduce_(x, name="twice", op=hvd.Sum)
    assert (x.asnumpy() == 2).all()


def what_depends_on_a_failed_call_fails_and_the_next_works():
    x = mx.nd.ones((3 + RANK,))
    y = hvd.allreduce(x, name="shapes") + 1
    raises(y.asnumpy, "Mismatched ALLREDUCE tensor shapes")
    assert (hvd.allreduce(mx.nd.ones((2,)), name="next").asnumpy() == 1).all()


def groups_go_together():
    arrays = [
        mx.nd.full((2, i), RANK, dtype=dtype) for i in (1, 2) for dtype in ("int32", "float16")
    ]
    hvd.grouped_allreduce_(arrays, name="group", op=hvd.Max)
    assert all((x.asnumpy() == 1).all() for x in arrays)
    rows = hvd.grouped_allgather([mx.nd.full((RANK + 1, 2), RANK), mx.nd.full((2,), RANK)])
    assert rows[0].asnumpy()[:, 0].tolist() == [0, 1, 1]
    assert rows[1].asnumpy().tolist() == [0, 0, 1, 1]


def arrays_of_mxnets_numpy_are_taken():
    mx.npx.set_np()
    x = mx.np.array(RANK, dtype="float32")
    y = hvd.allreduce(x, name="scalar", op=hvd.Sum)
    assert type(y) is mx.np.ndarray
    assert y.shape == ()
    assert y.item() == 1
    mx.npx.reset_np()


def parts_of_an_array_are_reduced_where_they_are():
    x = mx.nd.zeros((4, 2))
    x[1:3] = RANK + 1
    hvd.allreduce_(x[1:3], name="part", op=hvd.Sum)
    assert x.asnumpy()[:, 0].tolist() == [0, 3, 3, 0]


def sparse_arrays_and_numbers_are_refused():
    for wrong in (mx.nd.zeros((2, 2)).tostype("row_sparse"), np.zeros(2), 3.0):
        raises(lambda x=wrong: hvd.allreduce_(x, name="wrong"), "NDArray", TypeError)


def average_is_told_to_be_old():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        x = hvd.allreduce(mx.nd.ones((2,)), average=False, name="old")
    assert told[0].category is DeprecationWarning
    assert (x.asnumpy() == 2).all()


def trained(make_trainer, rows):
    net = mx.gluon.nn.Sequential()
    net.add(mx.gluon.nn.Dense(8, activation="tanh"), mx.gluon.nn.Dense(1))
    mx.random.seed(RANK if rows != slice(0, 16) else 0)
    net.initialize(mx.init.Normal(0.3))
    if rows != slice(0, 16):
        hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    data = np.random.RandomState(1).randn(16, 4).astype("float32")
    x, y = mx.nd.array(data[rows]), mx.nd.array(data.sum(1, keepdims=True)[rows])
    net(x)  # shapes are known, and parameters deferred till now are broadcast
    trainer = make_trainer(net.collect_params())
    for _ in range(5):
        with mx.autograd.record():
            loss = mx.gluon.loss.L2Loss()(net(x), y)
        loss.backward()
        trainer.step(x.shape[0])
    return [parameter.data().asnumpy() for parameter in net.collect_params().values()]


def training_equals_that_of_one_process():
    how = {"learning_rate": 0.1, "momentum": 0.9}
    mine = slice(8 * RANK, 8 * RANK + 8)
    for tolerance, options in (
        (1e-6, {}),
        (1e-6, {"num_groups": 2}),
        (1e-6, {"gradient_predivide_factor": 2.0, "prefix": "net"}),
        (1e-3, {"compression": hvd.Compression.fp16}),
    ):
        ours = trained(lambda p, o=options: hvd.DistributedTrainer(p, "sgd", how, **o), mine)
        alone = trained(lambda p: mx.gluon.Trainer(p, "sgd", how, kvstore=None), slice(0, 16))
        for x, y in zip(ours, alone, strict=True):
            assert np.allclose(x, y, atol=tolerance), (options, x, y)


CHECKS = [value for name, value in list(globals().items()) if callable(value) and "_" in name]
CHECKS = [check for check in CHECKS if check.__module__ == "__main__"]

for check in CHECKS:
    check()
    print(f"passed {check.__name__}", flush=True)
hvd.shutdown()
sys.exit(0)
