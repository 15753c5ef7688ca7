"""The whole command on the double: real processes, real sockets."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpucoll.bench import cli, gpus, peers
from gpucoll.bench.arguments import parse
from gpucoll.bench.patterns import MEASURED
from gpucoll.bench.results import Results

SHORT = ["--ranks", "2", "-b", "4", "-e", "1K", "-f", "16", "-n", "3", "-w", "1", "--rounds", "3"]


def results(text):
    return [line.split() for line in text.splitlines() if not line.startswith("#")]


def test_a_right_library(on_double, tmp_path, capfd):
    path, table = tmp_path / "result.json", tmp_path / "result.csv"
    files = ["--json", str(path), "--csv", str(table)]
    assert cli.main([*SHORT, "--symmetric", "--limit", *files]) == 0
    captured = capfd.readouterr()
    rows = results(captured.out)
    assert [row[0] for row in rows] == ["4", "4", "64", "64", "1024", "1024"]
    assert all(row[8] == row[12] == "0" for row in rows)
    assert "# Out of bounds values : 0 OK" in captured.out
    assert captured.err == ""  # no progress bar into a pipe

    assert len(table.read_bytes().split(b"\r\n")) == 1 + 3 * 3 * 2 + 1
    content = json.loads(path.read_text())
    assert [entry["placement"] for entry in content["results"]] == ["private", "symmetric"] * 3
    assert [entry["size"] for entry in content["limit"]] == [4, 64, 1024]
    assert len(content["results"][0]["in_place"]["samples_us"][1]) == 3
    environment = content["environment"]
    assert environment["ranks"] == 2
    assert environment["libraries"] == {"gpucoll": {"library": "Double 1.0"}}
    assert "every rank" not in environment["command"]
    assert environment["command"].startswith("gpucoll-bench --ranks 2")


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["int8,float16", "complex64,bool"])
def test_dtypes_and_reductions(on_double, dtype, capfd):
    arguments = ["--ranks", "3", "-b", "4K", "-e", "4K", "-n", "1", "-w", "0", "--rounds", "1"]
    assert cli.main([*arguments, "-d", dtype, "-o", "all"]) == 0
    assert "0 OK" in capfd.readouterr().out


def test_a_wrong_element_is_counted_and_is_the_exit_code(on_double, tmp_path, capfd):
    on_double("wrong:1")
    path = tmp_path / "result.json"
    assert cli.main([*SHORT, "--json", str(path)]) == 1
    out = capfd.readouterr().out
    assert all(row[8] == row[12] == "1" for row in results(out))
    assert "# Out of bounds values : 6 FAILED" in out
    assert json.loads(path.read_text())["results"][0]["in_place"]["nwrong"] == 1


def test_unchecked_results_are_not_called_right(on_double, capfd):
    on_double("wrong:1")
    assert cli.main([*SHORT, "-c", "0"]) == 0
    assert all(row[8] == row[12] == "N/A" for row in results(capfd.readouterr().out))


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(("collective", "root"), [("broadcast", "1"), ("barrier", "-1")])
def test_other_collectives(on_double, collective, root, capfd):
    root_argument = ["-r", root] if collective == "broadcast" else []
    assert cli.main([collective, *SHORT, *root_argument]) == 0
    rows = results(capfd.readouterr().out)
    assert {row[4] for row in rows} == {root}
    assert len(rows) == (3 if collective == "broadcast" else 1)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("collective", [name for name in MEASURED if MEASURED[name].has_data])
def test_every_collective(on_double, collective, capfd):
    arguments = ["--ranks", "3", "-b", "4", "-e", "8K", "-f", "64", "-n", "1", "--rounds", "1"]
    assert cli.main([collective, *arguments, "-d", "int32,float16", "-r", "1"]) == 0
    rows = [row for row in results(capfd.readouterr().out) if row[-1] != "work"]
    in_blocks = MEASURED[collective].in_blocks
    rows = rows[:: 1 + ("blocking" in MEASURED[collective].parts)]
    assert [row[1] for row in rows[:2]] == (["3", "63"] if in_blocks else ["1", "64"])
    assert all(row[8] == row[12] == "0" for row in rows)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(
    "collective", ["gather", "all_to_all", "exclusive_scan", "stream", "async_scan", "probe_recv"]
)
def test_a_wrong_element_is_counted_in_every_collective(on_double, collective, capfd):
    on_double("wrong:1")
    assert cli.main([collective, *SHORT, "-r", "1"]) == 1
    assert all(row[8] == "1" for row in results(capfd.readouterr().out))


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(("fault", "wrong"), [("", "0"), ("wrong:1", "2")])
def test_jobs_that_are_wrong_are_counted(on_double, fault, wrong, capfd):
    on_double(fault)
    assert cli.main(["producer_consumer", *SHORT]) == int(bool(fault))
    (row,) = results(capfd.readouterr().out)
    assert (row[6], row[8]) == ("N/A", wrong)  # no bandwidth: there are no bytes


def test_the_parts_of_an_overlap(on_double, double_peer, tmp_path, capfd):
    double_peer("gloo")
    path = tmp_path / "result.json"
    arguments = ["overlap", "--ranks", "2", "-b", "4", "-e", "4", "-n", "3", "--rounds", "3"]
    assert cli.main([*arguments, "--compare", "gloo", "--json", str(path)]) == 0
    out = capfd.readouterr().out
    titles = [" ".join(row[13:]) for row in results(out)]
    assert titles == [
        "gpucoll", "gpucoll blocking", "gpucoll work", "gloo", "gloo blocking", "gloo work",
    ]  # fmt: skip
    assert out.count(" gpucoll / longer part ") == out.count(" gloo / longer part ") == 1
    assert out.count(" gpucoll / gloo ") == 1  # and no part beside another's
    assert "gpucoll blocking / " not in out
    entries = json.loads(path.read_text())["results"]
    assert [one["placement"] for one in entries[:3]] == ["private", "blocking", "work"]
    assert entries[0]["in_place"]["alg_bw"] is None
    assert entries[0]["in_place"]["cpu_time"] >= 0


def test_tensors_need_pytorch(on_double, monkeypatch, capfd):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main([*SHORT, "--torch"]) == 2
    assert "--torch needs PyTorch, which is not installed" in capfd.readouterr().err


def test_unpinned_ranks(on_double, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(cli, "cpus_of_ranks", lambda ranks: pytest.fail("pinned"))
    assert cli.main([*SHORT, "--unpinned"]) == 0
    assert "usable CPUs, not pinned" in capfd.readouterr().out


def test_several_collectives_in_one_run(on_double, double_peer, tmp_path, capfd):
    double_peer("gloo")
    path = tmp_path / "result.json"
    names = ["scatter", "barrier", "ping_pong"]
    arguments = [",".join(names), *SHORT, "--compare", "gloo", "--json", str(path)]
    assert cli.main(arguments) == 0
    out = capfd.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if " nRanks " in line] == names
    assert out.count("A sample is a loop") == 1
    assert "Avg bus bandwidth" not in out
    assert "# scatter float32, in place: gpucoll / best " in out
    found = [entry["collective"] for entry in json.loads(path.read_text())["results"]]
    assert list(dict.fromkeys(found)) == names


@pytest.mark.soak
def test_a_peer_given_up_is_left_out_of_the_collectives_that_follow(on_double, double_peer, capfd):
    double_peer("gloo", "raise:1")
    assert cli.main(["gather,scatter", *SHORT, "--compare", "gloo"]) == 1
    captured = capfd.readouterr()
    assert [row[-1] for row in results(captured.out)] == ["gpucoll"] * 6
    assert captured.err.count("is left out from here on") == 1


def test_a_list_in_one_call_beside_many(on_double, double_peer, tmp_path, capfd):
    double_peer("gloo")
    path = tmp_path / "result.json"
    arguments = [*SHORT, "--list", "5", "--compare", "gloo", "--json", str(path)]
    assert cli.main(arguments) == 0
    out = capfd.readouterr().out
    assert [row[-1] for row in results(out)] == ["gpucoll", "gpucoll-list", "gloo"] * 3
    assert "# 5 arrays of each size: gpucoll-list passes them in one call" in out
    assert out.count("gpucoll-list / gpucoll ") == 3
    assert {entry["list_length"] for entry in json.loads(path.read_text())["results"]} == {5}


@pytest.mark.soak
def test_more_ranks_than_cpus_are_noted(on_double, monkeypatch, capfd):
    monkeypatch.setattr(cli, "usable_cpu_count", lambda: 1)
    assert cli.main([*SHORT, "-e", "4"]) == 0
    assert "# 2 ranks on 1 usable CPUs take turns" in capfd.readouterr().out


def test_messages_need_two_ranks(on_double, capfd):
    assert cli.main(["scan,ping_pong", *SHORT, "--ranks", "1"]) == 2
    assert "ping_pong needs at least two ranks" in capfd.readouterr().err


def test_a_root_that_is_none_of_the_ranks(on_double, monkeypatch, capfd):
    monkeypatch.setattr(gpus, "usable_cpu_count", lambda: 2)
    assert cli.main(["broadcast", "-r", "5"]) == 2
    assert "there are only 2 ranks, 0 to 1" in capfd.readouterr().err


@pytest.mark.soak
def test_a_rank_that_raises(on_double, capfd):
    on_double("raise:1")
    assert cli.main(SHORT) == 1
    error = capfd.readouterr().err
    assert "gpucoll: rank 1 of 2: ValueError: this rank has no wish to reduce" in error
    assert "while check case=private/out_of_place" in error
    assert 'raise ValueError("this rank' in error  # the rank's traceback
    assert "| a last word on standard output" in error


def test_a_killed_rank_is_named(on_double, capfd):
    on_double("die:1")
    assert cli.main(SHORT) == 1
    error = capfd.readouterr().err
    assert "gpucoll: rank 1 of 2 was killed by SIGKILL (while check" in error
    assert error.endswith("\nit was measuring all_reduce float32 sum 4 B\n")


def test_a_rank_that_does_not_join(on_double, capfd):
    on_double("absent:0")
    assert cli.main(SHORT) == 1
    error = capfd.readouterr().err
    assert "rank 0 of 2" in error
    assert "this rank does not want to join" in error


@pytest.mark.soak
def test_a_rank_that_hangs_meets_the_deadline(on_double, capfd):
    on_double("hang:1")
    assert cli.main([*SHORT, "--timeout", "1"]) == 1
    assert "no answer from ranks 0, 1 of 2 within 1 s" in capfd.readouterr().err


def test_peers_beside_gpucoll(on_double, double_peer, capfd):
    double_peer("gloo")
    assert cli.main([*SHORT, "--compare", "gloo"]) == 0
    out = capfd.readouterr().out
    assert [row[-1] for row in results(out)] == ["gpucoll", "gloo"] * 3
    assert out.count("gpucoll / gloo") == 3
    assert "# gloo: Double 1.0" in out


def test_a_peer_that_hangs_is_given_up_and_the_run_goes_on(on_double, double_peer, tmp_path, capfd):
    double_peer("gloo", "hang:1")
    path = tmp_path / "result.json"
    arguments = [*SHORT, "--compare", "gloo", "--timeout", "1", "--json", str(path)]
    assert cli.main(arguments) == 1
    captured = capfd.readouterr()
    assert [row[-1] for row in results(captured.out)] == ["gpucoll"] * 3
    assert "gloo: no answer from ranks 0, 1 of 2 within 1 s" in captured.err
    assert "gloo was ended, and is left out from here on" in captured.err
    assert "# Given up: gloo: no answer" in captured.out
    assert "no answer" in json.loads(path.read_text())["environment"]["failures"][0]


def test_a_peer_that_does_not_start_ends_the_run_before_it_begins(on_double, double_peer, capfd):
    double_peer("gloo", "absent:1")
    assert cli.main([*SHORT, "--compare", "gloo"]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "this rank does not want to join" in captured.err
    assert "does not start" in captured.err


@pytest.fixture
def mpi_environment(tmp_path):
    """An environment's folder with a Python and an mpiexec in it."""
    folder = tmp_path / "environment" / "bin"
    folder.mkdir(parents=True)
    double = Path(__file__).with_name("mpiexec_double.py")
    for name, command in (("python", sys.executable), ("mpiexec", f"{sys.executable} {double}")):
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    return folder.parent


@pytest.mark.soak
def test_a_peer_under_its_mpiexec(on_double, double_peer, mpi_environment, capfd):
    double_peer("mpich")
    assert cli.main([*SHORT, "--compare", f"mpich={mpi_environment}"]) == 0
    assert [row[-1] for row in results(capfd.readouterr().out)] == ["gpucoll", "mpich"] * 3


def test_a_rank_killed_under_mpiexec(on_double, double_peer, mpi_environment, capfd):
    double_peer("mpich", "die:1")
    assert cli.main([*SHORT, "--compare", f"mpich={mpi_environment}"]) == 1
    error = capfd.readouterr().err
    assert "mpich: rank " in error
    assert "rank 1 of 2 is gone" in error
    assert "its mpiexec ended with exit code 9" in error


def test_another_mpi_in_the_environment_is_not_taken_for_it(
    on_double, double_peer, mpi_environment, monkeypatch, capfd
):
    double_peer("mpich")
    monkeypatch.setitem(peers.PEERS, "mpich", replace(peers.PEERS["mpich"], signature="MPICH"))
    assert cli.main([*SHORT, "--compare", f"mpich={mpi_environment}"]) == 2
    assert "uses another MPI: Double 1.0" in capfd.readouterr().err


def test_too_little_memory_is_seen_before_anything_starts(on_double, monkeypatch, capfd):
    monkeypatch.setattr("gpucoll.bench.environment.available_bytes", lambda: 1 << 20)
    assert cli.main([*SHORT, "-e", "1G"]) == 2
    assert "needs 4.0 GiB for the arrays" in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_a_place_where_no_file_can_be_written(on_double, option, tmp_path, capfd):
    assert cli.main([*SHORT, option, str(tmp_path / "no" / "folder" / "result")]) == 2
    assert "cannot write a file there" in capfd.readouterr().err


def test_a_picture_that_cannot_be_drawn(on_double, tmp_path, monkeypatch, capfd):
    assert cli.main([*SHORT, "--plot", "it.gif"]) == 2
    assert "--plot it.gif: the name must end with .svg, .png or .pdf" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*SHORT, "--plot", "it.svg"]) == 2
    assert "pip install 'gpucoll[plot]'" in capfd.readouterr().err
    monkeypatch.setattr("gpucoll.bench.pictures.why_not", lambda path: None)
    assert cli.main([*SHORT, "--plot", str(tmp_path / "no" / "folder" / "it.svg")]) == 2
    assert "cannot write a file there" in capfd.readouterr().err


def test_a_picture_of_nothing(monkeypatch, capfd):
    monkeypatch.setattr(cli, "under_launcher", lambda variables: False)
    monkeypatch.setattr(
        cli, "run_alone", lambda options, progress: cli.write_files(options, Results({}))
    )
    assert cli.main(["--plot", "it.svg", "--csv", "-"]) == 1
    captured = capfd.readouterr()
    assert "--plot: nothing to draw: there are no results" in captured.err
    assert captured.out.startswith("collective,library,")


@pytest.mark.soak
def test_percentiles_beside_a_peer(on_double, double_peer, tmp_path, capfd):
    double_peer("gloo")
    path = tmp_path / "result.json"
    arguments = ["--ranks", "2", "-b", "4", "-e", "4", "-w", "0", "--limit", "--percentiles"]
    assert cli.main([*arguments, "--compare", "gloo", "--json", str(path)]) == 0
    out = capfd.readouterr().out
    assert "Each time includes the clock's " in " ".join(out.replace("#", "").split())
    for row in results(out):
        for p50, p99 in (row[6:8], row[12:14]):
            assert 0 < float(p50) <= float(p99)
    content = json.loads(path.read_text())
    calls = [entry["in_place"]["single_calls"]["calls"] for entry in content["results"]]
    assert all(200 <= one <= 9000 for one in calls)
    assert "single_calls" not in content["limit"][0]["in_place"]
    assert 0 < content["environment"]["clock_ns"] < 1e6


@pytest.mark.soak
def test_csv_instead_of_the_table(on_double, monkeypatch, capfd):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = ["broadcast", "--ranks", "1", "-b", "64", "-e", "64", "-n", "1", "-d", "all"]
    assert cli.main([*arguments, "--rounds", "1", "--csv", "-"]) == 0
    captured = capfd.readouterr()
    assert captured.out.startswith("collective,library,")
    assert "#" not in captured.out
    assert "# left out of -d all: bfloat16" in captured.err


def test_a_full_disk(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device", "r.csv")

    monkeypatch.setattr(cli, "write_whole", fail)
    options = parse(["--csv", str(tmp_path / "r.csv")])
    with pytest.raises(cli.CannotWriteError, match=r"No space left on device \(r.csv\)"):
        cli.write_files(options, Results({}))


@pytest.mark.soak
def test_a_table_that_cannot_be_written():
    one_call = ["--ranks", "1", "-b", "4", "-e", "4", "-n", "1", "-w", "0", "--rounds", "1"]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "gpucoll.bench", *one_call],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]  # before it, perhaps, that kernels are compiled
    assert last == "gpucoll-bench: cannot write the results: No space left on device"


def test_dtypes_that_need_another_package(on_double, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main([*SHORT, "-d", "float32,bfloat16"]) == 2
    assert "-d bfloat16 needs ml_dtypes, which is not installed" in capfd.readouterr().err


def test_all_dtypes_leave_out_what_needs_another_package(on_double, monkeypatch, capfd):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    one_call = ["--ranks", "1", "-b", "64", "-e", "64", "-n", "1", "-w", "0", "--rounds", "1"]
    assert cli.main(["broadcast", *one_call, "-d", "all"]) == 0
    out = capfd.readouterr().out
    note = (
        "# left out of -d all: bfloat16, float8_e4m3fn, float8_e5m2, which need ml_dtypes: pip in"
    )
    assert note in out
    measured = {row[2] for row in results(out)}
    assert {"float32", "float16", "bool"} <= measured
    assert not measured & {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
