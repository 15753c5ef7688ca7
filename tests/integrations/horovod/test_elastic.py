"""Elastic training over Horovod's names: ranks are lost, and come, and nothing of the work is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("programs") / "elastic_training.py"
NOTICED_S = 0.3


def train(elastic: str, *arguments: str, pause_s: float = 0.0, restarts: int = 10):
    """Run the training; return its last line's object, and all that was printed."""
    command = [sys.executable, "-m", "gpucoll", "run", "--no-prefix", "--elastic", elastic]
    command += ["--restarts", str(restarts), "-m", "gpucoll.integrations.horovod"]
    variables = {**os.environ, "PAUSE_S": str(pause_s)}
    done = subprocess.run(
        [*command, str(PROGRAM), *arguments],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


@pytest.mark.soak
def test_a_rank_is_killed_and_the_others_go_on():
    """The error names the rank, soon; the weights are those of one process."""
    result, printed = train("2:4", "30", "1:5", restarts=0)
    assert result == {"right": True, "sizes": [[4, 5], [3, 25]], "resets": 1}
    noticed = re.findall(r"noticed ([\d.]+) .* lost rank 1 ", printed)
    killed = re.findall(r"killed ([\d.]+)", printed)
    assert len(noticed) == 3
    assert max(map(float, noticed)) - float(killed[0]) < NOTICED_S


@pytest.mark.soak
@pytest.mark.parametrize("killed", [["0:5"], ["3:5", "1:60"]])
def test_lost_ranks_are_replaced(killed):
    """Processes that the launcher starts again get the state and take part."""
    result, _ = train("2:4", "500", *killed, pause_s=0.015)
    assert result["right"]
    assert [size for size, _ in result["sizes"]] == [4, *[3, 4] * len(killed)]
    assert result["resets"] == 2 * len(killed)


@pytest.mark.soak
def test_random_kills():
    """A share of the 500 that `random_kills.py` makes: half of them of ranks that come back."""
    program = Path(__file__).with_name("random_kills.py")
    done = subprocess.run(
        [sys.executable, str(program), "11"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 kills; the last 6 of 4 ranks: right" in done.stdout
