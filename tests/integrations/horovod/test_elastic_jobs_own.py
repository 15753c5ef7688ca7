"""Horovod's own tests of elastic jobs: horovodrun, scripts that name hosts, failures."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integrations.horovod.suite import left_out

import gpucoll

PROGRAM = Path(__file__).with_name("suite") / "elastic_jobs.py"
NEEDED = ("torch", "psutil")

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason=f"{' and '.join(NEEDED)} are needed",
)


@pytest.mark.timeout(300)
def test_test_elastic_torch(horovod_source):
    file = horovod_source / "test" / "integration" / "test_elastic_torch.py"
    places = [str(Path(gpucoll.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [
            sys.executable,
            str(PROGRAM),
            str(file),
            "-k",
            f"not ({' or '.join(left_out.ELASTIC_JOBS)})",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    outcomes = dict(re.findall(r"ElasticTorchTests::(\w+) (PASSED|FAILED|SKIPPED)", done.stdout))
    assert "FAILED" not in outcomes.values(), done.stdout[-6000:]
    passed = {name for name, outcome in outcomes.items() if outcome == "PASSED"}
    assert passed >= {"test_all_ranks_failure", "test_hosts_added_and_removed", "test_reset_limit"}
    assert len(outcomes) == 7
