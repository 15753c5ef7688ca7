"""Compiled functions as they are made for another processor."""

from __future__ import annotations

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
    changes = {
        "GPUCOLL_TEST_MACHINE": "aarch64",
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "+neon",
        "GPUCOLL_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("arm_code.py")), ARM],
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    return json.loads(done.stdout)
