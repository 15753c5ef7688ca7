"""The script that measures what a call on GPU arrays costs the host, through doubles."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpucoll

ROOT = Path(__file__).resolve().parents[2]


needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler (cc) for the doubles"
)


@pytest.mark.soak
@needs_compiler
def test_through_the_direct_backend(tmp_path):
    command = [sys.executable, "-m", "gpucoll.launcher.cli", "-n", "2"]
    command += [str(ROOT / "tools/gpu_host_cost.py"), "--double", "--backend", "direct"]
    done = subprocess.run(
        [*command, "--batches", "2", "--output", str(tmp_path / "cost.json")],
        env={**os.environ, "PYTHONPATH": str(Path(gpucoll.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "cost.json").read_text())
    assert len(rows) == 7
    assert all(row["name"].startswith("direct, 2 ranks: ") for row in rows)
    assert "direct, 2 ranks: all_reduce(x, out=x)" in [row["name"] for row in rows]


@pytest.mark.soak
@needs_compiler
def test_it_runs_without_a_gpu(tmp_path):
    command = [sys.executable, str(ROOT / "tools/gpu_host_cost.py"), "--double", "--batches", "2"]
    package = str(Path(gpucoll.__file__).parents[1])
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "cost.json")],
        env={**os.environ, "PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "cost.json").read_text())
    assert len(rows) == 8
    assert all(row["wall_us"] > 0 and row["cpu_us"] > 0 for row in rows)
    *lines, last = done.stdout.splitlines()
    assert [line.startswith(row["name"]) for line, row in zip(lines, rows, strict=True)] == [
        True
    ] * 8
    assert last.startswith("a plan's call and a plain one: ")
    assert last.endswith("us to raw")
