"""Predictions: their intervals and shares, and how held-out cases are compared."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.bench.predict.made_cases import MEMORY, between_hosts, machine, on_one_host

from gpucoll.bench.predict.composition import Case, all_reduce_s
from gpucoll.bench.predict.prediction import learn, predict
from gpucoll.bench.predict.tuning import best_limits, gain
from gpucoll.bench.predict.validation import (
    held_out_ranks,
    held_out_sizes,
    interval,
    mean_error,
    scaled_s,
)

SOME = (4, 1 << 10, 1 << 16, 1 << 20, 1 << 24)


@pytest.mark.soak
def test_many_ranks_are_predicted_from_few():
    known = learn(between_hosts(noise=0.02, sizes=SOME))
    for ranks in (16, 48):
        case = Case(1 << 20, ranks, ranks)
        predicted = predict(case, known)
        true = float(all_reduce_s(case, machine()))
        assert predicted.time_s == pytest.approx(true, rel=0.05)


@pytest.mark.soak
def test_both_levels_are_used_together():
    known = learn([*between_hosts(sizes=SOME), *on_one_host(sizes=SOME)])
    case = Case(1 << 20, 64, 8)
    found = predict(case, known)
    assert found.time_s == pytest.approx(float(all_reduce_s(case, machine(MEMORY))), rel=0.05)
    assert found.shares["shared memory"] > 0.001


def test_shares_add_up_and_name_what_dominates():
    known = learn(on_one_host(sizes=SOME), link=(25e-6, 125e6))
    for size, ranks, hosts, dominant in (
        (4, 64, 64, "latency"),
        (1 << 20, 64, 64, "bandwidth"),
        (1 << 20, 2, 1, "shared memory"),
    ):
        found = predict(Case(size, ranks, hosts), known)
        assert sum(found.shares.values()) == pytest.approx(1, abs=1e-4)
        assert found.dominated_by == dominant


def test_a_network_that_was_given_has_no_interval_and_goes_before_measured_ones():
    known = learn(between_hosts(sizes=SOME), link=(1e-3, 1e6))
    found = predict(Case(1 << 20, 4, 4), known)
    assert found.low_s == found.time_s == found.high_s
    assert found.time_s > 1
    assert known.source == "given"
    assert learn(on_one_host(sizes=SOME)).source == "assumed"


@pytest.mark.soak
def test_held_out_cases_of_the_model_itself_have_no_error():
    seen = between_hosts(ranks=(2, 3, 4, 6, 12), sizes=SOME)
    ranks = held_out_ranks(seen)
    assert {case.ranks for case in ranks.cases} == {6, 12}
    assert ranks.error < 0.02
    assert ranks.error < ranks.scaled_error
    assert ranks.coverage == 1.0
    sizes = held_out_sizes(between_hosts())
    assert sizes.error < 0.05


def test_nothing_can_be_held_out_of_few_cases():
    seen = between_hosts(ranks=(2, 3), sizes=(4, 1 << 20))
    for found in (held_out_ranks(seen), held_out_sizes(seen)):
        assert len(found.cases) == 0
        assert math.isnan(found.error)


def test_errors_are_factors():
    assert mean_error([math.log(1.1), -math.log(1.1)]) == pytest.approx(0.1)


def test_an_interval_contains_its_estimate_and_grows_with_the_spread():
    times = np.array([2.0, *np.linspace(1.9, 2.1, 101)])
    narrow, wide = interval(times, 0.0), interval(times, 0.2)
    assert wide[0] < narrow[0] < 2 < narrow[1] < wide[1]
    assert interval(np.array([2.0]), 0.5) == (2.0, 2.0)


def test_the_nearest_case_is_scaled_by_its_bus_bandwidth():
    seen = between_hosts(ranks=(2, 4), sizes=(1 << 10, 1 << 20))
    nearest = next(one for one in seen if one.case == Case(1 << 20, 4, 4))
    wanted = nearest.time_s * 2 * (7 / 8) / (3 / 4)
    assert scaled_s(seen, Case(2 << 20, 8, 8)) == pytest.approx(wanted)


def test_limits_are_where_the_times_cross():
    times = {
        size: {"recursive_doubling": size + 1.0, "halving_doubling": size / 2 + 4.0, "ring": 40.0}
        for size in (1, 4, 16, 64, 256)
    }
    limits = best_limits(times)
    assert list(limits) == [4, 64]
    assert gain(times, dict.fromkeys(times, "ring"), limits) > 1
    chosen = {1: "recursive_doubling", 4: "recursive_doubling", 16: "halving_doubling"}
    assert gain(times, {**chosen, 64: "halving_doubling", 256: "ring"}, limits) == 0
