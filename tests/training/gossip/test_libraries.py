"""Gossip with arrays of PyTorch and JAX, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpucoll.errors import ArgumentError, ArgumentTypeError, MismatchError
from gpucoll.training.gossip import (
    PairwiseAverage,
    PushSum,
    consensus,
    neighbor_all_reduce,
    push_sum,
    topology,
)


def made_by(library: str, values: Any, dtype: str) -> Any:
    if library == "torch":
        import torch

        return torch.tensor(values, dtype=getattr(torch, dtype))
    import jax.numpy

    return jax.numpy.array(values, dtype)


def as_on_numpy(comm, library, dtype):
    x = made_by(library, [4.0 * comm.rank, 8.0], dtype)
    results = [neighbor_all_reduce(comm, x, topology=topology.ring(2))]
    results.append(neighbor_all_reduce(comm, x, weights={1 - comm.rank: 0.25}))
    results.append(push_sum(comm, x, 1.0, to=1 - comm.rank)[0])
    state = PushSum(comm, x)
    state.push(1 - comm.rank)
    results.append(state.mean)
    with PairwiseAverage(comm, x) as average:
        y = x
        while not average.averages:
            y = average.step(y)
        results.append(average.finish(y))
    assert {type(result) for result in results} == {type(x)}
    assert {str(result.dtype) for result in results} == {str(x.dtype)}
    assert consensus(comm, x) == 2.0
    return [[float(v) for v in result] for result in results]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_results_are_those_of_the_library(ranks, library, dtype):
    pytest.importorskip(library)
    results = ranks.call(2, as_on_numpy, library, dtype)

    for rank, (ring, quarter, pushed, mean, pairwise) in enumerate(results):
        assert ring == pushed == mean == pairwise == [2.0, 8.0]
        assert quarter == [1.0 + 2.0 * rank, 8.0]


def train_a_parameter(comm):
    import torch

    x = torch.nn.Parameter(torch.full((3,), 4.0 * comm.rank))
    assert neighbor_all_reduce(comm, x, topology=topology.ring(2), out=x) is x
    x.sum().backward()
    with PairwiseAverage(comm, x) as average:
        average.step(x, out=x)
        average.finish(x, out=x)
    whole = torch.full((3,), 2.0 * comm.rank, dtype=torch.int64)
    assert push_sum(comm, whole, 1 << 20, to=1 - comm.rank)[0].tolist() == [1, 1, 1]
    return x.tolist(), x.requires_grad


def test_a_parameter_of_torch(ranks):
    pytest.importorskip("torch")
    assert ranks.call(2, train_a_parameter) == [([2.0] * 3, True)] * 2


def store_into_jax(comm):
    out = made_by("jax", [0.0, 0.0], "float32")
    x = np.ones(2, np.float32) if comm.rank else out
    with pytest.raises((ArgumentError, ArgumentTypeError, MismatchError)):
        neighbor_all_reduce(comm, x, weights={}, out=out)


def test_arrays_that_cannot_be_written(ranks):
    pytest.importorskip("jax")
    ranks.call(2, store_into_jax)
