"""The estimate of the remaining time, on runs whose times are known."""

from __future__ import annotations

import pytest

from gpucoll.bench.time_left import Bounds, Done, Step, TimeLeft, text_of

ROUNDS, SAMPLE_S = 9, 0.015


def sampling(call_s):
    return ROUNDS * max(SAMPLE_S, 3 * call_s)


def done(size, libraries, checking=lambda size: 0.05 + 2e-9 * size):
    """Return a step of libraries, each with the latency and the bytes per second of its calls."""
    calls_s = [latency_s + size / speed for latency_s, speed in libraries]
    preparing_s = len(libraries) * checking(size)
    seconds = preparing_s + sum(map(sampling, calls_s)) + 0.01
    return Done(Step("call", size), seconds, preparing_s, calls_s)


OWN = [(0.3e-6, 5e9), (0.3e-6, 6e9)]
SLOW = [*OWN, (20e-6, 3e8), (2e-6, 2e9)]
JUMPING = [(1e-4, 1e7)]


@pytest.mark.parametrize("libraries", [OWN, SLOW, JUMPING])
@pytest.mark.parametrize("last", [64 << 10, 64 << 20, 1 << 30])
@pytest.mark.parametrize("factor", [2, 4, 16])
def test_what_is_shown_is_not_far_from_the_truth(libraries, last, factor):
    sizes = [4]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    run = [done(size, libraries) for size in sizes]
    time_left, shown = TimeLeft(sampling), []
    for number, one in enumerate(run[:-1]):
        time_left.add(one)
        estimate = time_left.of_steps([later.step for later in run[number + 1 :]]).estimate()
        if estimate is not None:
            actual = sum(later.seconds for later in run[number + 1 :])
            shown.append(estimate / actual)
    assert all(0.5 < ratio < 2 for ratio in shown)
    assert shown, "there is never a basis"


def test_nothing_is_said_without_a_basis():
    def estimate(*steps):
        return time_left.of_steps(steps).estimate()

    time_left = TimeLeft(sampling)
    assert estimate(Step("call", 4)) is None
    time_left.add(done(4, SLOW))
    assert estimate(Step("call", 4)) is not None
    assert estimate(Step("startup", 0)) is None
    assert estimate(Step("call", 4), Step("startup", 0)) is None
    assert estimate(Step("call", 1 << 30)) is None  # it may grow, or not
    assert estimate() == 0


def test_a_further_collective_takes_as_long_as_the_one_before():
    run = [done(size, OWN) for size in (4, 1 << 10, 1 << 20, 1 << 26)]
    time_left = TimeLeft(sampling)
    for one in run:
        time_left.add(one)
    bounds = time_left.of_steps([one.step for one in run])
    assert bounds.low == bounds.high == pytest.approx(sum(one.seconds for one in run))


def test_a_library_that_was_given_up_no_longer_counts():
    time_left = TimeLeft(sampling)
    time_left.add(done(1 << 10, SLOW))
    time_left.add(done(1 << 12, OWN))
    assert time_left.of_step(Step("call", 1 << 14)).estimate() is not None


def test_a_part_of_the_samples_that_ends_at_some_size():
    time_left = TimeLeft(lambda call_s: 100.0 if call_s < 0.01 else 0.0)
    for size, call_s in ((1 << 18, 0.002), (1 << 20, 0.008)):
        time_left.add(Done(Step("call", size), 50.0, 0.0, [call_s]))
    assert time_left.of_step(Step("call", 1 << 22)) == (0, 0)


def test_bounds_that_are_far_apart_are_no_estimate():
    assert Bounds(2.0, 4.0).estimate() == pytest.approx(8**0.5)
    assert Bounds(2.0, 4.1).estimate() is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "less than 10 s left"),
        (12, "about 10 s left"),
        (57, "about 55 s left"),
        (59, "about 1 min left"),
        (170, "about 3 min left"),
        (5399, "about 90 min left"),
        (7000, "about 1.9 h left"),
    ],
)
def test_texts(seconds, text):
    assert text_of(seconds) == text
