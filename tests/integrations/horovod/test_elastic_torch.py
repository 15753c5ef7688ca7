"""Elastic training with PyTorch: a rank dies in the middle of a backward pass."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
PROGRAM = Path(__file__).with_name("programs") / "elastic_torch.py"
PRECISION = 1e-4
"""Of losses in float32 after hundreds of steps, whose gradients were added in another order."""


@pytest.mark.parametrize(
    ("killed", "restarts", "pause_s"), [("0:5", "0", "0"), ("2:5", "9", "0.04")]
)
def test_losses_are_those_of_one_process(killed, restarts, pause_s):
    command = [sys.executable, "-m", "gpucoll", "run", "--no-prefix", "--elastic", "2:4"]
    command += ["--restarts", restarts, "-m", "gpucoll.integrations.horovod", str(PROGRAM)]
    done = subprocess.run(
        [*command, "300", killed],
        env={**os.environ, "PAUSE_S": pause_s},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["sizes"] == [3, 4]
    assert told["alike"]
    assert told["apart"] < PRECISION
    assert told["last"] < 0.05
