"""Where ticks and labels are, and how values read."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gpucoll.bench.pictures.scales import (
    rate_text,
    size_label,
    size_ticks,
    spread,
    time_label,
    value_ticks,
)


@pytest.mark.parametrize(
    ("time_us", "text"),
    [(0.38, "380 ns"), (0.999, "1000 ns"), (1.0, "1 µs"), (6593.9, "6.6 ms"), (2.5e6, "2.5 s")],
)
def test_times(time_us, text):
    assert time_label(time_us) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(3210.0, "3.2 TB/s"), (12.34, "12 GB/s"), (0.5, "500 MB/s"), (1e-6, "1 kB/s"),
     (2e-8, "20 B/s")],
)  # fmt: skip
def test_bandwidths(rate, text):
    assert rate_text(rate) == text


def test_sizes():
    assert [size_label(size) for size in (4, 1500, 64 << 10)] == ["4 B", "1500 B", "64 KiB"]


@pytest.mark.parametrize(
    ("sizes", "most", "ticks"),
    [
        ([4, 64, 1024], 9, [4, 8, 16, 32, 64, 128, 256, 512, 1024]),
        ([4, 64, 1024], 3, [4, 64, 1024]),
        ([4, 1 << 26], 7, [4 << 4 * n for n in range(7)]),
        ([100, 300], 5, [100, 200]),
        ([4, 1024], 1, [4]),
        ([7], 5, [7]),
    ],
)
def test_ticks_of_sizes(sizes, most, ticks):
    assert size_ticks(sizes, most) == ticks


@pytest.mark.parametrize(
    ("least", "most", "number", "ticks"),
    [
        (0.3, 2000.0, 9, [1, 10, 100, 1000]),
        (0.3, 2000.0, 2, [1, 100]),
        (2.0, 40.0, 9, [3, 10, 30]),
        (11.0, 19.0, 9, [12, 15]),
        (1.01, 1.02, 9, [1.01, 1.02]),
    ],
)
def test_ticks_of_values(least, most, number, ticks):
    assert value_ticks(least, most, number) == pytest.approx(ticks)


@pytest.mark.parametrize("wanted", [[10.0, 12.0, 13.0, 100.0], [10.0, 50.0, 100.0], [7.0] * 5])
def test_labels_keep_apart(wanted):
    placed = spread(wanted, 18.0)
    assert all(b - a >= 18.0 - 1e-9 for a, b in pairwise(placed))
    assert sum(placed) == pytest.approx(sum(wanted))


def test_a_label_with_room_stays():
    assert spread([10.0, 12.0, 100.0], 18.0) == [2.0, 20.0, 100.0]
