"""PyTorch's own tests of `torch.distributed` against the backend; see `suite`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integrations.torch.suite.__main__ import read
from tests.integrations.torch.suite.not_passing import PASSED, VERSION, differences, listed
from tests.integrations.torch.suite.running import Outcome

import gpucoll

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 280.0
NEEDED = ("torch", "expecttest")


@pytest.fixture
def run_suite(tmp_path):
    """Run PyTorch's tests in a process: ``run_suite("gpucoll", 2)`` returns how each went."""
    for package in NEEDED:  # not imported: torch takes seconds
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    version = importlib.metadata.version("torch")
    if not version.startswith(VERSION):
        pytest.skip(f"what is known of PyTorch {VERSION}x is not so of {version}")

    def run_suite(backend, world_size, pattern=""):
        file = tmp_path / "outcomes.json"
        command = [sys.executable, "-m", "tests.integrations.torch.suite", "--backend", backend]
        command += ["--ranks", str(world_size), "--json", str(file), "-k", pattern, "-v"]
        places = [str(Path(gpucoll.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, places))
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # it and its ranks can be ended together
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        assert file.exists(), output
        return read(file)

    return run_suite


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_all_but_what_is_listed_passes(run_suite, world_size):
    outcomes = run_suite("gpucoll", world_size)

    lines = differences(world_size, outcomes)
    unexpected = [
        each.output for each in outcomes if each.output and each.test not in listed(world_size)
    ]
    assert not lines, "\n".join(lines + unexpected)


def test_a_failure_is_told_with_its_error_and_what_the_ranks_wrote(run_suite):
    (outcome,) = run_suite("gpucoll", 2, "test_monitored_barrier_gloo_subgroup")

    assert outcome.outcome == "failed"
    assert outcome.reason.startswith("ValueError: monitored_barrier is only implemented for GLOO")
    assert "Process 0 exited with error code 10" in outcome.output


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_is_not_as_listed_is_told(world_size):
    known = [Outcome(test, "failed", "refused") for test in listed(world_size)]
    passed = [Outcome(f"test_{i}", "passed") for i in range(PASSED[world_size])]
    assert differences(world_size, [*known, *passed]) == []

    name = known[0].test
    better = [Outcome(name, "passed"), *known[1:], *passed[1:], Outcome("test_new", "failed", "5")]
    told = differences(world_size, better)
    assert told == [
        "test_new failed: 5",
        f"{name} is listed as failing ({listed(world_size)[name]}), and is passed",
    ]

    few = differences(world_size, [*known[1:], *passed[1:]])
    assert [line.split()[0] for line in few] == [name, str(PASSED[world_size] - 1)]
