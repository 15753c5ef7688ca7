"""The command on gpucoll itself: few sizes, few calls; right results, not speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gpucoll.api.communicator import Communicator
from gpucoll.bench import cli
from gpucoll.bench.collectives import COLLECTIVES
from gpucoll.bench.patterns import PATTERNS

FEW = ["-b", "4", "-e", "64K", "-f", "128", "-n", "3", "-w", "1", "--rounds", "2"]
EVERYTHING = [*FEW, "--symmetric", "--plan", "--limit"]


def results(text):
    return [line.split() for line in text.splitlines() if not line.startswith("#")]


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("ranks", [1, 3])
def test_all_reduce(ranks, tmp_path, capfd):
    path = tmp_path / "result.json"
    assert cli.main(["--ranks", str(ranks), *EVERYTHING, "--json", str(path)]) == 0
    rows = results(capfd.readouterr().out)
    assert len(rows) == 3 * 3
    assert all(row[8] == row[12] == "0" for row in rows)
    content = json.loads(path.read_text())
    assert len(content["limit"]) == 3
    assert {(entry["library"], entry["placement"]) for entry in content["results"]} == {
        ("gpucoll", "private"),
        ("gpucoll", "symmetric"),
        ("gpucoll-plan", "private"),
    }


@pytest.mark.soak
def test_other_collectives(capfd):
    needed = {"ping_pong": "send", "stream": "send"}
    names = [name for name in COLLECTIVES if hasattr(Communicator, needed.get(name, name))]
    steps = ["-b", "4", "-e", "16K", "-f", "64", "-n", "2", "-w", "1", "--rounds", "1"]
    ended = cli.main([",".join(names), "--ranks", "3", *steps, "--symmetric", "-r", "1"])
    captured = capfd.readouterr()
    wrong = [row for row in results(captured.out) if not {row[8], row[12]} <= {"0", "N/A"}]
    assert not wrong
    assert ended == 0, captured.err


@pytest.mark.soak
def test_patterns(tmp_path, capfd):
    names = [name for name, row in PATTERNS.items() if not row.own_program]
    path = tmp_path / "result.json"
    steps = ["-b", "12", "-e", "8K", "-f", "64", "-n", "2", "-w", "1", "--rounds", "2"]
    arguments = ["--ranks", "3", *steps, "--work", "0.1", "-r", "1", "--json", str(path)]
    ended = cli.main([",".join(names), *arguments])
    captured = capfd.readouterr()
    assert ended == 0, captured.err
    entries = json.loads(path.read_text())["results"]
    assert {entry["collective"] for entry in entries} == {*names}
    for entry in entries:
        sides = [side for side in (entry["out_of_place"], entry["in_place"]) if side]
        assert sides, entry
        expected = None if entry["placement"] == "work" else 0
        assert all(side["nwrong"] == expected for side in sides), entry


@pytest.mark.soak
def test_starting_and_memory(tmp_path, capfd):
    path = tmp_path / "result.json"
    arguments = ["--ranks", "2", "--rounds", "1", "--json", str(path)]
    assert cli.main(["startup,memory", *arguments]) == 0
    startup, memory = json.loads(path.read_text())["results"]
    assert startup["out_of_place"]["nwrong"] == 0
    assert 0 < startup["figures"]["joined_s"] < startup["out_of_place"]["time"] / 1e6
    assert startup["figures"]["cpu_s"] < startup["figures"]["job_cpu_s"]
    assert startup["figures"]["peak_bytes"] > 1 << 20
    figures = memory["figures"]
    assert figures["duplicate_address_space_bytes"] > 0
    assert figures["communicator_descriptors"] > 0


@pytest.mark.soak
def test_tensors(capfd):
    pytest.importorskip("torch")
    names = ["all_reduce", "gather", "ping_pong", "async_all_reduce", "isend_irecv"]
    arguments = ["--ranks", "2", *FEW, "--torch", "-d", "float32,bool", "-o", "sum,lor"]
    assert cli.main([",".join(names), *arguments]) == 0
    out = capfd.readouterr().out
    assert out.count("gpucoll torch - gpucoll") == out.count("gpucoll torch / gpucoll")
    assert out.count("gpucoll torch - gpucoll") >= 3 * 2 * len(names)


@pytest.mark.soak
def test_half_types(capfd):
    pytest.importorskip("ml_dtypes")
    arguments = ["--ranks", "2", *FEW, "-d", "float16,bfloat16,float8_e5m2", "-o", "sum,avg,max"]
    assert cli.main(arguments) == 0
    assert len(results(capfd.readouterr().out)) == 3 * 3 * 3


def test_under_the_launcher():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    launcher = [sys.executable, "-m", "gpucoll.launcher.cli", "-n", "2", "-m", "gpucoll.bench"]
    ended = subprocess.run(
        [*launcher, *EVERYTHING],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("gpucoll symmetric (") == 3  # and which way it went
    assert "# Out of bounds values : 0 OK" in ended.stdout
