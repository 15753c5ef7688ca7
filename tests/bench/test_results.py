from __future__ import annotations

import csv
import io
import json
import os

import numpy as np
import pytest

from gpucoll.bench.csv_results import COLUMNS, csv_text
from gpucoll.bench.results import Measurement, Results, Row, compact, write_whole


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


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(path, "some\n")
    assert os.read(reader, 100) == b"some\n"
    os.close(reader)
    assert path.is_fifo()


def test_a_folder_that_is_missing_is_named_by_the_file(tmp_path):
    path = tmp_path / "no" / "file"
    with pytest.raises(FileNotFoundError) as raised:
        write_whole(path, "")
    assert raised.value.filename == str(path)


def test_the_json_has_a_line_for_each_rank(tmp_path):
    path = tmp_path / "result.json"
    results = example()
    results.environment["command"] = "--name [\n 1,  2 ] [  ]"
    results.write(path)
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert lines.count("[50.0, 60.0, 70.0],") == lines.count("[40.0, 40.0, 40.0]") == 5
    assert json.loads(path.read_text()) == json.loads(json.dumps(results.as_json()))


@pytest.mark.parametrize("value", [[], [[]], [1, None, [2.5, True]], ["a", [1]], {"a": [1, {}]}])
def test_compact_json_has_the_same_content(value):
    assert json.loads(compact(json.dumps(value, indent=1))) == value


def test_the_csv():
    results = example()
    results.rows.append(
        Row("a, \"b\"", "private", "startup", 2, 0, 0, "none", "none", -1, None, None,
            figures={"cpu_s": 0.5})
    )  # fmt: skip
    text = csv_text(results)
    assert text.count("\r\n") == text.count("\n") == 7  # RFC 4180
    header, *lines = csv.reader(io.StringIO(text, newline=""))
    assert header == [*COLUMNS, "cpu_s"]
    first = dict(zip(header, lines[0], strict=True))
    assert first == {
        "collective": "all_reduce", "library": "gpucoll", "placement": "private", "ranks": "2",
        "size_bytes": "1000000", "count": "250000", "dtype": "float32", "redop": "sum",
        "root": "-1", "list_length": "1", "side": "out_of_place", "time_us": "60.0",
        "alg_bw_gb_s": first["bus_bw_gb_s"], "bus_bw_gb_s": first["bus_bw_gb_s"], "cpu_us": "",
        "wrong": "0", "path": "", "reps": "7", "samples": "3", "cpu_s": "",
        "p50_us": "", "p90_us": "", "p99_us": "", "max_us": "", "single_calls": "",
    }  # fmt: skip
    assert float(first["bus_bw_gb_s"]) == pytest.approx(1e6 / 60 / 1e3)
    where = [(line[1], line[header.index("side")]) for line in lines]
    assert where == [
        ("gpucoll", "out_of_place"), ("gpucoll", "in_place"), ("gloo", "in_place"),
        ("a, \"b\"", ""), ("limit", "out_of_place"), ("limit", "in_place"),
    ]  # fmt: skip
    assert lines[3][-1] == "0.5"


def timed_alone(calls):
    return Measurement(np.full((2, 3), 5.0), 7, 0, single_us=np.arange(calls, 0, -1) / 10)


def test_percentiles_are_times_of_calls():
    assert timed_alone(200).percentiles_us == {"p50": 10.0, "p90": 18.0, "p99": 19.8, "max": 20.0}
    assert timed_alone(199).percentiles_us is None  # only one call is above the 99th
    assert Measurement(np.full((2, 3), 5.0), 7, 0).percentiles_us is None


def test_percentiles_in_the_files():
    where = ("private", "all_reduce", 2, 4, 1, "float32", "sum", -1)
    row = Row("gpucoll", *where, timed_alone(200), timed_alone(0))
    entry = row.as_json()
    assert entry["out_of_place"]["single_calls"] == {
        "calls": 200, "p50": 10.0, "p90": 18.0, "p99": 19.8, "max": 20.0,
    }  # fmt: skip
    assert entry["in_place"]["single_calls"] is None
    plain = Row("gpucoll", *where, Measurement(np.full((2, 3), 5.0), 7, 0), None)
    assert "single_calls" not in plain.as_json()["out_of_place"]
    header, first, second, third = csv.reader(io.StringIO(csv_text(Results({}, [row, plain]))))
    assert header[-5:] == ["p50_us", "p90_us", "p99_us", "max_us", "single_calls"]
    assert first[-5:] == ["10.0", "18.0", "19.8", "20.0", "200"]
    assert second[-5:] == ["", "", "", "", "0"]
    assert third[-5:] == ["", "", "", "", ""]
