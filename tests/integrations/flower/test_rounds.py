"""Aggregation in Flower's simulation: the mean is that of the updates, whoever leaves."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("programs") / "rounds.py"
CLIENTS, CLIP, MAX_WEIGHT = 7, 0.5, 10
IN_THE_SUM = [  # of each round, or None: too many leave
    {0, 1, 2, 3, 4, 5, 6},
    {1, 2, 3, 4, 5, 6},
    {0, 2, 3, 4, 5, 6},
    {0, 1, 3, 4, 5, 6},
    {0, 1, 2, 3, 4, 5, 6},  # who leaves behind the training is in the sum
    {0, 1, 2, 3, 4, 5, 6},
    {1, 2, 3, 5, 6},
    None,
    None,
    {0, 1, 2, 4, 5, 6},
]


@pytest.fixture(scope="module")
def simulated(flower):
    """Run the program with secure aggregation; return what it found, and its log."""
    return simulate(flower, "secure")


def simulate(flower, how):
    """Run the program in Flower's environment."""
    variables = {
        **flower.variables,
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
    }
    done = subprocess.run(
        [flower.python, str(PROGRAM), how],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-5000:]
    (found,) = re.findall(r"^FOUND (.*)$", output, re.MULTILINE)
    return json.loads(found), output


def update_of(client, server_round):
    """Return what the program's client adds to the arrays."""
    draw = np.random.default_rng((client, server_round))
    return {
        "a": draw.normal(size=(2, 3)).astype(np.float32),
        "b": np.float64(draw.uniform(-0.4, 0.4)),
        "n": np.int64(0),
    }


def means(included, server_round):
    """Return the weighted mean of clipped updates."""
    weights = [client + 1 for client in included]
    updates = [update_of(client, server_round) for client in included]
    return {
        name: np.average([np.clip(u[name], -CLIP, CLIP) for u in updates], 0, weights)
        for name in updates[0]
    }


def bound(included):
    """Return by how much a mean may be off: by rounding updates and weights, and by float32."""
    levels = (2**31 - 1) // CLIENTS
    weight = sum(client + 1 for client in included) / MAX_WEIGHT * levels
    return 2 * CLIENTS * CLIP / weight + 10 * 2.0**-23


def changes(history, server_round):
    """Return by how much arrays changed in a round."""
    before, after = history[server_round - 1 : server_round + 1]
    return {name: np.array(after[name][1]) - np.array(before[name][1]) for name in before}


def test_every_round_adds_the_mean_of_those_that_stayed(simulated):
    found, _ = simulated
    for server_round, included in enumerate(IN_THE_SUM, 1):
        change = changes(found["secure"]["history"], server_round)
        metrics = found["secure"]["metrics"].get(str(server_round))
        if included is None:
            assert not any(np.any(values) for values in change.values())
            assert metrics is None
            continue
        for name, mean in means(included, server_round).items():
            assert np.abs(change[name] - mean).max() <= bound(included), (server_round, name)
        assert metrics["clients"] == len(included)
        assert metrics["num-examples"] == pytest.approx(sum(c + 1 for c in included), rel=1e-6)
        assert metrics.keys() == {"clients", "num-examples"}


def test_arrays_keep_their_dtypes_as_in_flower(simulated):
    history = simulated[0]["secure"]["history"]
    assert {name: dtype for name, (dtype, _) in history[1].items()} == {
        "a": "float32",
        "b": "float64",
        "n": "float64",
    }


def test_with_neighbours(simulated):
    """Where one leaves, four of each five holders are there. Of two, it depends on the circle."""
    history = simulated[0]["neighbours"]["history"]
    for server_round, included in enumerate(IN_THE_SUM[:6], 1):
        change = changes(history, server_round)
        for name, mean in means(included, server_round).items():
            assert np.abs(change[name] - mean).max() <= bound(included)


def test_a_strategy_that_goes_on_from_the_mean(simulated):
    """The first step of FedAdam (eta 0.1, beta 0.9 and 0.99, tau 1e-3), from the mean."""
    history = simulated[0]["adam"]["history"]
    change = changes(history, 1)["a"]
    mean = means(IN_THE_SUM[0], 1)["a"]
    eta = 0.1 * np.sqrt(1 - 0.99**2) / (1 - 0.9**2)
    assert np.allclose(change, eta * 0.1 * mean / (0.1 * np.abs(mean) + 1e-3), atol=1e-5)
    assert len({json.dumps(arrays) for arrays in history}) == 1 + len(IN_THE_SUM) - 2


def test_a_client_does_not_train_without_secure_aggregation(simulated):
    found, output = simulated
    assert found["refused"]["history"][0] == found["refused"]["history"][1]
    assert "asks for training without secure aggregation: this client refuses" in output


def test_a_weight_that_is_too_large_leaves_the_round(simulated):
    found, output = simulated
    assert found["heavy"]["history"][0] == found["heavy"]["history"][1]
    assert "must be a number of 0 to max_weight = 10.0" in output
    assert "got 11" not in output


def test_weights_of_zero_give_no_result(simulated):
    found, output = simulated
    assert found["light"]["history"][0] == found["light"]["history"][1]
    assert "the weights of all clients are 0" in output


def test_streaming_gives_what_flowers_strategies_give(flower):
    """Also if a client fails. One reply is in memory at a time; one that is missing is left out."""
    found, _ = simulate(flower, "streaming")
    for name in ("avg", "adam"):
        whole, streamed = found[name]
        assert len(whole["history"]) == 3
        for one, other in zip(whole["history"], streamed["history"], strict=True):
            for array in one:
                assert one[array][0] == other[array][0]
                assert np.allclose(one[array][1], other[array][1], atol=1e-5)
        for server_round in ("1", "2"):
            loss = whole["metrics"][server_round]["loss"]
            assert streamed["metrics"][server_round] == {"loss": pytest.approx(loss, rel=1e-12)}
            assert loss > 0
    assert found["in memory"] == 0


def test_clients_refuse_to_be_given_different_models(flower):
    """The tests of `test_alike.py`, which need Flower in their own process."""
    tests = Path(__file__).with_name("test_alike.py")
    options = [
        "--noconftest",
        "-c",
        os.devnull,
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [flower.python, "-m", "pytest", "-q", *options, str(tests)],
        env={**os.environ, **flower.variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout
