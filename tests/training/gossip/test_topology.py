"""Topologies: weights by hand, spectral rates in closed form, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.training.gossip import topology

HALVES = [[0.5, 0.5], [0.5, 0.5]]


def second(matrix):
    """Return the second largest magnitude of the eigenvalues: what is left of an error per round.

    These matrices are normal, so the error's norm falls by it, too.
    """
    n = len(matrix)
    return float(np.linalg.svd(matrix - np.full((n, n), 1 / n), compute_uv=False)[0])


EPSILON = float(np.finfo(float).eps)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 16, 32, 64])
def test_rate_of_the_ring(n):
    rate = second(topology.ring(n).matrix())

    assert abs(rate - abs(1 / 3 + 2 / 3 * np.cos(2 * np.pi / n))) < 4 * n * EPSILON


@pytest.mark.parametrize("doublings", [2, 3, 4, 5, 6])
def test_rate_of_the_exponential_graph(doublings):
    n = 2**doublings

    rate = second(topology.exponential(n).matrix())

    assert abs(rate - (doublings - 1) / (doublings + 1)) < 4 * n * EPSILON


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32])
def test_one_peer_rounds_make_the_exact_mean(n):
    x = np.random.default_rng(n).integers(-1000, 1000, n).astype(float)
    mean = x.mean()  # exact: a sum of integers, divided by a power of two

    for matrix in topology.one_peer_exponential(n).rounds:
        x = matrix @ x

    assert x.tolist() == [mean] * n


MADE = {
    "ring": topology.ring,
    "exponential": topology.exponential,
    "one_peer_exponential": topology.one_peer_exponential,
    "row": lambda n: topology.grid(1, n),
    "two rows": lambda n: topology.grid(2, n),
    "square": lambda n: topology.grid(n, n),
}


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7, 12])
@pytest.mark.parametrize("name", MADE)
def test_all_are_what_from_matrix_accepts(name, n):
    made = MADE[name](n)

    again = topology.from_matrix(np.array(made.rounds))

    assert again.digest == made.digest
    for step in range(2 * len(made.rounds)):
        for rank in range(made.world_size):
            for other, weight in made.sources(rank, step).items():
                assert weight == made.matrix(step)[rank, other] > 0
                assert rank in made.destinations(other, step)
                assert rank in made.partners(other)
                assert other in made.partners(rank)
                assert other != rank


def test_weights_of_a_grid():
    made = topology.grid(2, 3)  # 0 1 2 above 3 4 5

    assert made.sources(0) == {1: 1 / 4, 3: 1 / 3}
    assert made.sources(4) == {1: 1 / 4, 3: 1 / 4, 5: 1 / 4}
    assert made.matrix()[4, 4] == 1 / 4


def test_float32_weights_are_judged_by_their_own_digits():
    thirds = np.full((3, 3), 1 / 3, np.float32)

    assert topology.from_matrix(thirds).world_size == 3
    with pytest.raises(ArgumentError, match=r"adds up to 1\.0000000"):
        topology.from_matrix(thirds.astype(float))


BAD = {
    "row": ([[0.5, 0.4], [0.5, 0.5]], r"row 0 of the weights adds up to 0\.9 instead of 1"),
    "column": ([[0.5, 0.5], [0.6, 0.4]], r"column 0 of the weights adds up to 1\.1 instead"),
    "negative": ([[1.5, -0.5], [-0.5, 1.5]], r"weight \[0, 1\] is -0\.5"),
    "nan": ([[np.nan, 0.5], [0.5, 0.5]], r"weight \[0, 0\] is nan"),
    "apart": (np.kron(np.eye(2), HALVES), r"ranks \[0, 1\] never hear of ranks \[2, 3\]"),
    "alone": (np.eye(3), r"not connected: ranks \[0\] never hear of ranks \[1\]"),
    "turns": ([[0, 1], [1, 0]], "only pass their arrays around and never agree"),
    "round": ([HALVES, [[1, 0], [1, 0]]], "column 0 of round 1"),
    "shape": ([[0.5, 0.5]], r"shape \(1, 2\)"),
    "no ranks": (np.zeros((0, 0)), r"shape \(0, 0\)"),
    "a number": (1.0, r"shape \(\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_matrices_that_are_refused(name):
    weights, text = BAD[name]
    with pytest.raises(ArgumentError, match=text):
        topology.from_matrix(weights)


def test_rounds_that_connect_only_together():
    first, then = np.eye(4), np.eye(4)
    first[:2, :2] = first[2:, 2:] = then[1:3, 1:3] = HALVES

    assert len(topology.from_matrix([first, then]).rounds) == 2
    with pytest.raises(ArgumentError, match="not connected"):
        topology.from_matrix(first)


@pytest.mark.parametrize("n", [0, -1, 1.5, None, "4"])
def test_numbers_of_ranks_that_are_refused(n):
    for make in (topology.ring, topology.exponential, topology.one_peer_exponential):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="n must be"):
            make(n)
    with pytest.raises((ArgumentError, ArgumentTypeError), match="columns must be"):
        topology.grid(2, n)
    with pytest.raises(ArgumentTypeError, match="needs an array of weights"):
        topology.from_matrix([["a"]])
