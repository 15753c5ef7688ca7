"""mpi4py's own tests on the front; what is left out, and why, is in `suite/left_out.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("suite")
VERSION = "4.1.2"
_ON_TWO = (
    *("test_cco_buf", "test_cco_vec", "test_cco_obj", "test_cco_nb_vec", "test_cco_ngh_buf"),
    *("test_p2p_obj", "test_p2p_buf_matched", "test_request", "test_group", "test_comm_topo"),
    *("test_rma", "test_win", "test_cco_obj_inter", "test_util_pkl5"),
)
_ON_THREE = ("test_cco_vec", "test_cco_obj", "test_cco_ngh_buf", "test_comm_topo")
_TIMEOUT_S = 240


@pytest.fixture(scope="module")
def own_tests(tmp_path_factory, packages) -> Path:
    """Return mpi4py's tests, out of its source distribution."""
    folder = tmp_path_factory.mktemp("mpi4py")
    return packages.source_of(f"mpi4py=={VERSION}", folder) / "test"


@pytest.mark.parametrize(
    ("n_ranks", "files"),
    [
        pytest.param(1, (), marks=pytest.mark.soak),
        (2, _ON_TWO),
        pytest.param(3, _ON_THREE, marks=pytest.mark.soak),
    ],
)
def test_mpi4pys_own(n_ranks, files, own_tests):
    command = [sys.executable, "-m", "gpucoll", "run", "--no-prefix", "-n", str(n_ranks)]
    command += [str(SUITE / "__main__.py"), str(own_tests), *files]
    done = subprocess.run(
        command,
        env={**os.environ, "GPUCOLL_TIMEOUT_S": "30"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.count("failed 0") == n_ranks
