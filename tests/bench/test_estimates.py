from __future__ import annotations

import numpy as np

from gpucoll.bench.estimates import ratio, time_us


def test_the_time_is_the_slowest_ranks_median():
    samples = np.array([[1.0, 2.0, 90.0], [3.0, 4.0, 5.0]])
    assert time_us(samples) == 4.0


def test_the_ratio_is_to_the_best():
    own, slow, quick = (np.full((2, 9), value) for value in (3.0, 12.0, 6.0))
    assert ratio(own, [slow, quick]) == (0.5, 0.5, 0.5)
    assert str(ratio(own, [slow])) == "0.25 [0.25, 0.25]"


def test_the_interval_covers_the_rounds_and_repeats_itself():
    random = np.random.default_rng(7)
    own = 10 + random.random((2, 9))
    other = 20 + random.random((2, 9))
    found = ratio(own, [other])
    assert found.low < found.value < found.high
    assert found.low > 0.45
    assert found.high < 0.56
    assert ratio(own, [other]) == found


def test_what_disturbs_everyone_alike_is_not_counted():
    state = np.array([[1.0, 1.3, 0.8, 2.0, 1.1, 0.9, 1.6]])
    found = ratio(5 * state, [10 * state])
    assert found.value == found.low == found.high == 0.5
