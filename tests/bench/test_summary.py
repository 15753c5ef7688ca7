from __future__ import annotations

import numpy as np

from gpucoll.bench.results import Measurement, Results, Row
from gpucoll.bench.summary import summaries


def row(library, size_bytes, out_of_place_us, in_place_us, placement="private", **more):
    out_of_place, in_place = (
        None if time_us is None else Measurement(np.broadcast_to(time_us, (1, 9)), 10, 0)
        for time_us in (out_of_place_us, in_place_us)
    )
    where = (library, placement, "scan", 2, size_bytes, size_bytes // 4, "float32", "sum", -1)
    return Row(*where, out_of_place, in_place, **more)


def found(rows):
    return [str(one) for one in summaries(Results({}, rows).as_json()["results"])]


def test_the_median_over_sizes_and_where_a_peer_wins():
    rows = [
        row("gpucoll", 4, 1.0, 1.0), row("mpich", 4, 2.0, None), row("impi", 4, 4.0, None),
        row("gpucoll", 1024, 2.4, 1.0), row("mpich", 1024, 9.0, None), row("impi", 1024, 2.0, None),
        row("gpucoll", 1 << 20, 8.0, 1.0), row("mpich", 1 << 20, 10.0, None),
    ]  # fmt: skip
    assert found(rows) == [
        "scan float32 sum, out of place: gpucoll / best 0.80 (median of 3 sizes); above 1.0: "
        "1 Ki: 1.20 [1.20, 1.20] impi"
    ]


def test_an_interval_that_reaches_below_one_is_no_loss():
    noisy = np.array([[0.9, 1.1, 1.2, 0.8, 1.1, 0.9, 1.2, 1.1, 0.9]])
    own, peer = row("gpucoll", 4, noisy, None), row("mpich", 4, np.ones((1, 9)), None)
    (text,) = found([own, peer])
    assert "gpucoll / best 1.10" in text
    assert text.endswith("above 1.0: none")


def test_each_of_gpucolls_calls_has_its_own():
    rows = [
        row("gpucoll", 4, 1.0, 2.0),
        row("gpucoll", 4, 0.5, 1.0, "symmetric"),
        row("gpucoll-plan", 4, 0.8, 1.6),
        row("mpich", 4, 2.0, 2.0),
    ]
    beginnings = [text.partition(" (")[0] for text in found(rows)]
    assert beginnings == [
        "scan float32 sum, out of place: gpucoll / best 0.50",
        "scan float32 sum, out of place: gpucoll symmetric / best 0.25",
        "scan float32 sum, out of place: gpucoll-plan / best 0.40",
        "scan float32 sum, in place: gpucoll / best 1.00",
        "scan float32 sum, in place: gpucoll symmetric / best 0.50",
        "scan float32 sum, in place: gpucoll-plan / best 0.80",
    ]


def test_lists_are_a_call_of_their_own():
    rows = [
        row("gpucoll", 4, 1.0, None), row("mpich", 4, 2.0, None),
        row("gpucoll-list", 4, 3.0, None, list_length=5),
        row("mpich", 4, 10.0, None, list_length=5),
    ]  # fmt: skip
    assert [text.partition(" (")[0] for text in found(rows)] == [
        "scan float32 sum, out of place: gpucoll / best 0.50",
        "scan float32 sum, list of 5, out of place: gpucoll-list / best 0.30",
    ]


def test_without_peers_there_is_nothing_to_say():
    assert found([row("gpucoll", 4, 1.0, 1.0)]) == []
