"""Fits find the parameters that made the times; intervals contain them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.bench.predict.made_cases import (
    BYTE_S,
    LARGE_S,
    MEMORY,
    MESSAGE_S,
    between_hosts,
    on_one_host,
)

from gpucoll.bench.predict.fitting import fit_memory, fit_network, wider
from gpucoll.errors import ArgumentError


def test_without_noise_the_network_is_found():
    fit = fit_network(between_hosts(sizes=(4, 1 << 10, 1 << 16, 1 << 20, 1 << 24)))
    assert fit.value("message_s") == pytest.approx(MESSAGE_S, rel=1e-3)
    assert fit.value("seconds_per_byte") == pytest.approx(BYTE_S, rel=1e-3)
    assert fit.value("large_s") == pytest.approx(LARGE_S, rel=0.05)
    assert dict(zip(fit.names, fit.is_measured, strict=True))["overhead_s"] is False


def test_a_network_far_from_the_first_guess_is_found():
    seen = [one._replace(samples_us=one.samples_us * 100) for one in between_hosts()]
    fit = fit_network(seen, draws=0)
    assert fit.value("message_s") == pytest.approx(100 * MESSAGE_S, rel=0.01)
    assert fit.value("seconds_per_byte") == pytest.approx(100 * BYTE_S, rel=0.01)


def test_without_noise_the_memory_is_found():
    fit, memory = fit_memory(on_one_host(sizes=tuple(2**step for step in range(2, 27))))
    for name in fit.names:
        assert fit.value(name) == pytest.approx(getattr(MEMORY, name), rel=1e-3)
    assert memory.cached_bytes == pytest.approx(MEMORY.cached_bytes, rel=0.5)
    assert all(fit.is_measured)


def test_a_single_bad_measurement_decides_nothing():
    seen = between_hosts()
    seen[3] = seen[3]._replace(samples_us=seen[3].samples_us * 5)
    fit = fit_network(seen)
    assert fit.value("message_s") == pytest.approx(MESSAGE_S, rel=0.05)
    assert fit.value("seconds_per_byte") == pytest.approx(BYTE_S, rel=0.05)


def coverage(seeds):
    found = []
    for seed in seeds:
        fit = fit_network(between_hosts(noise=0.05, seed=seed))
        for name, true in (("message_s", MESSAGE_S), ("seconds_per_byte", BYTE_S)):
            low, high = fit.interval(name)
            found.append(low <= true <= high)
    return sum(found), len(found)


@pytest.mark.soak
def test_intervals_contain_the_parameters():
    """If 95 of 100 intervals do, fewer than 90 of 100 do with a probability of 1.2 % (binomial).

    The seeds are fixed, so the test passes or fails the same way every time.
    """
    right, of = coverage(range(50))
    assert right >= 0.9 * of


def test_few_values_make_intervals_wider():
    """Student's quantiles from a table, over that of the normal distribution."""
    for count, quantile in ((5, 2.776), (9, 2.306), (30, 2.045), (1000, 1.962)):
        wanted = quantile / 1.959964 * math.sqrt(count / (count - 1))
        assert wider(count) == pytest.approx(wanted, rel=0.02)
    assert wider(1) == math.inf


@pytest.mark.parametrize("fit", [fit_network, fit_memory])
def test_one_size_is_not_enough(fit):
    with pytest.raises(ArgumentError, match="at least 2 sizes; got 1"):
        fit(between_hosts(sizes=(4,)) if fit is fit_network else on_one_host(sizes=(4,)))


def test_the_same_measurements_give_the_same_fit():
    seen = between_hosts(noise=0.05, sizes=(4, 1 << 10, 1 << 20))
    assert np.array_equal(fit_network(seen).values, fit_network(seen).values)
