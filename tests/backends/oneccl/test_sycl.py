"""The SYCL device for real, on the CPU as dpctl sees it; with oneCCL's CPU plug-in in ranks.

By hand: ``python -m venv F/sycl``, ``F/sycl/bin/pip install -r
tests/integrations/requirements/sycl.txt``, and ``GPUCOLL_TEST_ENVIRONMENTS=F``.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.integrations.environments import Environment

from gpucoll import config

PROGRAMS = Path(__file__).parent
LAUNCH = "import sys; from gpucoll.launcher.cli import main; sys.exit(main())"
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a program in the environment; return what it prints."""
    kept = Path(os.environ.get("GPUCOLL_TEST_ENVIRONMENTS", "/nowhere")) / "sycl"
    if not kept.exists():
        pytest.skip("no environment with dpctl and a SYCL device (see this file)")
    made = Environment("sycl", tmp_path_factory.mktemp("sycl"))

    def call(*arguments, **variables):
        given = {
            **os.environ,
            **made.variables,
            "LD_LIBRARY_PATH": str(kept / "lib"),
            "OCL_ICD_FILENAMES": str(kept / "lib" / "libintelocl.so"),
            config.CPU_ONLY: "0",
            config.GPU_KIND: "sycl",
            **variables,
        }
        done = subprocess.run(
            [made.python, *map(str, arguments)],
            env=given,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


def test_device(run):
    seen = json.loads(run(PROGRAMS / "sycl_device_program.py"))
    assert seen.pop("name")
    assert seen.pop("uuid").startswith("SYCL-")
    missing = seen.pop("missing")
    assert len(missing) == 3
    assert all("on Intel GPUs yet" in text for text in missing)
    assert seen == {
        "patterns": [True] * 5,
        "owner": 0,
        "not ours": None,
        "new event": 0,
        "ordered": True,
        "event is done": True,
        "stream is done": True,
        "owns": [True, True],
        "owns dpctl's": True,
        "view": ["sycl:0", "uint8", True],
        "dpctl's memory": True,
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks(run, oneccl_folder, world_size):
    variables = {
        config.ONECCL_LIBRARY: str(oneccl_folder / "libccl.so.2"),
        "CCL_OFI_LIBRARY_PATH": str(oneccl_folder / "libfabric.so.1"),
        "FI_PROVIDER": "tcp",
    }
    program = PROGRAMS / "sycl_ranks_program.py"
    said = run("-c", LAUNCH, "-n", world_size, program, **variables)
    assert said.count("passed") == world_size
