"""Programs that are started anew for each sample: a hello that only says what it is told to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpucoll.bench import cli, libraries, programs
from gpucoll.bench.programs import Program

HERE = Path(__file__).parent
SHORT = ["--ranks", "2", "--rounds", "3"]


@pytest.fixture
def double(on_double, double_peer, monkeypatch):
    """Put the double in gpucoll's place; return a function that sets its fault, or a peer's."""
    launcher = [sys.executable, str(HERE / "mpiexec_double.py"), "-n", "2"]
    faults: dict[str, dict[str, str]] = {"gpucoll": {}, "mpich": {}}

    def program(name):
        def command(given):
            fault = faults[name].get("HELLO_DOUBLE", "")
            return ["env", f"HELLO_DOUBLE={fault}", *launcher, sys.executable, *given]

        return Program(name, "double", 2, command, {}, "Double" if name != "gpucoll" else "")

    monkeypatch.setattr(programs, "HELLO", str(HERE / "hello_double.py"))
    monkeypatch.setattr(libraries, "own_program", lambda ranks: program("gpucoll"))
    monkeypatch.setattr(libraries, "peer_program", lambda one, *_: program(one.name))
    return lambda name, fault: faults[name].update(HELLO_DOUBLE=fault)


@pytest.fixture
def mpich(double, double_peer, tmp_path):
    """The arguments that have it compared."""
    double_peer("mpich")
    folder = tmp_path / "environment" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "mpiexec"):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (folder / name).chmod(0o755)
    return ["--compare", f"mpich={folder.parent}"]


def results(text):
    return [line.split() for line in text.splitlines() if not line.startswith("#")]


def test_a_start(mpich, tmp_path, capfd):
    path = tmp_path / "result.json"
    assert cli.main(["startup", *SHORT, *mpich, "--json", str(path)]) == 0
    out = capfd.readouterr().out
    assert "# A sample of startup is one run of a program" in out
    assert "A sample is a loop" not in out
    assert [(row[-1], row[8]) for row in results(out)] == [("gpucoll", "0"), ("mpich", "0")]
    assert out.count(" gpucoll / mpich ") == 1
    own, _ = json.loads(path.read_text())["results"]
    assert len(own["out_of_place"]["samples_us"][0]) == 3
    assert own["out_of_place"]["time"] > 1000
    figures = own["figures"]
    assert (figures["joined_s"], figures["cpu_s"]) == (1.25, 0.5)  # of the rank that has most
    assert figures["peak_bytes"] == 50 << 20
    assert figures["job_cpu_s"] > 0
    assert "mpich peak memory a rank, MiB        50.0" in out


def test_memory_is_what_came_between_two_looks(mpich, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(programs, "kernel_figure", lambda *_: 10**15 - (3 << 20))
    path = tmp_path / "result.json"
    assert cli.main(["memory", *SHORT, *mpich, "--json", str(path)]) == 0
    own, _ = json.loads(path.read_text())["results"]
    assert own["out_of_place"] is None
    mib = 1 << 20
    assert own["figures"] == {
        "communicator_shared_bytes": 3 * mib,
        "communicator_private_bytes": 2 * mib,
        "communicator_address_space_bytes": 50 * mib,
        "communicator_descriptors": 4,
        "duplicate_shared_bytes": 2 * mib,  # of one of four
        "duplicate_private_bytes": 1 * mib,
        "duplicate_address_space_bytes": 0.5 * mib,
        "duplicate_descriptors": 2,
    }
    out = capfd.readouterr().out
    assert "gpucoll / mpich" not in out  # there is no time
    assert "mpich communicator: shared by all, MiB        3.00" in out


def test_beside_what_runs_in_ranks(mpich, double_peer, capfd):
    arguments = ["barrier,startup", *SHORT, "-n", "2", "-w", "0"]
    assert cli.main(arguments) == 0
    assert [row[-1] for row in results(capfd.readouterr().out)] == ["gpucoll", "gpucoll"]


def test_a_peer_without_a_launcher_is_left_out(double, double_peer, capfd):
    double_peer("gloo")
    assert cli.main(["startup", *SHORT, "--compare", "gloo"]) == 0
    out = capfd.readouterr().out
    assert "# gloo has no launcher of its own, so startup and memory are not measured for it" in out
    assert [row[-1] for row in results(out)] == ["gpucoll"]


def test_wrong_sums_are_counted(double, capfd):
    double("gpucoll", "wrong")
    assert cli.main(["startup", *SHORT]) == 1
    assert results(capfd.readouterr().out)[0][8] == "3"  # of one rank in three runs


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(
    ("fault", "message"),
    [("fail", "ended with exit code 9 (while startup)"),
     ("alone", "2 were started, but they counted 0 of 1 (while startup)"),
     ("hang", "not done within 1 s (while startup)")],
)  # fmt: skip
def test_a_program_that_fails(double, mpich, fault, message, monkeypatch, capfd):
    monkeypatch.setattr(libraries, "START_S", 1.0)
    double("gpucoll", fault)
    arguments = ["startup", *SHORT, "--timeout", "1"]
    assert cli.main(arguments) == 1
    error = capfd.readouterr().err
    assert (
        f"gpucoll: {message}" in error
        or f"gpucoll: its ranks did not find each other: {message}" in error
    )
    assert fault != "fail" or "| a last word" in error
    double("gpucoll", "")
    double("mpich", fault)
    assert cli.main([*arguments, *mpich]) == 2
    assert "does not start" in capfd.readouterr().err


def test_ctrl_c_ends_the_launcher_and_its_ranks(double, monkeypatch, capfd):
    double("gpucoll", "hang")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(programs, "select", SimpleNamespace(select=interrupted))
    ended = []
    right = programs.end

    def noted(popen):
        right(popen)
        ended.append(popen)

    monkeypatch.setattr(programs, "end", noted)
    assert cli.main(["startup", *SHORT]) == 130
    assert "interrupted; every rank was ended" in capfd.readouterr().err
    assert [popen.returncode is not None for popen in ended] == [True]
    with pytest.raises(ProcessLookupError):
        os.killpg(ended[0].pid, 0)  # nobody of its session is left


def test_a_peer_that_fails_later_is_left_out(double, mpich, monkeypatch, capfd):
    right = Program.run
    runs = []

    def failing(self, *arguments):
        runs.append(self.name)
        double("mpich", "fail" if runs.count("mpich") == 3 else "")
        return right(self, *arguments)

    monkeypatch.setattr(Program, "run", failing)
    assert cli.main(["startup,memory", *SHORT, *mpich]) == 1
    captured = capfd.readouterr()
    assert "mpich is left out from here on" in captured.err
    assert [row[-1] for row in results(captured.out)] == ["gpucoll", "gpucoll"]
    assert "# Given up: mpich: ended with exit code 9 (while startup)" in captured.out
