"""``gpucoll-bench --predict`` with kept results, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest
from tests.bench.kept_results import content
from tests.bench.predict.made_cases import as_result, between_hosts, on_one_host

from gpucoll.bench.cli import main

SOME = (4, 1 << 10, 1 << 16, 1 << 20, 1 << 24)


@pytest.fixture
def results(tmp_path):
    found = {}
    for name, cases in (
        ("hosts", between_hosts(ranks=(2, 3, 4, 6), sizes=SOME, noise=0.02)),
        ("one", on_one_host(sizes=SOME)),
    ):
        found[name] = tmp_path / f"{name}.json"
        found[name].write_text(json.dumps(as_result(cases)))
    return found


@pytest.mark.soak
def test_from_kept_results(results, capsys):
    words = ["--predict", "64,128", "-b", "1K", "-e", "1K"]
    files = ["--from", str(results["hosts"]), "--from", str(results["one"])]
    assert main([*words, *files]) == 0
    out = capsys.readouterr().out
    assert "PREDICTED, not measured: a lower bound without contention and without noise" in out
    assert "network, fitted: a small message" in out
    assert "overhead at each end 2 us (assumed: these measurements do not show it)" in out
    assert "network, held-out ranks: 5 cases" in out
    rows = [line.split() for line in out.splitlines() if not line.startswith("#")]
    assert [row[:3] for row in rows] == [["64", "32", "1024"], ["128", "64", "1024"]]
    assert rows[0][-1] == f"{64 / 6:g}x"


def test_a_link_that_is_given(results, capsys):
    words = ["--predict", "64", "-b", "1K", "-e", "1K", "--hosts-of", "1", "--link", "25,10"]
    assert main([*words, "--from", str(results["one"]), "--tune"]) == 0
    out = capsys.readouterr().out
    assert "network, given: 25 us, 10 Gbit/s" in out
    assert "none: not measured" in out
    assert "limits of the schedules, by the simulation; nothing is written" in out


def test_a_link_that_is_assumed_says_so(results, capsys):
    words = ["--predict", "64", "-b", "1K", "-e", "1K", "--from", str(results["one"])]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "network, assumed: 25 us, 10 Gbit/s; name yours with --link" in out
    assert "intervals are those of the part in shared memory" in out


def test_more_hosts_than_can_be_simulated(results, capsys):
    words = ["--predict", "100000", "--hosts-of", "1", "-b", "64K", "-e", "64K"]
    assert main([*words, "--from", str(results["one"])]) == 2
    assert "between 100000 hosts: at most 32768 are simulated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "not JSON, or cut off"),
        ('{"results": [{}]}', "not what gpucoll-bench --json writes (no 'environment')"),
        (json.dumps(content(sizes=(), limit=False)), "no call was measured"),
        (json.dumps(content(ranks=1)), "it has no all_reduce of gpucoll on several ranks"),
    ],
)
def test_a_file_that_is_no_result(text, message, tmp_path, capsys):
    path = tmp_path / "kept.json"
    if text is not None:
        path.write_text(text)
    assert main(["--predict", "64", "--from", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"size": -1},
        {"ranks": 1e400},
        {"hosts": 0},
        *({"out_of_place": {"samples_us": one}} for one in ([], [[1], [0]], [[1e400]])),
    ],
)
def test_numbers_that_are_no_measurement(change, tmp_path, capsys):
    made = as_result(on_one_host(sizes=SOME))
    entry = made["results"][0]
    side = entry["out_of_place"]
    entry.update(change)
    if "out_of_place" in change:
        entry["out_of_place"] = {**side, **change["out_of_place"]}
    path = tmp_path / "kept.json"
    path.write_text(json.dumps(made))
    assert main(["--predict", "64", "--from", str(path)]) == 2
    message = "not what gpucoll-bench --json writes|its all_reduces cannot be fitted"
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--predict", "1"], "numbers of ranks, from 2 to 1000000"),
        (["--predict", "64", "--link", "25"], "is not latency in us and bandwidth in Gbit/s"),
        (["--predict", "64", "--hosts-of", "7"], "64 ranks cannot be divided among such hosts"),
        (["--link", "25,10"], "--link is for predictions: add --predict"),
        (["broadcast", "--predict", "64"], "--predict knows all_reduce only, not broadcast"),
        (["--predict", "64", "--list", "5"], "single arrays on the host"),
        (["--hosts-of", "0"], "'0' is not a whole number of at least 1"),
        (["--predict", "64", "--from", "a.json", "--csv", "-"], "leave --csv out"),
        (["--predict", "64", "--from", "a.json", "--compare", "mpich"], "leave --compare out"),
    ],
)
def test_wrong_arguments(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
