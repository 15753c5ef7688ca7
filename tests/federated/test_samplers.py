"""Samplers of integer noise: their tables are right, each drawn bit counts, and so do the sums.

A chi-square statistic with n degrees of freedom exceeds `limit_of(n)` with a probability of 1e-9 if
the sampler is right. Seeds are fixed, so that a test passes or fails the same way every time.
"""

from __future__ import annotations

import bisect
import itertools
import random
import secrets
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from gpucoll import ArgumentError, ArgumentTypeError, GpucollError
from gpucoll.federated import samplers
from gpucoll.federated.samplers import Table, discrete_gaussian, skellam

PARAMETERS = [
    ("gaussian", Fraction(1, 1024)),
    ("gaussian", Fraction(1, 7)),
    ("gaussian", Fraction(9, 4)),
    ("gaussian", Fraction(0.1)),
    ("gaussian", Fraction(400)),
    ("poisson", Fraction(1, 2048)),
    ("poisson", Fraction(3, 2)),
    ("poisson", Fraction(4)),
    ("poisson", Fraction(1000, 3)),
]


def probabilities(kind: str, parameter: Fraction) -> dict[int, Decimal]:
    """Return the probabilities to 150 digits, by their formulas, as far as they exceed 1e-140."""
    with localcontext() as context:
        context.prec = 150
        exact = Decimal(parameter.numerator) / Decimal(parameter.denominator)
        found = {}
        if kind == "gaussian":
            for k in itertools.count():
                weight = (-Decimal(k * k) / (2 * exact)).exp()
                if weight < Decimal(10) ** -140:
                    break
                found[k] = found[-k] = weight
            total = sum(found.values())
            return {k: found[k] / total for k in sorted(found)}
        weight = (-exact).exp()
        for k in itertools.count():
            found[k] = weight
            weight = weight * exact / (k + 1)
            if k > exact and weight < Decimal(10) ** -140:
                return found
    raise AssertionError


def distribution(kind: str, parameter: Fraction) -> tuple[list[int], list[Fraction]]:
    """Return integers k and the probabilities of at most k."""
    found = probabilities(kind, parameter)
    return list(found), list(itertools.accumulate(map(Fraction, found.values())))


@pytest.mark.parametrize("bits", [4, 64, 128, 192])
@pytest.mark.parametrize(("kind", "parameter"), PARAMETERS)
def test_the_bounds_enclose_the_distribution_function(kind, parameter, bits):
    """The error of the 150 digits is below 1e-140, and 2^192 is 6e57."""
    keys, expected = distribution(kind, parameter)
    first, lower, upper = samplers._bounds(kind, parameter, bits)
    slack = Fraction(1, 10**60)
    for k, (low, high) in enumerate(zip(lower, upper, strict=True), first):
        place = bisect.bisect_right(keys, k)
        value = (expected[place - 1] if place else Fraction(0)) * 2**bits
        assert low <= value + slack, k
        assert value - slack <= high, k
        assert high - low <= 1, k
    assert lower == sorted(lower)
    assert lower[0] == 0
    assert lower[-1] == 2**bits - 1


def words_from(left: list[int]) -> samplers.Words:
    """Return a source of the four-bit words of a list, from its end."""
    return lambda count: np.array([left.pop() << 60], np.uint64)


@pytest.mark.parametrize(("kind", "parameter"), PARAMETERS[1:4] + PARAMETERS[5:8])
def test_every_number_of_twelve_bits_gets_the_integer_of_its_place(kind, parameter):
    """Words of four bits rarely decide, so that the table is refined for almost all numbers."""
    keys, expected = distribution(kind, parameter)
    table, decided = Table(kind, parameter, 4), 0
    for uniform in range(1 << 12):
        left = [uniform & 15, uniform >> 4 & 15, uniform >> 8]
        try:
            (got,) = table.draw(1, words_from(left))
        except IndexError:  # F(k) of some k is among the numbers that begin like this one
            continue
        decided += 1
        used = 12 - 4 * len(left)
        least = Fraction(uniform >> (12 - used), 1 << used)
        place = keys.index(got)
        assert (expected[place - 1] if place else 0) <= least
        assert least + Fraction(1, 1 << used) <= expected[place] + Fraction(1, 10**60)
    assert (1 << 12) - 40 < decided < 1 << 12


def limit_of(freedom: int) -> float:
    stats = pytest.importorskip("scipy.stats", reason="needs SciPy's chi-square distribution")
    return float(stats.chi2.isf(1e-9, freedom))


def assert_fits(drawn: np.ndarray, expected: dict[int, float]) -> None:
    """Compare counts with probabilities; integers that are expected fewer than 10 times are one."""
    frequent = [k for k, value in expected.items() if value * len(drawn) >= 10]
    counts = np.array([np.count_nonzero(drawn == k) for k in frequent])
    means = np.array([expected[k] * len(drawn) for k in frequent])
    counts = np.append(counts, len(drawn) - counts.sum())
    means = np.append(means, max(len(drawn) - means.sum(), 1e-9))
    if means[-1] < 10:  # a chi-square statistic needs larger ones; too many there is an error
        assert counts[-1] < 60
        counts, means = counts[:-1], means[:-1]
    statistic = float(np.sum((counts - means) ** 2 / means))
    assert statistic < limit_of(max(len(means) - 1, 1)), (statistic, len(means))


def floats(kind: str, parameter: Fraction) -> dict[int, float]:
    return {k: float(value) for k, value in probabilities(kind, parameter).items()}


def skellam_probabilities(variance: Fraction) -> dict[int, float]:
    one = floats("poisson", variance / 2)
    values = np.array([*one.values()])
    together = np.convolve(values, values[::-1])
    return {k - len(one) + 1: float(value) for k, value in enumerate(together)}


VARIANCES = [Fraction(1, 4), Fraction(1), Fraction(20, 3), Fraction(250)]


@pytest.mark.parametrize("word_bits", [8, 64])
@pytest.mark.parametrize("variance", VARIANCES)
def test_discrete_gaussian_numbers(variance, word_bits):
    words = samplers.words_of(int(variance * 12))
    count = 4000 if word_bits == 8 else 300_000
    assert_fits(
        Table("gaussian", variance, word_bits).draw(count, words), floats("gaussian", variance)
    )


@pytest.mark.parametrize("variance", VARIANCES)
def test_skellam_numbers(variance):
    assert_fits(skellam(variance, 300_000, seed=7), skellam_probabilities(variance))


@pytest.mark.soak
@pytest.mark.parametrize("draw", [discrete_gaussian, skellam])
@pytest.mark.parametrize("variance", VARIANCES)
def test_ten_million_numbers_of_the_operating_system(draw, variance):
    expected = (
        floats("gaussian", variance)
        if draw is discrete_gaussian
        else skellam_probabilities(variance)
    )
    assert_fits(draw(variance, 10**7), expected)


@pytest.mark.parametrize("draw", [discrete_gaussian, skellam])
@pytest.mark.parametrize("deviation", [3, 50, 3000])
def test_mean_and_variance(draw, deviation):
    """From sigma = 3 on, both distributions have almost the moments of a Gaussian.

    The mean of n numbers deviates by more than 6.2 sigma / sqrt(n), and the mean of their squares
    by more than 6.2 sigma^2 sqrt(2 / n), with a probability of 1e-9 (skellam's fourth moment is
    larger by sigma^2: 5 % of the square's variance for sigma = 3).
    """
    count = 200_000
    drawn = draw(deviation**2, count, seed=deviation).astype(float)
    assert abs(drawn.mean()) < 6.2 * deviation / count**0.5
    assert abs((drawn**2).mean() - deviation**2) < 6.5 * deviation**2 * (2 / count) ** 0.5


def test_the_sum_of_skellam_numbers_is_one():
    parts = [skellam(Fraction(5, 4), 200_000, seed=seed) for seed in range(4)]
    assert_fits(np.sum(parts, axis=0), skellam_probabilities(Fraction(5)))


def one_by_canonne_kamath_steinke(variance: Fraction, source: random.Random) -> int:
    """Return a discrete Gaussian by algorithms 1 to 3 of arXiv:2004.00010, on rationals."""

    def bernoulli(p: Fraction) -> bool:
        return source.randrange(p.denominator) < p.numerator

    def bernoulli_exp(x: Fraction) -> bool:
        while x > 1:
            if not bernoulli_exp(Fraction(1)):
                return False
            x -= 1
        turn = 1
        while bernoulli(x / turn):
            turn += 1
        return turn % 2 == 1

    scale = int(float(variance) ** 0.5) + 1
    while True:
        uniform = source.randrange(scale)
        if not bernoulli_exp(Fraction(uniform, scale)):
            continue
        times = 0
        while bernoulli_exp(Fraction(1)):
            times += 1
        value, is_negative = uniform + scale * times, source.random() < 0.5
        if is_negative and value == 0:
            continue
        if bernoulli_exp((value - variance / scale) ** 2 / (2 * variance)):
            return -value if is_negative else value


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("variance", [Fraction(7, 3), Fraction(1, 2), Fraction(36)])
def test_the_sampler_of_canonne_kamath_and_steinke_has_the_same_distribution(variance):
    source = random.Random(1)
    drawn = np.array([one_by_canonne_kamath_steinke(variance, source) for _ in range(8000)])
    other = discrete_gaussian(variance, 8000, seed=5)
    counts = [
        (np.count_nonzero(drawn == k), np.count_nonzero(other == k))
        for k in range(-40, 41)
        if np.count_nonzero(drawn == k) + np.count_nonzero(other == k) >= 20
    ]
    statistic = sum((x - y) ** 2 / (x + y) for x, y in counts)
    assert statistic < limit_of(len(counts))
    assert_fits(drawn, floats("gaussian", variance))


def test_random_bits_are_the_operating_systems_unless_there_is_a_seed(monkeypatch):
    asked = []

    def token_bytes(count):
        asked.append(count)
        return np.random.default_rng(count).bytes(count)

    monkeypatch.setattr(secrets, "token_bytes", token_bytes)
    discrete_gaussian(9, 1000, seed=3)
    skellam(9, 1000, seed=3)
    assert asked == []
    discrete_gaussian(9, 1000)
    skellam(9, 1000)
    assert asked == [8000, 8000, 8000]


@pytest.mark.parametrize("byte", [b"\0", b"\xff"])
def test_a_source_of_equal_bits_is_an_error(monkeypatch, byte):
    monkeypatch.setattr(secrets, "token_bytes", lambda count: byte * count)
    with pytest.raises(GpucollError, match="the source of random bits is broken"):
        discrete_gaussian(9, 10)


def test_seeds_and_counts():
    assert discrete_gaussian(4, 0).shape == (0,)
    one, same, other = (discrete_gaussian(4, 70_000, seed=seed) for seed in (1, 1, 2))
    assert one.tobytes() == same.tobytes() != other.tobytes()
    assert one.dtype == np.int64
    assert discrete_gaussian(0.25, 100).tobytes() != discrete_gaussian(0.25, 100).tobytes()


@pytest.mark.parametrize(
    ("variance", "count", "error", "text"),
    [
        (0, 1, ArgumentError, "variance must be from 1/1024 to 4294967296; got 0"),
        (2**33, 1, ArgumentError, "got 8589934592"),
        (float("nan"), 1, ArgumentError, "got nan"),
        ("1", 1, ArgumentTypeError, "must be an int, float or Fraction"),
        (1, -1, ArgumentError, "count must be at least 0"),
    ],
)
def test_refused(variance, count, error, text):
    for draw in (discrete_gaussian, skellam):
        with pytest.raises(error, match=text):
            draw(variance, count)
