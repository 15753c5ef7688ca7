"""Means of models of PyTorch and JAX."""

from __future__ import annotations

import numpy as np
import pytest

from gpucoll import ArgumentTypeError
from gpucoll.federated import FedOpt, WeightedMean, fed_prox


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_pytorch(dtype):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    kind = getattr(torch, dtype)
    models = [
        {"w": torch.randn(3, 5).to(kind).T, "b": torch.randn(7).to(kind).requires_grad_()}
        for _ in range(3)
    ]
    mean = WeightedMean(models[0])
    for model, weight in zip(models, (3, 1, 4), strict=True):
        mean.add(model, weight)
    got = mean.result()
    wide = torch.float64 if dtype == "float64" else torch.float32
    for name, array in got.items():
        x = [model[name].detach().to(wide) for model in models]
        expected = ((3 * x[0] + 1 * x[1] + 4 * x[2]) / 8).to(kind)
        assert array.dtype == kind
        assert not array.requires_grad
        assert torch.equal(array, expected)
    out = {name: torch.empty_like(array.detach()) for name, array in models[0].items()}
    assert torch.equal(mean.result(out)["w"], got["w"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_jax(dtype):
    jax = pytest.importorskip("jax", reason="needs JAX")
    models = [
        (jax.random.normal(jax.random.key(client), (3, 5)).astype(dtype),) for client in range(3)
    ]
    mean = WeightedMean(models[0])
    for model, weight in zip(models, (3, 1, 4), strict=True):
        mean.add(model, weight)
    (got,) = mean.result()
    x = [np.asarray(model[0]).astype(np.float32) for model in models]
    expected = ((np.float32(3) * x[0] + x[1] + np.float32(4) * x[2]) / np.float32(8)).astype(dtype)
    assert isinstance(got, jax.Array)
    assert got.dtype == dtype
    assert np.asarray(got).tobytes() == expected.tobytes()
    with pytest.raises(ArgumentTypeError, match="JAX arrays are immutable"):
        mean.result(models[0])


def test_a_client_of_another_library():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    mean = WeightedMean([np.zeros(3, np.float32)])
    mean.add([torch.tensor([1.0, 2.0, 3.0])])
    mean.add([np.array([3.0, 2.0, 1.0], np.float32)])
    assert mean.result()[0].tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(ArgumentTypeError, match=r"arrays\[0\] is on the meta device"):
        mean.add([torch.empty(3, device="meta")])


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam", "yogi"])
def test_strategies_compute_in_the_arrays_library(kind):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    jax = pytest.importorskip("jax", reason="needs JAX")
    random = np.random.default_rng(0)
    x, *means = random.normal(size=(4, 3, 2)).astype(np.float32)
    found = {}
    for name, make in (("numpy", np.asarray), ("torch", torch.tensor), ("jax", jax.numpy.asarray)):
        server, values = FedOpt(kind, lr=0.3), [make(x)]
        for mean in means:
            values = server.step(values, [make(mean)])
            values = fed_prox(values, values, [make(mean)], 0.1)
        assert type(values[0]) is type(make(x))
        found[name] = np.asarray(values[0])
    for name in ("torch", "jax"):
        np.testing.assert_allclose(found[name], found["numpy"], rtol=1e-5, atol=1e-6)
    half = [torch.tensor(x).to(torch.bfloat16).requires_grad_()]
    server = FedOpt(kind)
    for _ in range(2):
        half = server.step(half, [torch.tensor(means[0]).to(torch.bfloat16)])
        assert half[0].dtype == torch.bfloat16
        assert not half[0].requires_grad
