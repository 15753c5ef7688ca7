"""``gpucoll-doctor`` as a user runs it: text, JSON, exit codes, and a library that hangs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
from tests.doctor.environments import laptop

from gpucoll.doctor import cli
from gpucoll.doctor.examination import SECTIONS
from gpucoll.doctor.facts import SCHEMA, Report
from gpucoll.version import __version__

PATIENCE_S = 240.0


def doctor(*arguments, **environment):
    command = [sys.executable, "-m", "gpucoll.doctor", *arguments]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def assert_is(value, hint, where):
    """Check a value of the JSON against the type in `gpucoll.doctor.facts`."""
    if hasattr(hint, "__annotations__") and hasattr(hint, "__total__"):
        assert isinstance(value, dict), where
        assert list(value) == list(hint.__annotations__), where
        for key, inner in get_type_hints(hint).items():
            assert_is(value[key], inner, f"{where}.{key}")
    elif get_args(hint) and type(None) in get_args(hint):
        if value is not None:
            assert_is(value, get_args(hint)[0], where)
    elif getattr(hint, "__origin__", None) is list:
        for number, item in enumerate(value):
            assert_is(item, get_args(hint)[0], f"{where}[{number}]")
    elif getattr(hint, "__origin__", None) is dict:
        assert all(isinstance(x, str) for pair in value.items() for x in pair), where
    else:
        assert isinstance(value, (int, float) if hint is float else hint), where


@pytest.fixture(scope="module")
def as_json():
    """What the command says of this machine, with the self-test."""
    process = doctor("--json")
    assert process.stderr == "" or "compiling" in process.stderr
    return process.returncode, json.loads(process.stdout)


class TestJson:
    @pytest.mark.soak
    def test_keys_and_types_are_those_of_the_schema(self, as_json):
        _, report = as_json
        assert_is(report, Report, "report")
        assert (report["schema"], report["gpucoll"]) == (SCHEMA, __version__)

    def test_the_made_machines_have_the_same_keys(self):
        assert_is(json.loads(json.dumps(laptop().report())), Report, "report")

    def test_the_cpu_path_works_here(self, as_json):
        code, report = as_json
        assert code == 0, report["self_test"]
        assert report["cpu_path_works"] is True
        assert report["self_test"]["passed"] is True
        assert report["problems"] == []

    def test_every_section_was_answered(self, as_json):
        _, report = as_json
        installed = any(x["name"] == "mpi4py" and x["version"] for x in report["packages"])
        silent = [name for name in SECTIONS if report[name] is None]
        assert silent == ([] if installed else ["mpi"])

    def test_host_arrays_are_served_by_the_cpu_backend(self, as_json):
        _, report = as_json
        assert report["auto"][0]["arrays"] == "host arrays"
        assert report["auto"][0]["backend"] == "cpu"


class TestText:
    def test_without_the_self_test(self):
        process = doctor("--no-self-test")
        assert process.returncode == 0, process.stdout
        assert process.stdout.startswith(f"gpucoll {__version__}, Python ")
        assert process.stdout.endswith("it was not tried.\n")
        assert "\033" not in process.stdout

    @pytest.mark.soak
    def test_a_library_that_hangs_becomes_a_line(self, tmp_path):
        os.mkfifo(tmp_path / "libnccl.so.2")
        path = str(tmp_path / "libnccl.so.2")

        process = doctor("--no-self-test", "--timeout", "6", GPUCOLL_NCCL_LIBRARY=path)

        assert process.returncode == 0, process.stdout
        words = " ".join(process.stdout.split())
        assert f"{path} (GPUCOLL_NCCL_LIBRARY names it): no answer within 6 s" in words
        assert "Traceback" not in process.stdout + process.stderr

    @pytest.mark.soak
    def test_a_broken_topology_file_becomes_a_line(self, tmp_path):
        (tmp_path / "topology.xml").write_text("<graphs/>")

        process = doctor("--no-self-test", NCCL_TOPO_FILE=str(tmp_path / "topology.xml"))

        assert process.returncode == 0, process.stdout
        words = " ".join(process.stdout.split())
        assert "FAIL topology ArgumentError: topology file" in words
        assert "its root is <graphs>" in words

    @pytest.mark.soak
    def test_only_the_cpu(self):
        process = doctor("--no-self-test", "--json", GPUCOLL_CPU_ONLY="1")
        problems = {x["problem"] for x in json.loads(process.stdout)["gpus"]["drivers"]}
        assert len(problems) == 1
        assert "GPUCOLL_CPU_ONLY" in problems.pop()


@pytest.mark.parametrize(("vendor", "kind"), [("nccl", "cuda"), ("rccl", "rocm")])
class TestOnDoubles:
    """Real processes, with doubles of the driver and of the vendor's library in their way."""

    @pytest.mark.soak(quick=1)
    def test_gpus_and_libraries_are_found_and_chosen(self, doubles, vendor, kind):
        double = doubles.double(vendor)

        process = doctor(
            "--no-self-test",
            "--json",
            **double.search_path,
            **double.variables,
            GPUCOLL_GPU_KIND=kind,
            DOUBLE_DEVICES="2",
        )

        assert process.returncode == 0, process.stderr
        report = json.loads(process.stdout)
        assert report["problems"] == []
        name = "nvidia" if vendor == "nccl" else "amd"
        first, second = report["gpus"]["devices"]
        assert (first["vendor"], first["number"], first["name"]) == (name, 0, "Double of a GPU")
        assert second["uuid"] == "GPU-d0000000-0000-0000-0000-000000000001"
        assert second["pci_address"] == "0000:1c:00.0"
        assert second["dma_buf"] is True
        driver = next(x for x in report["gpus"]["drivers"] if x["vendor"] == name)
        assert driver["interface"] == ("12.8" if vendor == "nccl" else "6.4")
        (used,) = (x for x in report["libraries"] if x["is_used"] and x["name"] == vendor.upper())
        assert used["path"] == str(double.library)
        row = next(x for x in report["auto"] if x["arrays"] == "GPU arrays")
        assert row["backend"] == vendor
        assert ("never been executed" in row["reason"]) == (vendor == "rccl")
        assert [x["number"] for x in report["default_gpus"]] == [0, 1]

    @pytest.mark.soak
    def test_a_driver_that_fails_is_a_reason(self, doubles, vendor, kind):
        double = doubles.double(vendor)
        process = doctor(
            "--no-self-test",
            **double.search_path,
            **double.variables,
            GPUCOLL_GPU_KIND=kind,
            DOUBLE_DEVICES="0",
        )
        assert process.returncode == 0, process.stderr
        words = " ".join(process.stdout.split())
        assert f"refused: {vendor} would be chosen, but this process has no GPU: the " in words


class TestExitCodes:
    def run(self, monkeypatch, environment, *arguments):
        monkeypatch.setattr(cli, "examine", lambda *_: environment.report())
        return cli.main(arguments)

    def test_1_when_the_cpu_path_does_not_work(self, monkeypatch, capsys):
        environment = laptop()
        environment["self_test"].update(passed=False, problem="DeadlineError: rank 1 is late")
        assert self.run(monkeypatch, environment) == 1
        output = capsys.readouterr().out
        assert "FAIL self-test       DeadlineError: rank 1 is late" in output
        assert output.endswith("The CPU path does not work.\n")

    def test_1_in_json_too(self, monkeypatch, capsys):
        environment = laptop()
        environment["self_test"].update(passed=False, problem="it ended with code 1")
        assert self.run(monkeypatch, environment, "--json") == 1
        assert json.loads(capsys.readouterr().out)["cpu_path_works"] is False

    def test_0_without_any_gpu(self, monkeypatch, capsys):
        assert self.run(monkeypatch, laptop()) == 0

    @pytest.mark.parametrize("arguments", [["--nonsense"], ["--timeout", "0"], ["--timeout", "x"]])
    def test_2_for_a_wrong_command_line(self, arguments, capsys):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1

    @pytest.mark.soak
    def test_1_when_real_ranks_fail(self):
        process = doctor(GPUCOLL_CPU_TUNING="nonsense")
        assert process.returncode == 1, process.stdout
        # Rank 0 says what is wrong; rank 1 may say first that it could not meet rank 0.
        assert re.search(r"FAIL self-test +(Argument|Rendezvous)Error: ", process.stdout)
        assert "Traceback" not in process.stdout + process.stderr


def test_a_report_that_cannot_be_written():
    program = (
        "import sys; from gpucoll.doctor import cli; "
        "cli.examine = lambda *_: dict(cpu_path_works=1); "
        "cli.render = lambda *_: 'text'; sys.exit(cli.main([]))"
    )
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 1
    assert ended.stderr == "gpucoll-doctor: cannot write the report: No space left on device\n"


def test_colours_on_a_terminal_only(monkeypatch, capsys):
    monkeypatch.setattr(cli, "examine", lambda *_: laptop().report())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    cli.main([])
    assert "\033[" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    cli.main([])
    assert "\033[" not in capsys.readouterr().out
