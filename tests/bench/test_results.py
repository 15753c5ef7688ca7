from __future__ import annotations

import json

import numpy as np
import pytest

from gpucoll.bench.results import Measurement, Results, Row


def example():
    side = Measurement(np.array([[50.0, 60.0, 70.0], [40.0, 40.0, 40.0]]), 7, 0)
    where = ("private", "all_reduce", 2, 1_000_000, 250_000, "float32", "sum", -1)
    rows = [Row("gpucoll", *where, side, side), Row("gloo", *where, None, side)]
    return Results({"ranks": 2}, rows, [Row("limit", *where, side, side)], ["gloo: gone"])


def test_the_json_has_the_documented_form(tmp_path):
    path = tmp_path / "result.json"
    example().write(path)
    content = json.loads(path.read_text())
    assert list(content) == ["results", "limit", "environment"]
    own, gloo = content["results"]
    assert list(own) == [
        "library", "collective", "placement", "ranks", "size", "count", "type", "redop", "root",
        "list_length", "out_of_place", "in_place",
    ]  # fmt: skip
    side = own["in_place"]
    assert (side["time"], side["nwrong"], side["reps"]) == (60.0, 0, 7)
    assert side["alg_bw"] == side["bus_bw"] == pytest.approx(1e6 / 60 / 1e3)
    assert side["samples_us"] == [[50.0, 60.0, 70.0], [40.0, 40.0, 40.0]]
    assert gloo["out_of_place"] is None
    assert content["limit"][0]["library"] == "limit"
    assert content["environment"] == {"ranks": 2, "failures": ["gloo: gone"]}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_bandwidths_count_every_array_of_a_list():
    side = Measurement(np.full((2, 3), 100.0), 7, 0)
    row = Row(
        "gpucoll", "private", "broadcast", 2, 1000, 250, "float32", "none", 0, side, None, 1000
    )
    assert row.bandwidths(side) == (10.0, 10.0)


def test_a_file_that_was_there_stays_whole_when_writing_fails(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("what was there")
    results = example()
    results.environment["not for JSON"] = object()
    with pytest.raises(TypeError):
        results.write(path)
    assert path.read_text() == "what was there"
    assert len(list(tmp_path.iterdir())) == 1
