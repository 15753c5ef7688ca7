"""neighbor_all_reduce and consensus: exact means, spectral decay, directed weights, bad input."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpucoll.errors import ArgumentError, ArgumentTypeError, MismatchError
from gpucoll.training.gossip import consensus, neighbor_all_reduce, topology

EPSILON = float(np.finfo(float).eps)
GUIDE = (Path(__file__).resolve().parents[3] / "docs/gossip.md").read_text("utf-8")


def average_by_one_peer(comm, dtype):
    made = topology.one_peer_exponential(comm.world_size)
    whole = np.random.default_rng(5).integers(-1000, 1000, (comm.world_size, 7)).astype(dtype)
    x = whole[comm.rank].copy()
    for step in range(len(made.rounds)):
        assert neighbor_all_reduce(comm, x, topology=made, step=step, out=x) is x
    assert x.dtype == dtype
    return x.tolist() == whole.mean(axis=0).tolist() and consensus(comm, x)


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_one_peer_gives_the_mean_after_log2_n_rounds(ranks, n):
    assert ranks.call(n, average_by_one_peer, "float64") == [0.0] * n


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["abcd", "abab"])
def test_between_hosts(hosts, placed):
    assert hosts.call(placed, average_by_one_peer, "float32") == [0.0] * 4


def decay(comm, name):
    n, rounds = comm.world_size, 6
    made = topology.ring(n) if name == "ring" else topology.exponential(n)
    angle = 2 * np.pi * comm.rank / n if name == "ring" else np.pi * comm.rank
    x = np.full(3, np.cos(angle))  # the eigenvector that decays most slowly
    errors = [consensus(comm, x)]
    for _ in range(rounds):
        x = neighbor_all_reduce(comm, x, topology=made)
        errors.append(consensus(comm, x))
    return [after / before for before, after in itertools.pairwise(errors)]


@pytest.mark.parametrize(("name", "n"), [("ring", 4), ("ring", 8), ("exponential", 8)])
def test_the_consensus_error_decays_at_the_spectral_rate(ranks, name, n):
    rate = 1 / 3 + 2 / 3 * np.cos(2 * np.pi / n)
    if name == "exponential":
        doublings = int(np.log2(n))
        rate = (doublings - 1) / (doublings + 1)

    ratios = ranks.call(n, decay, name)

    # One round rounds each element by at most 5 products and sums, relative to magnitudes that are
    # 1 / rate times the result's. Each consensus error is rounded by fewer than n + 8 operations.
    allowed = (5 / rate + 2 * (n + 8)) * EPSILON
    assert ratios == [ratios[0]] * n
    assert all(abs(ratio / rate - 1) < allowed for ratio in ratios[0])


def test_directed_weights(ranks):
    def on_each(comm):
        n, r = comm.world_size, comm.rank
        x = np.array([[1.0, r], [2.0**r, -r]])
        weights = {source: 10.0**source for source in range(r)}  # rank 0 takes from none
        return neighbor_all_reduce(comm, x, weights=weights, self_weight=0.5 * n)

    results = ranks.call(4, on_each)

    for r, result in enumerate(results):
        expected = sum(10.0**s * np.array([[1.0, s], [2.0**s, -s]]) for s in range(r))
        assert (result == expected + 2.0 * np.array([[1.0, r], [2.0**r, -r]])).all()


@pytest.mark.ranks(3)
def test_self_weight_is_what_is_left_of_one(comm):
    before = (comm.rank - 1) % 3

    result = neighbor_all_reduce(comm, np.full(2, 8.0 * comm.rank), weights={before: 0.25})

    assert result.tolist() == [6.0 * comm.rank + 2.0 * before] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "complex128"])
@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_dtypes_and_sizes(comm, dtype, size):
    import ml_dtypes  # noqa: F401  (bfloat16)

    x = np.full(size, 4 * comm.rank, np.dtype(dtype))

    result = neighbor_all_reduce(comm, x, topology=topology.ring(2))

    assert result.dtype == x.dtype
    assert (result == 2).all()
    assert (x == 4 * comm.rank).all()
    assert consensus(comm, x) == pytest.approx(2 * size**0.5, rel=1e-2 if "16" in dtype else 1e-6)


@pytest.mark.ranks(2)
def test_views_in_place(comm):
    whole = np.zeros((4, 6))
    view = whole[1:3, ::2]
    view[:] = comm.rank

    neighbor_all_reduce(comm, view, topology=topology.ring(2), out=view)

    assert whole.sum() == 6 * 0.5
    assert (view == 0.5).all()


@pytest.mark.ranks(1)
def test_one_rank_alone(comm):
    x = np.arange(3.0)

    assert neighbor_all_reduce(comm, x, topology=topology.ring(1)).tolist() == [0, 1, 2]
    assert neighbor_all_reduce(comm, x, weights={}, self_weight=2).tolist() == [0, 2, 4]
    assert consensus(comm, x) == 0


BAD: dict[str, Any] = {
    "neither": ({}, ArgumentError, "either topology= or weights="),
    "both": ({"weights": {}, "topology": topology.ring(3)}, ArgumentError, "either topology="),
    "ranks": ({"topology": topology.ring(4)}, ArgumentError, "of 4 ranks, the communicator of 3"),
    "matrix": ({"topology": np.eye(3)}, ArgumentTypeError, "goes through topology.from_matrix"),
    "twice": (
        {"topology": topology.ring(3), "self_weight": 0.5},
        ArgumentError,
        "leave self_weight out",
    ),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", BAD)
def test_arguments_that_are_wrong_everywhere(comm, name):
    given, error, text = BAD[name]
    with pytest.raises(error, match=text):
        neighbor_all_reduce(comm, np.ones(2), **given)
    assert comm.all_reduce(1) == 3


BAD_WEIGHTS: dict[str, Any] = {
    "not there": ({3: 0.5}, {}, "weights names rank 3; there are ranks 0 to 2"),
    "negative": ({-1: 0.5}, {}, "weights names rank -1"),
    "itself": ({1: 0.5}, {}, "weights names rank 1 itself"),
    "nan": ({0: np.nan}, {}, "the weight of rank 0 must be a finite number; got nan"),
    "word": ({0: "half"}, {}, "the weight of rank 0 must be a finite number; got 'half'"),
    "self": ({0: 0.5}, {"self_weight": np.inf}, "self_weight must be a finite number; got inf"),
    "name": ({"0": 0.5}, {}, "by ints; got '0'"),
    "list": ([0.5, 0.5], {}, "must be a mapping of ranks to weights; got list"),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_wrong_weights_of_one_rank_are_an_error_on_all(comm, name):
    weights, given, text = BAD_WEIGHTS[name]
    out = np.full(2, -7.0)
    how: Any = {"weights": weights, **given} if comm.rank == 1 else {"weights": {1: 0.5}}

    with pytest.raises((ArgumentError, MismatchError), match=text) as error:
        neighbor_all_reduce(comm, np.ones(2), out=out, **how)

    assert isinstance(error.value, ArgumentError if comm.rank == 1 else MismatchError)
    assert (out == -7).all()
    assert comm.all_reduce(1) == 3


DIFFERENT: dict[str, Any] = {
    "shape": np.ones((2, 1)),
    "dtype": np.ones(2, np.float32),
    "integers": np.ones(2, int),
    "list": [1.0, 1.0],
}


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("how", ["topology", "weights"])
def test_an_array_unlike_its_neighbours(ranks, name, how):
    def on_each(comm):
        x = DIFFERENT[name] if comm.rank == 2 else np.ones(2)
        out = np.full_like(x, -7)
        given: Any = (
            {"topology": topology.ring(6)}
            if how == "topology"
            else {"weights": {0: 0.5} if comm.rank else {}}
        )
        try:
            result = neighbor_all_reduce(comm, x, out=out, timeout_s=15, **given)
        except (ArgumentTypeError, MismatchError) as error:
            assert (out == -7).all()
            result = type(error), str(error)
        comm.barrier()
        return result

    results = ranks.call(6, on_each)

    told = range(6) if how == "weights" else (1, 2, 3)
    for rank, result in enumerate(results):
        if rank not in told:
            assert (result == 1).all()
            continue
        kind, text = result
        assert f"on rank {rank} of 6" in text
        if rank == 2 and name in ("integers", "list"):
            assert kind is ArgumentTypeError
        else:
            assert kind is MismatchError
            assert "rank 2 has" in text or rank == 2


@pytest.mark.ranks(2)
def test_neighbours_in_different_rounds_or_topologies(comm):
    made = topology.from_matrix([[[0.5, 0.5], [0.5, 0.5]], [[0.25, 0.75], [0.75, 0.25]]])
    with pytest.raises(MismatchError, match=f"step {comm.rank}; rank {1 - comm.rank} has"):
        neighbor_all_reduce(comm, np.ones(2), topology=made, step=comm.rank)
    other = topology.ring(2) if comm.rank else made
    with pytest.raises(MismatchError, match="<Topology of 2 ranks, 2 rounds>"):
        neighbor_all_reduce(comm, np.ones(2), topology=other)
    assert comm.all_reduce(1) == 2


@pytest.mark.ranks(2)
def test_consensus_refuses_what_has_no_mean(comm):
    with pytest.raises(ArgumentTypeError, match="x has dtype int64; consensus works on float16"):
        consensus(comm, np.ones(2, int))
    with pytest.raises(ArgumentTypeError, match="must be an array that can be computed with"):
        consensus(comm, 1.0)


@pytest.mark.ranks(2)
def test_the_examples_of_the_guide(comm):
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL))
    assert code.count("assert") == 5
    exec(compile(code, "gossip.md", "exec"), {"comm": comm, "np": np})  # noqa: S102  (ours)
