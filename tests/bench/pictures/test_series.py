"""What pictures show of results, and that they can tell what they were drawn from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gpucoll.bench.estimates import Ratio
from gpucoll.bench.pictures import (
    Bar,
    NothingToDrawError,
    bar_of,
    calls_of,
    digest_of,
    fullest_side,
    headline,
    heat_map,
    lines,
    why_not,
)
from gpucoll.bench.pictures.heat_map import INKS, colour_of, ratios_of
from gpucoll.bench.pictures.theme import THEMES, contrast

CALL = "all_reduce float32 sum"


def test_series_of_a_call(make):
    row, content = make
    rows = [
        row("mpich", 64, 8.0),
        row("gpucoll", 64, 4.0),
        row("gpucoll", 4, 2.0),
        row("gpucoll", 4, 1.0, placement="symmetric"),
        row("gpucoll", 4, 9.0, placement="work"),
    ]
    limits = (row("limit", 64, 1.0), row("limit", 1 << 20, 50.0))
    call = calls_of(content(*rows, limits=limits))[CALL]

    found = call.series("out_of_place", "time")

    assert [(one.label, one.kind) for one in found] == [
        ("gpucoll", "own"),
        ("gpucoll symmetric", "own"),
        ("MPICH", "peer"),
        ("memory limit", "limit"),
    ]
    assert [(point.size_bytes, point.value) for point in found[0].points] == [(4, 2.0), (64, 4.0)]
    assert [point.size_bytes for point in found[-1].points] == [1 << 20]  # not where calls are slow
    assert not call.series("in_place", "time")
    assert (call.name, call.details, call.ranks) == ("all_reduce", "float32 sum", 2)


def test_the_band_is_that_of_the_slowest_ranks_median(make):
    row, content = make
    call = calls_of(content(row("gpucoll", 1000, 10.0)))[CALL]
    (time,) = call.series("out_of_place", "time")[0].points
    (rate,) = call.series("out_of_place", "bus_bw")[0].points
    assert (time.low, time.value, time.high) == (9.0, 10.0, 11.0)
    assert (rate.low, rate.value, rate.high) == pytest.approx((0.1 / 1.1, 0.1, 0.1 / 0.9))


def test_a_copy_is_a_limit_of_the_bandwidth_alone(make):
    row, content = make
    call = calls_of(content(row("gpucoll", 64, 4.0), limits=(row("copy", 64, 1.0),)))[CALL]
    assert [one.title for one in call.series("out_of_place", "time")] == ["gpucoll"]
    assert [one.title for one in call.series("out_of_place", "bus_bw")] == ["gpucoll", "copy"]


def test_zeros_and_missing_bandwidths_are_left_out(make):
    row, content = make
    rows = [row("gpucoll", 4, 0.0), row("gpucoll", 64, 1.0), row("mpich", 4, 0.0)]
    call = calls_of(content(*rows))[CALL]
    (series,) = call.series("out_of_place", "time")
    assert [point.size_bytes for point in series.points] == [64]
    no_bandwidth = content(row("gpucoll", 64, 1.0, collective="overlap"))
    assert not calls_of(no_bandwidth)["overlap float32 sum"].series("out_of_place", "bus_bw")
    alone = content(row("gpucoll", 64, 1.0, ranks=1))
    assert not calls_of(alone)[CALL].series("out_of_place", "bus_bw")


def test_several_contents_never_mix_the_runs_of_a_size(make):
    row, content = make
    first = content(row("gpucoll", 4, 1.0), row("mpich", 4, 2.0), row("gpucoll", 64, 3.0))
    second = content(row("gpucoll", 4, 5.0), date="2030-02-01")
    call = calls_of([first, second])[CALL]
    found = [(one["library"], one["size"]) for one in call.entries]
    assert found == [("gpucoll", 64), ("gpucoll", 4)]
    assert call.environment["date"] == "2030-02-01"


def test_numbers_of_ranks_are_told_apart(make):
    row, content = make
    contents = [content(row("gpucoll", 4, 1.0, ranks=ranks), ranks=ranks) for ranks in (2, 4)]
    assert sorted(calls_of(contents)) == [f"{CALL}, 2 ranks", f"{CALL}, 4 ranks"]


def test_where_a_call_was_measured(make):
    row, content = make
    found = [
        calls_of(content(row("gpucoll", 4, 1.0), **told))[CALL]
        for told in ({}, {"array": "cupy"}, {"array": "host-device", "test_device": "a note"})
    ]
    assert [one.where for one in found] == [
        "on 2 CPUs of one host",
        "cupy arrays",
        "a test device, not a GPU",
    ]
    assert found[0].origin == "A <CPU> & more, 2030-01-02"


def test_the_side_with_most_libraries(make):
    row, content = make
    rows = [row("gpucoll", 4, 1.0, in_place=1.0), row("mpich", 4, 1.0)]
    assert fullest_side(calls_of(content(*rows))[CALL]) == "out_of_place"
    rows[1] = row("mpich", 4, 1.0, in_place=1.0)
    assert fullest_side(calls_of(content(*rows))[CALL]) == "out_of_place"  # as many
    rows.append(row("gloo", 4, None, in_place=1.0))
    assert fullest_side(calls_of(content(*rows))[CALL]) == "in_place"


def test_figures(make):
    row, content = make
    given = {"peak_bytes": 3 * 2.0**20, "cpu_s": 0.0}
    start = row("gpucoll", 0, 1.0, collective="startup", figures=given)
    ((figure, (series,)),) = calls_of(content(start))["startup float32 sum"].figures()
    assert (figure.title, figure.text(series.points[0].value)) == ("peak memory a rank, MiB", "3.0")


def test_ratios_to_the_best_peer(make):
    row, content = make
    rows = [
        row("gpucoll", 4, 1.0), row("mpich", 4, 2.0), row("impi", 4, 4.0),
        row("gpucoll", 8, 3.0), row("mpich", 8, 1.0),
        row("gpucoll", 16, 0.0), row("mpich", 16, 1.0),
        row("gpucoll", 32, 1.0),
    ]  # fmt: skip
    found = ratios_of(calls_of(content(*rows))[CALL], "out_of_place")
    assert {size: (one.value, peer) for size, (one, peer) in found.items()} == {
        4: (0.5, "mpich"),
        8: (3.0, "mpich"),
    }
    bar = bar_of(content(*rows), CALL, 4, "out_of_place", "small")
    assert (bar.label, bar.ratio.value, bar.peer) == ("small", 0.5, "MPICH")


def test_nothing_to_draw_says_what_is_missing(make):
    row, content = make
    alone = content(row("gpucoll", 4, 1.0))
    with pytest.raises(NothingToDrawError, match="no results"):
        calls_of(content())
    with pytest.raises(NothingToDrawError, match="no call has a peer in place"):
        heat_map(alone, "in_place")
    with pytest.raises(NothingToDrawError, match="of 4 bytes beside a peer, out of place"):
        bar_of(alone, CALL, 4, "out_of_place")


def test_a_digest_is_that_of_results_and_arguments(make):
    row, content = make
    one = content(row("gpucoll", 4, 1.0))
    same = digest_of(lines, json.loads(json.dumps(one)), CALL, "in_place", theme="light")
    assert digest_of(lines, one, CALL, "in_place") == same
    others = [
        digest_of(lines, one, CALL, "out_of_place"),
        digest_of(lines, one, CALL, "in_place", theme="dark"),
        digest_of(lines, content(row("gpucoll", 4, 2.0)), CALL, "in_place"),
        digest_of(headline, [Bar("it", Ratio(1, 1, 1), "a peer")]),
        digest_of(headline, [Bar("it", Ratio(1, 1, 2), "a peer")]),
    ]
    assert len({same, *others}) == 6


@pytest.mark.parametrize("ratio", [2.0 ** (step / 4) for step in range(-12, 13)])
def test_numbers_of_a_heat_map_are_legible(ratio):
    assert max(contrast(ink, colour_of(ratio)) for ink in INKS) >= 4.5


def test_words_are_legible():
    for name, page in (("light", "#ffffff"), ("dark", "#0d1117"), ("print", "#ffffff")):
        theme = THEMES[name]
        assert all(contrast(colour, page) >= 4.5 for colour in (theme.words, theme.quiet))
        assert all(contrast(colour, page) >= 3 for colour in theme.own)
        assert all(contrast(colour, page) >= 2.4 for colour in theme.peers)


def test_why_a_picture_cannot_be_saved(monkeypatch):
    reason = why_not(Path("it.gif"))
    assert reason == "it.gif: the name must end with .svg, .png or .pdf"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    reason = why_not(Path("it.SVG"))
    assert reason == "it.SVG: a picture needs matplotlib: pip install 'gpucoll[plot]'"
