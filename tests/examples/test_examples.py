"""The examples do what they say, on one rank and on several, and as programs."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.ranks import Ended, Reply

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted({path.stem for path in EXAMPLES.glob("*.py")} - {"slow_links", "federated_digits"})
"""The programs for ranks that compare their result with that of one process."""
PROGRAM_TIMEOUT_S = 120

several_ranks = pytest.mark.parametrize("world_size", [1, 2, 4])


def example(name: str) -> dict:
    """Return the names that an example defines; its functions travel to ranks by value."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)


@pytest.mark.soak(quick=1)
@several_ranks
def test_data_parallel_training_equals_one_process_bit_for_bit(ranks, digits, world_size):
    replies = ranks.call(world_size, example("data_parallel_digits")["main"], *digits)

    losses, accuracy, losses_alone = replies[0]
    assert losses == losses_alone
    assert all(reply[:2] == (losses, accuracy) for reply in replies)
    assert losses[-1] < 0.05
    assert accuracy > 0.9


def test_data_parallel_training_depends_on_the_number_of_ranks_by_rounding_only(ranks, digits):
    # A sum of N = 125 numbers is off by at most N u = 1.4e-14 of the sum of their magnitudes, which
    # is at most some hundred times the sum. 240 steps add that up; where the loss falls they do not
    # amplify it. Another batch, or a part left out, changes the loss by more than 1e-3.
    module = example("data_parallel_digits")
    training = [part[: module["TRAINING_IMAGES"]] for part in digits]
    _, expected = module["train"](*training, [0], 1, lambda sums: sums, 20)

    losses = ranks.call(4, module["main"], *digits)[0][0]

    np.testing.assert_allclose(losses, expected, rtol=240 * 100 * 1.4e-14)


@pytest.mark.soak(quick=1)
@several_ranks
def test_diloco_ends_where_one_process_does_bit_for_bit(ranks, digits, world_size):
    replies = ranks.call(world_size, example("diloco_digits")["main"], *digits)

    weights, accuracy, same = replies[0]
    assert same is True
    assert accuracy > 0.9
    for other, *_ in replies:
        assert [array.tobytes() for array in other] == [array.tobytes() for array in weights]


@pytest.mark.soak(quick=1)
@several_ranks
def test_kmeans_finds_the_clusters_of_one_process(ranks, world_size):
    result = ranks.call(world_size, example("kmeans")["main"])[0]

    labels, centers, labels_alone, centers_alone = result
    np.testing.assert_array_equal(labels, labels_alone)
    np.testing.assert_array_equal(centers, centers_alone)
    assert set(labels) == set(range(8))


def test_kmeans_with_more_ranks_than_points_and_an_empty_cluster(ranks):
    def cluster(comm):
        mine = [[[0.0]], np.empty((0, 1)), [[1.0]], np.empty((0, 1))][comm.rank]
        start = np.array([[0.0], [1.0], [9.0]])
        return kmeans(comm, np.asarray(mine), start)

    kmeans = example("kmeans")["kmeans"]

    for labels, centers in ranks.call(4, cluster):
        assert len(labels) <= 1
        assert centers.ravel().tolist() == [0, 1, 9]


@pytest.mark.soak(quick=2)
@several_ranks
def test_halo_exchange_equals_one_process_bit_for_bit(ranks, world_size):
    temperatures, alone = ranks.call(world_size, example("halo_exchange")["main"])[0]

    np.testing.assert_array_equal(temperatures, alone)
    assert temperatures.max() > 10
    assert np.isclose(temperatures.sum(), 100 * 51 * 30)  # no heat is lost


@pytest.mark.parametrize("world_size", [1, 2, 4, 6])
def test_process_grid_multiplies_as_numpy(ranks, world_size):
    product, expected = ranks.call(world_size, example("process_grid")["main"])[0]

    np.testing.assert_array_equal(product, expected)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(
    "deadly", [{}, {1: 40, 2: 80}, {0: 7, 3: 8}, {0: 50}, {3: 0, 2: 119}], ids=str
)
def test_elastic_training_goes_on_through_killed_ranks(rank_server, deadly):
    with rank_server.fork(4) as pool:
        pool.start(example("elastic_training")["main"], deadly)
        replies = pool.collect()

    assert {rank for rank, reply in enumerate(replies) if isinstance(reply, Ended)} == {*deadly}
    results = [reply.result for reply in replies if isinstance(reply, Reply)]
    weights, sizes, _ = results[0]
    expected = [4 - sum(moment <= step for moment in deadly.values()) for step in range(120)]
    assert sizes == expected
    assert [same for _, _, same in results] == [True] + [None] * (len(results) - 1)
    assert all((weights == each[0]).all() and sizes == each[1] for each in results)
    assert np.abs(weights - np.arange(20)).max() < 0.2


@pytest.mark.soak
def test_elastic_training_wins_ranks_back():
    output = check_program(str(EXAMPLES / "elastic_training.py"))

    assert "the number of ranks changed at [42, 50, 85, 90]" in output
    assert "the same weights on all 4 ranks: True" in output


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("way", ["gossip", "data parallel", "DiLoCo", "SparseLoCo"])
def test_every_way_over_slow_links_learns(ranks, digits, way):
    images, labels = digits
    data = images.astype(np.float32), labels

    found, *others = ranks.call(4, example("slow_links")["train"], way, data)

    assert others == [None] * 3
    assert found["accuracy"] > 0.9
    assert len(found["curve"]) == 200 / 10 + 1
    assert (found["apart"] > 0) == (way == "gossip")


def test_federated_training_learns_with_noise_and_six_of_eight_clients(digits):
    module = example("federated_digits")
    images = np.column_stack([digits[0], np.ones(len(digits[0]))])
    training, rest = (images[:1500], digits[1][:1500]), (images[1500:], digits[1][1500:])
    included = [[*range(8)]] * 5 + [[0, 1, 3, 4, 6, 7]] * 3

    weights = module["train_alone"](*training, included)

    assert module["accuracy_of"](weights, *rest) > 0.7


@pytest.mark.soak
def test_federated_training_in_eight_processes_two_of_which_drop_out():
    for name in ("sklearn", "dp_accounting", "cryptography"):
        pytest.importorskip(name, reason=f"needs {name}")
    output = check_program(str(EXAMPLES / "federated_digits.py"), "--rounds", "22")

    assert "clients in the sums: 8 at first, 6 in the end" in output
    epsilon = example("federated_digits")["NOISE"].epsilon(1e-5, 22)
    assert f"epsilon {epsilon:.2f} for delta 1e-05 after 22 rounds" in output


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_example_is_a_program_for_gpucoll_run(name):
    if name.endswith("_digits"):
        pytest.importorskip("sklearn", reason="needs scikit-learn's digits")
    check_program("-m", "gpucoll.launcher.cli", "-n", "2", str(EXAMPLES / f"{name}.py"))


@pytest.mark.soak
def test_example_is_a_program_by_itself():
    check_program(str(EXAMPLES / "halo_exchange.py"))


def check_program(*arguments: str) -> str:
    command = [sys.executable, *arguments]

    process = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S)

    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.rstrip().endswith("True"), process.stdout
    return process.stdout
