"""DiLoCo over parameters of PyTorch and JAX: the bits of NumPy's, written where they lie."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from gpucoll import ArgumentError, ArgumentTypeError
from gpucoll.training import DiLoCo, LocalSGD, average_parameters

GIVEN: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 1, "mix": 0.5}
SHAPES = ((4, 3), (), (5,))


def drift(rank, step):
    """Return what an inner step adds to each parameter."""
    random = np.random.default_rng((rank, step))
    return [random.normal(size=shape).astype(np.float32) for shape in SHAPES]


def numpy_run(comm, **given):
    model = [np.ones(shape, np.float32) for shape in SHAPES]
    with DiLoCo(comm, model, **given) as diloco:
        for step in range(10):
            for array, own in zip(model, drift(comm.rank, step), strict=True):
                array += own
            diloco.step()
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("more", [{}, {"compression": "int8"}], ids=str)
def test_parameters_of_a_module(comm, more):
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(3, 4)
    module.weight = torch.nn.Parameter(torch.ones(3, 4).t())  # not contiguous
    module.bias = torch.nn.Parameter(torch.ones(()))
    module.scale = torch.nn.Parameter(torch.ones(5))
    before = [*module.parameters()]
    with DiLoCo(comm, module.parameters(), **GIVEN, **more) as diloco:
        for step in range(10):
            with torch.no_grad():
                for parameter, own in zip(before, drift(comm.rank, step), strict=True):
                    parameter += torch.from_numpy(own)
            found = diloco.step()
            assert all(one is other for one, other in zip(found, before, strict=True))

    for parameter, expected in zip(before, numpy_run(comm, **GIVEN, **more), strict=True):
        assert parameter.detach().numpy().tobytes() == expected.tobytes()
        assert parameter.requires_grad
        assert parameter.is_leaf
    module.weight.sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_training_with_an_optimizer(comm, dtype):
    torch = pytest.importorskip("torch")
    torch.manual_seed(comm.rank)
    module = torch.nn.Linear(8, 1).to(getattr(torch, dtype))
    inputs = torch.randn(64, 8).to(getattr(torch, dtype))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    with DiLoCo(comm, module.parameters(), every=5) as diloco:
        for _ in range(60):
            optimizer.zero_grad()
            loss = ((module(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
            loss.backward()
            optimizer.step()
            diloco.step()
            losses.append(loss.item())
        parts = [parameter.detach().double().tolist() for parameter in module.parameters()]

    assert losses[-1] < losses[0] / 20
    assert comm.all_gather_object(parts) == [parts] * 2


@pytest.mark.ranks(2)
def test_arrays_of_jax_are_returned(comm):
    jax = pytest.importorskip("jax")
    model = [jax.numpy.ones(shape) * (1 + comm.rank) for shape in SHAPES]
    with DiLoCo(comm, model, **GIVEN) as diloco:
        model = diloco.parameters
        assert [float(array.sum()) for array in model] == [12, 1, 5]  # rank 0's
        for step in range(10):
            own = drift(comm.rank, step)
            model = [array + more for array, more in zip(model, own, strict=True)]
            model = diloco.step(model)
        with pytest.raises(ArgumentError, match=re.escape("parameters = diloco.step(parameters)")):
            diloco.step()

    for array, expected in zip(model, numpy_run(comm, **GIVEN), strict=True):
        assert isinstance(array, jax.Array)
        assert np.asarray(array).tobytes() == expected.tobytes()


@pytest.mark.ranks(2)
def test_libraries_may_differ_between_arrays_and_ranks(comm):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    fill = 1.0 + comm.rank
    half = jax.numpy.full(2, fill, jax.numpy.bfloat16)
    model = [np.full(3, fill, np.float16), torch.full((2,), fill), half]
    if comm.rank:
        model[1] = np.full(2, fill, np.float32)
    model = average_parameters(comm, model)
    assert [float(array[0]) for array in model] == [1.5, 1.5, 1.5]
    assert [str(model[0].dtype), str(model[2].dtype)] == ["float16", "bfloat16"]
    with LocalSGD(comm, model, every=1) as local:
        local.step([*model[:2], model[2] + comm.rank])
        assert [float(array[0]) for array in local.parameters] == [1.5, 1.5, 2.0]


@pytest.mark.ranks(2)
def test_what_is_refused(comm):
    torch = pytest.importorskip("torch")
    for parameter, text in (
        (torch.ones(2, dtype=torch.int32), "parameter 0 is int32"),
        (torch.ones(2, dtype=torch.complex64), "parameter 0 is complex64"),
        (torch.nn.Linear(2, 2), "got one Linear"),
    ):
        given = parameter if isinstance(parameter, torch.nn.Module) else [parameter]
        with pytest.raises(ArgumentTypeError, match=text):
            DiLoCo(comm, given, every=1)
        with pytest.raises(ArgumentTypeError, match=text):
            average_parameters(comm, given)
