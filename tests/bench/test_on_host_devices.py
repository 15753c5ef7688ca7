"""The whole command on arrays of Host devices: no doubles, no library of CUDA's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpucoll
from gpucoll import config
from gpucoll.bench import cli
from gpucoll.bench.report import markdown

SHORT = ["-b", "4", "-e", "4K", "-f", "32", "-n", "3", "-w", "1", "--rounds", "3"]
ONCE = ["-b", "64", "-e", "64", "-n", "1", "-w", "0", "--rounds", "1"]
TEST_DEVICE = "Host devices are a test device made of host memory and threads: the times below are"


def rows_of(text):
    return [line.split() for line in text.splitlines() if not line.startswith("#")]


def run(*arguments):
    return cli.main([*arguments, "--array", "host-device"])


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("ranks", ["1", "2", "3"])
def test_every_collective(ranks, capfd):
    names = "all" if ranks != "1" else "all_reduce,broadcast,scan,barrier"
    assert run(names, "--ranks", ranks, *ONCE, "-d", "float32,bfloat16,int16") == 0
    out = capfd.readouterr().out
    assert "# Out of bounds values : 0 OK" in out
    assert f"# {TEST_DEVICE} meaningless for GPUs." in out
    assert "over backend direct, GPU none: Host devices" in out
    own = [row for row in rows_of(out) if row[13:14] == ["gpucoll"] and row[2] != "none"]
    assert len(own) == {"1": 3, "2": 13, "3": 13}[ranks] * 3
    assert {row[8] for row in own} == {"0"}


@pytest.mark.soak
def test_what_is_beside_it(tmp_path, capfd):
    path = tmp_path / "result.json"
    more = ["--ranks", "2", "--plan", "--limit", "--backend", "direct", "--json", str(path)]
    assert run("all_reduce", *SHORT, *more) == 0
    out = capfd.readouterr().out
    titles = [row[13] for row in rows_of(out)]
    assert titles == ["gpucoll", "gpucoll-plan", "gpucoll-numpy", "copy"] * 3
    assert out.count(" gpucoll / gpucoll-numpy ") == out.count(" gpucoll busbw / copy ") == 3
    assert "It ends when the device has completed all of them." in " ".join(
        out.replace("#", "").split()
    )
    content = json.loads(path.read_text())
    assert content["environment"]["test_device"].startswith("Host devices are a test device")
    assert content["environment"]["array"] == "host-device"
    text = "\n".join(markdown([content]))
    assert TEST_DEVICE in text
    assert "| gpucoll busbw / copy | gpucoll-plan busbw / copy |" in text


def test_one_rank_moves_nothing_between_ranks(capfd):
    assert run("all_reduce", "--ranks", "1", *ONCE, "--limit") == 0
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "busbw / copy" in line]
    assert line.split()[-2:] == ["N/A", "N/A"]


@pytest.mark.soak
def test_a_list_in_one_call(capfd):
    assert run("all_reduce", "--ranks", "2", *ONCE, "--list", "4") == 0
    assert "gpucoll-list" in capfd.readouterr().out


@pytest.mark.soak
def test_with_ranks_of_a_launcher():
    package = str(Path(gpucoll.__file__).parents[1])
    command = [sys.executable, "-m", "gpucoll.launcher.cli", "-n", "2", "-m", "gpucoll.bench"]
    done = subprocess.run(
        [*command, "all_reduce", *ONCE, "--limit", "--array", "host-device"],
        env={**os.environ, "PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert TEST_DEVICE in done.stdout
    assert "gpucoll busbw / copy" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--backend", "nccl"], "no vendor's library supports Host devices; use --backend"),
        (["--backend", "rccl"], "--array host-device --backend rccl: no vendor's"),
        (["--symmetric"], "--symmetric needs a vendor's library"),
        (
            ["--compare", "cupy-nccl"],
            "--compare cupy-nccl: other libraries do not support Host devices",
        ),
        (["--compare", "mpich"], "the comparison is gpucoll's own calls on NumPy arrays"),
        (["--torch"], "--torch measures PyTorch's tensors on the host"),
        (["--one-cpu"], "--one-cpu supports only host arrays"),
    ],
)
def test_contradictions(arguments, expected, capfd):
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2
    assert expected in capfd.readouterr().err


def test_more_than_a_device_has(monkeypatch, capfd):
    monkeypatch.setenv(config.HOST_DEVICE_MEMORY, str(64 << 20))
    assert run("all_reduce", "--ranks", "1", "-e", "16M", "--limit") == 2
    error = capfd.readouterr().err
    assert f"-e {16 << 20} needs {(48 + 32) << 20} bytes on each Host device, which has" in error
    assert config.HOST_DEVICE_MEMORY in error


def test_gpus_where_host_devices_are_asked_for(monkeypatch, capfd):
    monkeypatch.setenv(config.DEVICE, "host")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert cli.main(["--array", "cupy"]) == 2
    assert (
        "GPUCOLL_DEVICE is set to host, which makes gpucoll use its test" in capfd.readouterr().err
    )
