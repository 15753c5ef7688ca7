"""The script that measures bulk data by TLS."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpucoll

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_it_runs():
    command = [sys.executable, str(ROOT / "tools/measure_tls.py"), "--rounds", "1"]
    done = subprocess.run(
        [*command, "--bytes", str(1 << 20)],
        env={**os.environ, "PYTHONPATH": str(Path(gpucoll.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    first, *rows = done.stdout.splitlines()
    assert first.startswith("1 MiB, 1 rounds, load ")
    names = [row[:12].rstrip() for row in rows]
    assert names == ["ssl alone", "schedules", "broadcast"]
    assert all(float(row.split()[-1]) > 0 for row in rows)
