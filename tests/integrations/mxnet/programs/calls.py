"""KVStore "gpucoll" on two ranks; says which checks passed."""

import sys

import numpy as np
import pytest

import gpucoll.integrations.mxnet as gcm  # it prepares NumPy for MXNet

# isort: split
import mxnet as mx
from mxnet import autograd, gluon

import gpucoll
from gpucoll.integrations.mxnet.arrays import address_of

with pytest.raises(gpucoll.StateError, match=r"call comm = gpucoll.init\(\) before"):
    mx.kv.create("gpucoll")
comm = gpucoll.init()
kv = mx.kv.create("gpucoll")
RANK = kv.rank
X = np.random.RandomState(1).randn(16, 4).astype("float32")
Y = X.sum(1, keepdims=True)
MINE = slice(8 * RANK, 8 * RANK + 8)
ALL = slice(0, 16)
OPTIMIZERS = {"sgd": {"learning_rate": 0.1, "momentum": 0.9}, "adam": {"learning_rate": 0.01}}


def full(value, shape=(3,), **how):
    return mx.nd.full(shape, value, **how)


def the_store_says_what_it_is():
    assert kv.num_workers == 2
    assert kv.type == "dist_sync_gpucoll"
    assert type(mx.kv.create("dist_sync_gpucoll")) is gcm.Gpucoll
    assert not kv.is_capable("optimizer")


def arrays_are_summed_where_they_lie():
    x = full(RANK + 1)
    before = address_of(x)
    kv.pushpull("x", x)
    assert address_of(x) == before
    assert (x.asnumpy() == 3).all()
    y, out = full(RANK + 1), full(0)
    kv.pushpull("x", y, out=out)
    assert (out.asnumpy() == 3).all()
    assert (y.asnumpy() == RANK + 1).all()


def arrays_of_several_devices_are_summed():
    values = [full(10 * RANK + number, ctx=mx.cpu(number)) for number in range(2)]
    kv.pushpull("x", values)
    assert all((x.asnumpy() == 0 + 1 + 10 + 11).all() for x in values)


def lists_of_keys_are_one_call():
    kinds = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
    values = [full(RANK + number, (number,), dtype=kind) for number, kind in enumerate(kinds, 1)]
    kv.pushpull([*kinds], values)
    for number, x in enumerate(values, 1):
        assert (x.asnumpy() == 2 * number + 1).all()


def rank_0_is_broadcast():
    value, out = full(RANK), [full(7), full(8)]
    kv.broadcast("x", value, out)
    assert all((x.asnumpy() == 0).all() for x in out)
    assert (value.asnumpy() == RANK).all()
    kv.broadcast([1, 2], [full(RANK), full(RANK + 5)], [out[0], [out[1]]])
    assert [x.asnumpy()[0] for x in out] == [0, 5]
    kv.broadcast("x", value, value)
    assert (value.asnumpy() == 0).all()


def what_was_pushed_can_be_pulled():
    out = full(7)
    kv.init("kept", full(RANK + 1))
    kv.pull("kept", out)
    assert (out.asnumpy() == 1).all()
    kv.push("kept", full(RANK + 1))
    kv.pull(["kept"], [[out]])
    assert (out.asnumpy() == 3).all()
    with pytest.raises(KeyError, match="call init or push"):
        kv.pull("unknown", out)


def a_call_waits_for_what_mxnet_has_begun():
    x = mx.nd.ones((512, 512))
    for _ in range(8):
        x = mx.nd.dot(x, x) / 512
    y = x + RANK
    kv.pushpull("x", y)
    y += 1
    assert np.allclose(y.asnumpy(), 4)
    read = y * 0
    for _ in range(8):
        read = mx.nd.dot(y, y) / 512
    y2 = y.copy()
    kv.pushpull("x", y)  # while it is read
    assert np.allclose(read.asnumpy(), 16)
    assert np.allclose(y.asnumpy(), 2 * y2.asnumpy())


def what_is_not_served_is_refused():
    sparse = mx.nd.zeros((2, 2)).tostype("row_sparse")
    for call in (kv.pushpull, kv.push, kv.init, lambda k, x: kv.broadcast(k, x, x)):
        with pytest.raises(TypeError, match="dense NDArray"):
            call("x", sparse)
    with pytest.raises(NotImplementedError, match="dense arrays only"):
        kv.row_sparse_pull("x", out=sparse, row_ids=None)
    for call in (kv.set_optimizer, kv.save_optimizer_states, kv.load_optimizer_states):
        with pytest.raises(NotImplementedError, match="runs no optimizer"):
            call("x")
    with pytest.raises(NotImplementedError, match="does not compress"):
        kv.set_gradient_compression({"type": "2bit"})
    with pytest.raises(ValueError, match="2 keys need a list of 2"):
        kv.pushpull([1, 2], [full(0)])


def a_mismatch_is_told_and_the_next_call_works():
    with pytest.raises(gpucoll.MismatchError):
        kv.pushpull("x", full(1, (3 + RANK,)))
    x = full(1)
    kv.pushpull("x", x)
    assert (x.asnumpy() == 2).all()


def network(rows):
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(8, activation="tanh"), gluon.nn.Dense(1))
    mx.random.seed(5 if rows == ALL else 5 + RANK)
    net.initialize(mx.init.Normal(0.3))
    return net


def trained(optimizer, rows, kvstore):
    net = network(rows)
    if kvstore:
        with pytest.raises(ValueError, match="call the net once"):
            gcm.broadcast_parameters(net.collect_params())
    x, y = mx.nd.array(X[rows]), mx.nd.array(Y[rows])
    net(x)
    if kvstore:
        gcm.broadcast_parameters(net.collect_params())
    parameters = net.collect_params()
    trainer = gluon.Trainer(parameters, optimizer, OPTIMIZERS[optimizer], kvstore=kvstore)
    for _ in range(5):
        with autograd.record():
            loss = gluon.loss.L2Loss()(net(x), y)
        loss.backward()
        trainer.step(16)
    return [parameter.data().asnumpy() for parameter in parameters.values()]


def a_trainer_trains_as_one_process():
    for optimizer in OPTIMIZERS:
        alone = trained(optimizer, ALL, None)
        for kvstore in ("gpucoll", "GpuColl", kv):
            ours = trained(optimizer, MINE, kvstore)
            assert all(np.allclose(x, y, atol=1e-6) for x, y in zip(ours, alone, strict=True))


def a_trainer_refuses_what_the_store_does_not_serve():
    x = mx.nd.array(X[MINE])

    def step(how, **options):
        net = gluon.nn.Dense(1, **options)
        net.initialize()
        with autograd.record():
            loss = net(x)
        loss.backward()
        gluon.Trainer(net.collect_params(), "sgd", kvstore="gpucoll", **how).step(16)

    with pytest.raises(ValueError, match="update_on_kvstore=False"):
        step({"update_on_kvstore": True})
    with pytest.raises(NotImplementedError, match="does not compress"):
        step({"compression_params": {"type": "2bit", "threshold": 0.5}})


def fitted(optimizer, rows, kvstore):
    symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1)
    symbol = mx.sym.LinearRegressionOutput(symbol, mx.sym.Variable("label"))
    data = mx.io.NDArrayIter(X[rows], Y[rows], len(X[rows]), label_name="label")
    module = mx.mod.Module(symbol, label_names=["label"])
    mx.random.seed(5 if rows == ALL else 5 + RANK)
    module.fit(
        data,
        eval_metric="mse",
        kvstore=kvstore,
        optimizer=optimizer,
        optimizer_params=OPTIMIZERS[optimizer],
        initializer=mx.init.Normal(0.3),
        num_epoch=4,
    )
    arguments, _ = module.get_params()
    return [x.asnumpy() for _, x in sorted(arguments.items())]


def a_module_trains_as_one_process():
    for optimizer in OPTIMIZERS:
        alone = fitted(optimizer, ALL, None)
        ours = fitted(optimizer, MINE, "gpucoll")
        assert all(np.allclose(x, y, atol=1e-6) for x, y in zip(ours, alone, strict=True))


CHECKS = [value for name, value in list(globals().items()) if callable(value) and "_" in name]
CHECKS = [check for check in CHECKS if check.__module__ == "__main__"]

for check in CHECKS:
    check()
    print(f"passed {check.__name__}", flush=True)
sys.exit(0)
