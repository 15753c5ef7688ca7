"""backend="mpi" on a real GPU, with the MPI that this Python's mpi4py finds: one rank.

An MPI that is not GPU-aware must be found out by the trial, and arrays staged.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from tests import mpis
from tests.calls.gpu.conftest import skip_without_gpu

from gpucoll import config
from gpucoll.backends.mpi.gpu_aware import environment

LIMIT_S = 100.0


@pytest.mark.gpu
def test_asked_tried_and_used():
    skip_without_gpu("cupy")
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    path = os.pathsep.join([str(mpis.ROOT), *filter(None, sys.path)])
    made = subprocess.run(
        [sys.executable, "tests/backends/mpi/gpu_program.py", "on_gpu"],
        cwd=mpis.ROOT,
        env={**environment(os.environ), "PYTHONPATH": path, config.CPU_ONLY: "0"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(made.stdout)  # what gpu_check.py keeps
    if "finds no MPI library" in made.stderr or "cannot load MPI library" in made.stderr:
        pytest.skip("mpi4py finds no MPI")
    assert made.returncode == 0, made.stdout + made.stderr
    assert "has ended well" in made.stdout
