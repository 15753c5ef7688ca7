"""FedAvg, FedProx, FedOpt and SCAFFOLD: the identities between them, and their papers' formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gpucoll import ArgumentError, ArgumentTypeError, StateError
from gpucoll.federated import FedOpt, Scaffold, WeightedMean, fed_avg, fed_prox

EXAMPLES = (1, 1, 2, 4)
"""Examples of each of four clients: powers of two, so that their means are exact."""
RATE = 0.125


def integers_of(client: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a client's examples: inputs and targets from -1 to 1."""
    random = np.random.default_rng(client)
    inputs = random.integers(-1, 2, (EXAMPLES[client], 3)).astype(float)
    return inputs, random.integers(-1, 2, EXAMPLES[client]).astype(float)


def gradient(weights: np.ndarray, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the gradient of the mean of half the squared errors."""
    return inputs.T @ (inputs @ weights - targets) / len(targets)


@pytest.mark.ranks(4)
def test_one_full_batch_step_of_fed_avg_is_gradient_descent_bit_for_bit(comm):
    """Every product and sum is a multiple of a power of two that float64 holds exactly."""
    data = [integers_of(client) for client in range(4)]
    inputs, targets = (np.concatenate(parts) for parts in zip(*data, strict=True))
    weights = expected = np.zeros(3)
    for _ in range(5):
        trained = weights - RATE * gradient(weights, *data[comm.rank])
        (weights,) = fed_avg(comm, [trained], EXAMPLES[comm.rank])
        expected = expected - RATE * gradient(expected, inputs, targets)
        assert weights.tobytes() == expected.tobytes()
    assert np.abs(expected).max() > 0


def problem_of(client: int, size: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Return least squares whose optimum and Hessian differ from client to client."""
    random = np.random.default_rng(100 + client)
    return random.normal(size=(30, size)) / (client + 1), random.normal(size=30)


def local_steps(weights, data, steps, rate, change=lambda gradients, weights: gradients):
    for _ in range(steps):
        (corrected,) = change([gradient(weights, *data)], weights)
        weights = weights - rate * corrected
    return weights


@pytest.mark.ranks(2)
def test_fed_prox_without_its_term_is_fed_avg_bit_for_bit(comm):
    data = problem_of(comm.rank)
    plain = proximal = pulled = np.zeros(4)

    def train(weights, mu):
        def change(gradients, now):
            return fed_prox(gradients, [now], [weights], mu)

        return fed_avg(comm, [local_steps(weights, data, 5, 0.1, change)], 30)[0]

    for _ in range(4):
        plain = fed_avg(comm, [local_steps(plain, data, 5, 0.1)], 30)[0]
        proximal, pulled = train(proximal, 0), train(pulled, 8.0)
    assert proximal.tobytes() == plain.tobytes()
    assert np.linalg.norm(pulled) < np.linalg.norm(plain)


def test_the_term_of_fed_prox():
    g, w, common = np.array([1.0, -0.0]), np.array([3.0, 5.0]), np.array([1.0, 4.0])
    assert fed_prox({"w": g}, {"w": w}, {"w": common}, 0.5)["w"].tolist() == [2.0, 0.5]
    assert fed_prox((g,), (w,), (common,), 0)[0].tobytes() == g.tobytes()
    with pytest.raises(ArgumentError, match="mu must be at least 0"):
        fed_prox([g], [w], [common], -1)
    with pytest.raises(ArgumentError, match="must have the same keys"):
        fed_prox([g], [w, w], [common], 1)


def test_fed_opt_with_sgd_and_rate_one_is_fed_avg_bit_for_bit():
    random = np.random.default_rng(0)
    values, mean = random.normal(size=(2, 50)).astype(np.float32)
    assert FedOpt("sgd", lr=1, momentum=0).step([values], [mean])[0].tobytes() == mean.tobytes()
    # not by adding the difference, which would round:
    assert (values + (mean - values)).tobytes() != mean.tobytes()


def in_python(kind: str, lr: float, beta1: float, beta2: float, tau: float, rounds) -> float:
    """Return the weight after rounds of clients' mean progress, by the paper's algorithm 2."""
    x, m, v = 0.0, 0.0, tau**2
    for d in rounds:
        if kind == "sgd":
            m = beta1 * m + d
            x += lr * m
            continue
        m = beta1 * m + (1 - beta1) * d
        if kind == "adagrad":
            v = v + d**2
        elif kind == "adam":
            v = beta2 * v + (1 - beta2) * d**2
        else:
            v = v - (1 - beta2) * d**2 * math.copysign(1 if v != d**2 else 0, v - d**2)
        x += lr * m / (math.sqrt(v) + tau)
    return x


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam", "yogi"])
def test_the_formulas_of_fed_opt(kind):
    rounds = [0.5, -0.25, 1e-4, 0.0, 2.0, -1.5]
    server = FedOpt(kind, lr=0.3, momentum=0.8, decay=0.9, tau=0.01)
    values = {"w": np.zeros((2, 1)), "b": np.zeros(())}
    for d in rounds:
        values = server.step(values, {name: x + d for name, x in values.items()})
    expected = in_python(kind, 0.3, 0.8, 0.9, 0.01, rounds)
    for name, shape in (("w", (2, 1)), ("b", ())):
        assert values[name].shape == shape
        np.testing.assert_allclose(values[name], expected, rtol=1e-13)


def test_what_fed_opt_refuses():
    for given, error, text in (
        ({"kind": "lamb"}, ArgumentError, "kind must be one of sgd, adagrad, adam, yogi"),
        ({"momentum": 1.0}, ArgumentError, "momentum must be at least 0 and below 1"),
        ({"lr": math.nan}, ArgumentError, "lr must be at least 0"),
        ({"lr": "1"}, ArgumentTypeError, "lr must be a number"),
        ({"tau": 0}, ArgumentError, "tau must be greater than 0"),
    ):
        with pytest.raises(error, match=text):
            FedOpt(**given)


def of_scaffold(comm, data, rounds, rate=0.1, takes_part=lambda turn: True):
    """Return the weights after rounds of five local steps, and SCAFFOLD's state."""
    weights = np.zeros(4)
    scaffold = Scaffold(comm, [weights])
    for turn in range(rounds):
        trained = local_steps(weights, data, 5, rate, lambda g, _: scaffold.gradients(g))
        given = [trained] if takes_part(turn) else None
        (weights,) = scaffold.step([weights], given, 5, rate)
    return weights, scaffold


@pytest.mark.ranks(2, 4)
def test_scaffold_with_equal_data_is_fed_avg_bit_for_bit(comm):
    """All control variates are equal then, so that the correction is 0."""
    data, weights = problem_of(0), np.zeros(4)
    for _ in range(6):
        (weights,) = fed_avg(comm, [local_steps(weights, data, 5, 0.1)])
    got, scaffold = of_scaffold(comm, data, 6)
    assert got.tobytes() == weights.tobytes()
    assert np.abs(scaffold.common[0]).max() > 0
    for plain in np.random.default_rng(0).normal(size=(50, 4)):
        assert scaffold.gradients([plain])[0].tobytes() == plain.tobytes()


@pytest.mark.ranks(3)
def test_scaffold_ends_at_the_optimum_of_all_where_fed_avg_does_not(comm):
    """With a rate of 0.1 the error shrinks by a factor in each round, down to rounding."""
    data = problem_of(comm.rank)
    everything = [problem_of(client) for client in range(3)]
    hessian = sum(inputs.T @ inputs for inputs, _ in everything)
    optimum = np.linalg.solve(hessian, sum(inputs.T @ targets for inputs, targets in everything))

    weights = np.zeros(4)
    for _ in range(300):
        (weights,) = fed_avg(comm, [local_steps(weights, data, 5, 0.1)])
    got, scaffold = of_scaffold(comm, data, 300)
    np.testing.assert_allclose(got, optimum, atol=1e-9)
    assert np.abs(weights - optimum).max() > 1e-3
    # At the optimum of all, each control variate is the client's own gradient there.
    np.testing.assert_allclose(scaffold.own[0], gradient(optimum, *data), atol=1e-7)
    np.testing.assert_allclose(scaffold.common[0], 0, atol=1e-7)


@pytest.mark.ranks(4)
def test_the_mean_of_the_control_variates_is_the_servers(comm):
    """Also with clients that do not take part in some rounds."""
    weights, scaffold = of_scaffold(
        comm, problem_of(comm.rank), 7, takes_part=lambda turn: (turn + comm.rank) % 3 != 0
    )
    mean = WeightedMean(scaffold.own)
    for own in comm.all_gather_object(scaffold.own):
        mean.add(own)
    assert mean.result()[0].tobytes() == scaffold.common[0].tobytes()
    assert np.abs(scaffold.common[0]).max() > 0
    assert len({array.tobytes() for array in comm.all_gather_object(weights)}) == 1


@pytest.mark.ranks(2)
def test_a_round_in_which_nobody_takes_part(comm):
    scaffold = Scaffold(comm, [np.zeros(2)])
    with pytest.raises(StateError, match="weights of all 2 models are 0"):
        scaffold.step([np.zeros(2)], None, 1, 0.1)
    with pytest.raises(ArgumentError, match="steps and lr must be greater than 0"):
        scaffold.step([np.zeros(2)], [np.zeros(2)], 0, 0.1)
    assert comm.all_reduce(1) == 2


@pytest.mark.ranks(2)
def test_a_wrong_argument_of_one_rank_is_an_error_on_all(comm):
    """And no control variate is renewed."""
    x, other, is_wrong = [np.ones(2)], [np.ones(3)], comm.rank == 1
    scaffold = Scaffold(comm, x)
    calls = {
        "weight must be at least 0": lambda: fed_avg(comm, x, -1 if is_wrong else 1),
        "has no array": lambda: fed_avg(comm, [] if is_wrong else x),
        "steps and lr": lambda: scaffold.step(x, x, 0 if is_wrong else 1, 0.1),
        "same shape": lambda: scaffold.step(x, other if is_wrong else x, 1, 0.1),
        "lr must be": lambda: scaffold.step(x, x, 1, 0.1, server_lr=-1.0 if is_wrong else 1.0),
    }
    for text, call in calls.items():
        with pytest.raises(ArgumentError, match=text) as found:
            call()
        assert is_wrong or "rank 1 of 2 raised" in str(found.value)
        assert scaffold.own[0].tolist() == scaffold.common[0].tolist() == [0.0] * 2
    assert comm.all_reduce(1) == 2


def test_arrays_of_other_shapes_are_not_broadcast():
    with pytest.raises(ArgumentError, match=r"must have the same shape; got \[\(3, 1\), \(3,\)\]"):
        FedOpt("adam").step([np.ones((3, 1))], [np.ones(3)])


def test_rates_may_be_numbers_of_numpy_and_the_state_is_not_shown():
    rate: Any = np.float32(0.25)
    server = FedOpt("adam", lr=rate, decay=np.float64(0.5))
    (got,) = server.step([np.zeros(2, np.float32)], [np.ones(2, np.float32)])
    assert got.dtype == np.float32
    assert server == FedOpt("adam", lr=0.25, decay=0.5)
    assert repr(server) == "FedOpt(kind='adam', lr=0.25, momentum=0.9, decay=0.5, tau=0.001)"
