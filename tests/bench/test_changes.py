"""Which changes between two runs are found, on samples whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from gpucoll.bench.changes import Pair, Run, changes, discoveries, spread


def samples(generator, rounds, noise="normal", shift=0.0):
    """Return samples of two ranks: about 1 us, with noise of about 3 % or as it comes."""
    logs = generator.normal(0, 0.03, rounds)
    if noise == "outliers":
        logs += np.where(generator.random(rounds) < 0.15, generator.exponential(0.5, rounds), 0)
    if noise == "two states":
        logs += np.where(generator.random(rounds) < 0.5, 0.4, 0)
    return np.exp(np.stack([logs, logs - 0.001]) + shift)


def pairs(generator, count, rounds=7, noise="normal", between=0.0, drift=0.0, slower=()):
    """Return calls in two runs that differ by `drift`, and each by `between` more."""
    found = []
    for number in range(count):
        shift = drift + between * generator.normal() + np.log(1.2) * (number in slower)
        runs = [samples(generator, rounds, noise, one) for one in (0.0, shift)]
        found.append(Pair(*map(Run, runs)))
    return found


def slower_of(found):
    return [number for number, one in enumerate(found) if one.verdict > 0]


@pytest.mark.parametrize("slower", [(), (7,), range(10), range(30)])
def test_what_became_slower_is_found_and_nothing_else(slower):
    generator = np.random.default_rng(3)

    found = changes(pairs(generator, 30, slower=slower), threshold=0.05)

    assert slower_of(found) == list(slower)
    assert not any(one.verdict < 0 for one in found)
    assert all(one.ratio.low < one.ratio.value < one.ratio.high for one in found)


def test_faster_is_slower_the_other_way_round():
    generator = np.random.default_rng(4)
    mirrored = [Pair(one.new, one.base) for one in pairs(generator, 10, slower=(2,))]

    assert [one.verdict for one in changes(mirrored, threshold=0.05)] == [0, 0, -1] + [0] * 7


def test_single_calls_and_single_rounds():
    generator = np.random.default_rng(5)

    assert slower_of(changes(pairs(generator, 1, slower=(0,)), threshold=0.05)) == [0]
    assert slower_of(changes(pairs(generator, 9, rounds=1, slower=(0,)))) == []
    assert changes([]) == []


def test_controls_show_how_runs_differ():
    """Without them, differences between runs look like changes."""
    generator = np.random.default_rng(6)
    calls, controls = (pairs(generator, 20, between=0.1, drift=0.2) for _ in range(2))

    assert slower_of(changes(calls, threshold=0.05))
    assert slower_of(changes(calls, controls, threshold=0.05)) == []
    assert spread(controls[:7]) is None
    assert 0.1 < (spread(controls) or 0) < 0.4
    assert (spread(pairs(generator, 20)) or 0) < 0.02


def test_relative_to_what_shares_the_drift():
    generator = np.random.default_rng(7)

    def relative(slower=()):
        found = []
        for own, peer in zip(
            pairs(generator, 20, drift=0.5, slower=slower),
            pairs(generator, 20, drift=0.5),
            strict=True,
        ):
            runs = [
                Run(one.own, (other.own, 9 * other.own))
                for one, other in ((own.base, peer.base), (own.new, peer.new))
            ]
            found.append(Pair(*runs))
        return found

    found = changes(relative((3,)), relative(), threshold=0.05)

    assert slower_of(found) == [3]
    assert found[3].ratio.value == pytest.approx(1.2, abs=0.06)


def test_discoveries_are_those_of_benjamini_and_hochberg():
    values = np.array([0.039, 0.01, 0.2, 0.001, 0.04])

    assert discoveries(values).tolist() == [True, True, False, True, True]
    assert discoveries(np.array([0.06, 0.011, 0.9, 0.02])).tolist() == [False, True, False, True]
    assert discoveries(np.array([])).tolist() == []


@pytest.mark.soak
@pytest.mark.parametrize("rounds", [3, 7, 9])
@pytest.mark.parametrize("noise", ["normal", "outliers", "two states"])
@pytest.mark.parametrize(("between", "controls"), [(0.0, 0), (0.1, 12), (0.1, 60)])
def test_equal_runs_are_seldom_found_to_differ(rounds, noise, between, controls):
    """At most 5 % of comparisons; 60 of them have more than 8 by chance once in 500."""
    generator = np.random.default_rng(rounds + controls)
    alarms = inside = 0
    for _ in range(60):
        others = pairs(generator, controls, rounds, noise, between)
        found = changes(pairs(generator, 30, rounds, noise, between), others)
        alarms += bool(slower_of(found))
        inside += sum(one.ratio.low <= 1 <= one.ratio.high for one in found)

    assert alarms <= 8
    # a median of 3 rounds has no interval of 95 %
    assert inside / (60 * 30) > (0.93 if rounds > 3 else 0.75)
