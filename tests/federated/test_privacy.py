"""Noise of several clients: the bounds on what a record adds, the noise's size, and epsilon."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from tests.federated.secure_sum.playing import play

from gpucoll import ArgumentError, ArgumentTypeError, BackendUnavailableError
from gpucoll.federated import DistributedNoise, SecureSum, epsilon_of_gaussian
from gpucoll.federated.privacy import inflation

KINDS = ("gaussian", "skellam")


def noise_of(kind: str = "gaussian", **changes: Any) -> DistributedNoise:
    settings = {"clip": 1.5, "noise_multiplier": 2.0, "clients": 4, "size": 50, "levels": 100}
    return DistributedNoise(kind, **(settings | changes))


# --- epsilon --------------------------------------------------------------------------------------


def test_the_inflation_of_a_sum_of_discrete_gaussians():
    """As Google's accounting of distributed privacy computes it."""
    for sigma, clients, expected in (
        (0.5, 2, 0.84805),
        (1, 2, 5.1723e-4),
        (1, 100, 5.4779e-4),
        (2, 2, 7.157e-17),
    ):
        assert inflation(sigma**2, clients) == pytest.approx(expected, rel=1e-4)
    assert inflation(1.0, 1) == 0


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(
    ("sampling", "multiplier", "steps", "renyi", "loss"),
    [(0.1, 1, 100, 7.9039, 7.0466), (1, 5, 50, 7.0774, 6.5730), (0.01, 4, 10_000, 1.0355, 0.9470)],
)
def test_epsilon_of_a_gaussian(sampling, multiplier, steps, renyi, loss):
    """Values of dp-accounting 0.6; another implementation gives 0.9600 for the last."""
    pytest.importorskip("dp_accounting", reason="needs dp-accounting")
    given = {"delta": 1e-5, "steps": steps, "sampling": sampling}
    assert epsilon_of_gaussian(multiplier, accountant="rdp", **given) == pytest.approx(
        renyi, abs=1e-3
    )
    assert epsilon_of_gaussian(multiplier, **given) == pytest.approx(loss, rel=0.015)


def test_from_sigma_two_on_the_discrete_gaussian_has_the_gaussians_epsilon():
    pytest.importorskip("dp_accounting", reason="needs dp-accounting")
    noise = noise_of(noise_multiplier=5.0, clients=10)
    assert noise.variance > 4
    multiplier = math.sqrt(10 * noise.variance / noise.l2_squared)
    expected = epsilon_of_gaussian(multiplier, 1e-5, 50, accountant="rdp")
    assert noise.epsilon(1e-5, 50) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_epsilon_by_the_papers_bounds(kind):
    """The least over all orders of the divergence, converted as in dp-accounting."""
    accounting = pytest.importorskip("dp_accounting.rdp", reason="needs dp-accounting")
    noise = noise_of(kind, levels=2, noise_multiplier=2.2, clients=9, size=6)
    l2_squared, l1 = noise.l2_squared, noise.l1
    total, steps = float(9 * noise.variance), 7
    assert total == pytest.approx((2.2 * 2) ** 2)
    tau = inflation(float(noise.variance), 9)
    orders = np.arange(1.1, 50, 0.02) if kind == "gaussian" else range(2, 200)

    def divergence(a):
        if kind == "skellam":
            first = ((2 * a - 1) * l2_squared + 6 * l1) / (4 * total**2)
            return a * l2_squared / (2 * total) + min(first, 3 * l1 / (2 * total))
        far = math.sqrt(l2_squared / total)
        return min(
            a * far**2 / 2 + tau * 6,
            a / 2 * (far**2 + 2 * tau * l1 / math.sqrt(total) + tau**2 * 6),
            a / 2 * (far + tau * math.sqrt(6)) ** 2,
        )

    expected, _ = accounting.compute_epsilon(orders, [steps * divergence(a) for a in orders], 1e-5)
    got = noise.epsilon(1e-5, steps)
    assert got == pytest.approx(expected, rel=2e-3)  # dp-accounting has other orders
    gaussian = epsilon_of_gaussian(math.sqrt(total / l2_squared), 1e-5, steps, accountant="rdp")
    assert got > gaussian


def test_the_three_bounds_of_the_distributed_discrete_gaussian():
    """With a client's sigma of 0.5, tau is 0.85 for two clients, and each term counts."""
    noise = noise_of(clients=2, levels=1, size=3, noise_multiplier=0.5**0.5)
    l2_squared, l1, total = noise.l2_squared, noise.l1, 2 * float(noise.variance)
    assert total == pytest.approx(0.5)
    tau = inflation(float(noise.variance), 2)
    assert tau == pytest.approx(0.84805, rel=1e-4)
    expected = [
        (l2_squared / total / 2, tau * 3),
        ((l2_squared / total + 2 * tau * l1 / math.sqrt(total) + tau**2 * 3) / 2, 0),
        ((math.sqrt(l2_squared / total) + tau * math.sqrt(3)) ** 2 / 2, 0),
    ]
    np.testing.assert_allclose(noise._lines(), expected)


def test_bits_hold_the_records_and_nine_deviations():
    noise = noise_of(levels=1000, noise_multiplier=3.0, size=50)
    for records, clients in ((0, 4), (0, 400), (100, 4), (10**6, 4)):
        deviation = math.sqrt(clients * noise.variance)
        least = records * math.sqrt(noise.l2_squared) + 9 * deviation
        most = records * math.sqrt(noise.l2_squared) + 11 * deviation
        half = 2 ** (noise.bits_for(records, clients) - 1)
        assert least < half <= 2 * most


@pytest.mark.parametrize("kind", KINDS)
def test_more_noise_more_clients_and_fewer_steps_are_less_epsilon(kind):
    pytest.importorskip("dp_accounting", reason="needs dp-accounting")
    epsilon = noise_of(kind).epsilon(1e-5, 10)
    assert noise_of(kind, noise_multiplier=3.0).epsilon(1e-5, 10) < epsilon
    assert noise_of(kind).epsilon(1e-5, 9) < epsilon
    assert noise_of(kind).epsilon(1e-4, 10) < epsilon
    assert noise_of(kind, levels=1000).epsilon(1e-5, 10) < epsilon  # rounding counts less
    # with levels enough, it is the continuous Gaussian's:
    fine = noise_of(kind, levels=20_000).epsilon(1e-5, 10)
    assert fine == pytest.approx(epsilon_of_gaussian(2.0, 1e-5, 10, accountant="rdp"), rel=0.01)


def test_the_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    for call in (lambda: noise_of().epsilon(1e-5), lambda: epsilon_of_gaussian(1.0, 1e-5)):
        with pytest.raises(BackendUnavailableError, match="pip install 'gpucoll\\[federated\\]'"):
            call()


# --- what a record adds ---------------------------------------------------------------------------


def rounded_rows(noise: DistributedNoise, rows: np.ndarray, seed: int = 0) -> np.ndarray:
    words = np.random.PCG64(seed).random_raw
    return noise._rounded(noise._clipped(rows), words)


@pytest.mark.parametrize("levels", [1, 3, 100, 10_000])
def test_no_rounded_vector_is_longer_than_its_bound(levels):
    noise = noise_of(levels=levels, noise_multiplier=3.0, clients=1)
    random = np.random.default_rng(levels)
    rows = random.normal(size=(3000, 50)) * random.lognormal(0, 3, size=(3000, 1))
    rows[0], rows[1, 1:] = 0, 0
    rows[2] = 1e300
    rows[3] = 1e-300
    rounded = rounded_rows(noise, rows)
    squares = (rounded**2).sum(axis=1)
    assert squares.max() <= noise.l2_squared
    assert np.abs(rounded).sum(axis=1).max() <= noise.l1
    assert not rounded[0].any()
    assert (rounded[1] != 0).sum() <= 1
    # Vectors at the bound before they are rounded come near to it.
    assert squares.max() > 0.5 * noise.l2_squared or levels == 1


def test_the_bound_by_its_formula():
    noise = noise_of(levels=100, size=64)
    assert noise.l2_squared == min((100 + 8) ** 2, math.floor(100**2 + 16 + 100 + 4))
    assert noise.l1 == 8 * math.sqrt(noise.l2_squared)
    small = noise_of(levels=1, size=64, noise_multiplier=9.0)
    assert small.l2_squared == math.floor(1 + 16 + 1 + 4)
    assert small.l1 == small.l2_squared  # the norm of integers is at most its square


def test_rounding_has_the_vector_as_mean():
    """Each element is off by less than 1, so by Hoeffding's inequality the mean of n by less than
    sqrt(log(2 / 1e-9) / (2 n)), except with a probability of 1e-9."""
    noise = noise_of(levels=1000, size=5)
    row = np.array([0.3, -0.1234, 0.77, 0.0, -1.1])
    count = 20_000
    rounded = rounded_rows(noise, np.tile(row, (count, 1)))
    off = rounded.mean(axis=0) - row / 1.5 * 1000
    assert np.abs(off).max() < math.sqrt(math.log(2e9 * 5) / (2 * count))
    assert np.abs(rounded - row / 1.5 * 1000).max() < 1
    whole = rounded_rows(noise, np.array([[0.003, -0.15, 0, 0, 1.5 * 0.9]]))
    assert whole.tolist() == [[2, -100, 0, 0, 900]]


def test_long_vectors_are_shortened_and_keep_their_direction():
    noise = noise_of(levels=2**24, noise_multiplier=1e-3, size=3)
    for factor in (1.0, 7.0, 1e200):
        row = np.array([2.0, -1.0, 2.0]) * factor
        (rounded,) = rounded_rows(noise, row[None])
        np.testing.assert_allclose(rounded / 2**24, [2 / 3, -1 / 3, 2 / 3], atol=2**-23)


# --- sums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [13, 16, 32, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_modulo_a_power_of_two_is_the_sum_and_noise(kind, bits):
    """Four clients of three records each; the noise is known, as its seed is."""
    noise = noise_of(kind, noise_multiplier=0.5, size=20)
    random = np.random.default_rng(1)
    rows = random.normal(size=(4, 3, 20)) / 20
    total = np.zeros(20, np.uint64)
    for client, of_client in enumerate(rows):
        words = noise.encode(of_client, bits, seed=client)
        assert words.dtype == f"u{max(2, 1 << (bits - 1).bit_length() >> 3)}"
        assert int(words.max()) < 1 << bits
        total = (total + words) & np.uint64((1 << bits) - 1)
    decoded = noise.decode(total, bits)
    error = decoded - rows.sum(axis=(0, 1))
    # 12 roundings, and noise of a standard deviation of 0.5 * 1.5 of which 7 is once in 10^12
    assert np.abs(error).max() < 12 * 1.5 / 100 + 7 * 0.5 * 1.5
    assert np.abs(error).max() > 0.1
    assert noise.bits_for(12, 4) <= 13


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_of_all_clients_has_the_deviation_that_was_asked_for(kind):
    """The mean of n squares deviates by more than 6.5 sqrt(2 / n) once in 10^10 times."""
    size, clients = 40_000, 5
    noise = noise_of(kind, size=size, clients=clients, levels=1000)
    nothing = np.empty((0, size))
    total = np.sum([noise.encode(nothing, 64, seed=client) for client in range(clients)], axis=0)
    decoded = noise.decode(total, 64)
    expected = (2.0 * 1.5) ** 2
    assert abs((decoded**2).mean() - expected) < 6.5 * expected * math.sqrt(2 / size)
    assert noise.variance == Fraction(2000) ** 2 / clients


def test_a_secure_sum_with_a_client_that_drops_out():
    """The sum has the vectors and the noise of those that stayed, and of no other."""
    pytest.importorskip("cryptography", reason="needs cryptography")
    noise = noise_of(clients=3, size=7)
    bits = noise.bits_for(records=8, clients=4)
    settings = SecureSum(clients=4, threshold=3, length=7, bits=bits)
    rows = np.random.default_rng(6).normal(size=(4, 2, 7))
    words = [noise.encode(of_client, bits, seed) for seed, of_client in enumerate(rows)]
    server, *_ = play(settings, words, stops=[9, 2, 9, 9])
    total = server.sum()

    assert server.included == {0, 2, 3}
    expected = np.sum([words[client].astype(np.int64) for client in (0, 2, 3)], axis=0)
    np.testing.assert_array_equal(total, expected % (1 << bits))
    signed = (expected + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
    np.testing.assert_array_equal(noise.decode(total, bits), signed * (1.5 / 100))


def test_one_record_less_changes_the_sum_by_its_rounded_vector():
    """The noise has the same seed, and so has the rounding of the records before it."""
    noise = noise_of(noise_multiplier=1.0)
    rows = np.random.default_rng(2).normal(size=(8, 50))
    sums = [noise.encode(rows[:count], 64, seed=3).view(np.int64) for count in (7, 8)]
    assert ((sums[1] - sums[0]) ** 2).sum() <= noise.l2_squared


def test_unseeded_noise_differs_and_one_vector_may_have_one_axis():
    noise = noise_of()
    row = np.ones(50, np.float32) / 50
    assert noise.encode(row).tobytes() != noise.encode(row).tobytes()
    same = noise.encode(row, seed=4), noise.encode(row[None], seed=4)
    assert same[0].tobytes() == same[1].tobytes()


def test_records_that_do_not_fit_into_a_chunk(monkeypatch):
    monkeypatch.setattr("gpucoll.federated.privacy._CHUNK_BYTES", 8 * 50 * 3)
    noise = noise_of(levels=1000, noise_multiplier=0.01)
    rows = np.zeros((10, 50))
    rows[:, 0] = 1.5
    assert abs(noise.decode(noise.encode(rows, seed=1))[0] - 15) < 0.1


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"kind": "laplace"}, ArgumentError, "kind must be one of gaussian, skellam"),
        ({"clip": 0}, ArgumentError, "clip must be above 0"),
        ({"clip": math.nan}, ArgumentError, "clip must be above 0"),
        ({"noise_multiplier": math.inf}, ArgumentError, "noise_multiplier must be above 0"),
        ({"clients": 2.0}, ArgumentTypeError, "clients must be an int; got 2.0"),
        ({"size": 0}, ArgumentError, "size must be above 0"),
        ({"levels": 1, "noise_multiplier": 0.9}, ArgumentError, "= 0.2025, which must be from 1/4"),
        ({"levels": 2**20}, ArgumentError, "which must be from 1/4 to 4294967296: choose other"),
    ],
)
def test_refused_settings(changes, error, text):
    with pytest.raises(error, match=text):
        noise_of(**changes)
    if "levels" in changes and changes["levels"] == 1:
        assert noise_of("skellam", **changes).variance == Fraction(0.9) ** 2 / 4


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda noise: noise.encode(np.ones(49)), r"shape \(records, 50\) or \(50,\); got \(49,\)"),
        (lambda noise: noise.encode(np.ones((1, 1, 50))), "x must have the shape"),
        (lambda noise: noise.encode(np.full(50, np.nan)), "x has NaN or infinite elements"),
        (lambda noise: noise.encode(np.full(50, np.inf)), "x has NaN or infinite elements"),
        (lambda noise: noise.encode(np.ones(50), bits=65), "bits must be above 7 and at most 64"),
    ],
)
def test_refused_vectors(call, text):
    with pytest.raises(ArgumentError, match=text):
        call(noise_of())


def test_refused_questions():
    pytest.importorskip("dp_accounting", reason="needs dp-accounting")
    for call, text in (
        (lambda: noise_of().epsilon(1.0), "delta must be below 1"),
        (lambda: noise_of().epsilon(0.0), "delta must be above 0"),
        (lambda: noise_of().epsilon(1e-5, 0), "steps must be above 0"),
        (lambda: epsilon_of_gaussian(0, 1e-5), "noise_multiplier must be above 0"),
        (lambda: epsilon_of_gaussian(1, 1e-5, sampling=1.5), "sampling must be above 0"),
        (lambda: epsilon_of_gaussian(1, 1e-5, accountant="gdp"), "must be pld or rdp"),
    ):
        with pytest.raises(ArgumentError, match=text):
            call()
