"""Compiled functions as they are made for another processor."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ARM = "aarch64-unknown-linux-gnu"


@pytest.fixture(scope="session")
def arm_code(tmp_path_factory):
    """What `arm_code.py` prints of arm64: LLVM IR of entries and functions, by module and name."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # 40 s: once for all workers
        shared = shared.parent
    path = shared / "arm_code.json"
    with open(shared / "arm_code.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(compiled_for_arm(tmp_path_factory.mktemp("cache")), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def compiled_for_arm(cache: Path) -> str:
    changes = {
        "GPUCOLL_TEST_MACHINE": "aarch64",
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "+neon",
        "GPUCOLL_CACHE_DIR": str(cache),
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("arm_code.py")), ARM],
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    return done.stdout
