"""backend="mpi" on real MPIs, each with its own mpiexec: the common cases, and what goes wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.mpis import ROOT, WAIT_S

PROGRAM = "tests/backends/mpi/program.py"


def run(mpi, n_ranks, *names, **given):
    code, output = mpi.run(n_ranks, PROGRAM, *names, **given)
    assert code == 0, output
    assert output.count("has ended well") == n_ranks, output


# One job for what can follow each other: an MPI takes a second or two to start.
ON_ONE_HOST = {
    1: ("cases", "calls"),
    2: ("cases", "mismatch", "beside"),
    3: ("cases", "pieces", "calls", "mismatch"),
    4: ("as_among_many",),
}


@pytest.mark.parametrize("n_ranks", ON_ONE_HOST)
def test_on_one_host(mpi, n_ranks):
    run(mpi, n_ranks, *ON_ONE_HOST[n_ranks])


def test_a_late_rank(mpi):
    run(mpi, 3, "late")


def test_bad_input(mpi):
    _, output = mpi.run(2, PROGRAM, "refused")

    assert output.count("as expected") == 2, output


def test_ranks_of_another_launcher(mpi):
    """MPI, which has not started them, would see each of them alone."""
    launcher = "import sys; from gpucoll.launcher.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", launcher, "-n", "2", sys.executable, PROGRAM, "calls"]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=mpi.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert ended.returncode
    assert "has 2 ranks, but the MPI that mpi4py has loaded" in ended.stdout + ended.stderr


@pytest.mark.parametrize("what", ["given_up", "given_up_tensor"])
def test_what_mpi_does_not_end(mpi, what):
    if what == "given_up_tensor":
        pytest.importorskip("torch")
    _, output = mpi.run(2, PROGRAM, what)

    assert output.count("as expected") == 2, output


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_the_bench(mpi, hosts):
    given = ["all_reduce,ping_pong", "--backend", "mpi", "-b", "8", "-e", "4K", "--rounds", "2"]
    code, output = mpi.run(2, PROGRAM, "bench", *given, GPUCOLL_TEST_HOSTS=hosts)

    assert code == 0, output
    assert "Out of bounds values : 0 OK" in output


def test_too_few_threads(mpi):
    run(mpi, 2, "threads", GPUCOLL_TEST_THREADS="funneled")


def test_a_killed_rank(mpi):
    code, output = mpi.run(3, PROGRAM, "killed")

    assert code != 0  # mpiexec itself ends a job that has lost a rank: nobody is left behind
    assert "ended well" not in output
