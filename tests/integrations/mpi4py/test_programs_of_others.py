"""Programs of others, written for mpi4py and fetched unchanged, on the front."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def with_packages(tmp_path, packages):
    """Return a function that fetches packages, and returns the environment that finds them."""

    def fetch(*requirements: str) -> dict[str, str]:
        folder = packages.fetched(tmp_path / "packages", *requirements)
        return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}

    return fetch


def test_schwimmbads_pool(run_program, with_packages):
    text = """
import sys
from schwimmbad import MPIPool
def square(x): return x * x
with MPIPool() as pool:
    if not pool.is_master():
        pool.wait()
        sys.exit(0)
    assert pool.map(square, range(20)) == [x * x for x in range(20)]
    print("squared", flush=True)
"""
    environment = with_packages("schwimmbad", "multiprocess", "dill")
    done = run_program(text, 3, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["squared"]
    assert done.stderr == ""


def test_mpipools_executor(run_program, with_packages):
    """Each job has a thread of its own, which sends the first messages of all beside others'."""
    text = """
from mpipool import MPIExecutor
def square(x): return x * x
with MPIExecutor() as pool:
    pool.workers_exit()
    assert list(pool.map(square, range(10))) == [x * x for x in range(10)]
    assert [pool.submit(square, x).result() for x in range(4)] == [0, 1, 4, 9]
    print("squared", flush=True)
"""
    environment = with_packages("mpipool==2.2.1", "errr", "tblib", "dill")
    for _ in range(3):
        done = run_program(text, 3, environment=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.split() == ["squared"]


def test_emcee_samples_on_schwimmbads_pool(run_program, with_packages):
    """As emcee's tutorial on parallelization has it; every rank but the first is a worker."""
    text = """
import sys
import emcee
import numpy as np
from schwimmbad import MPIPool

def log_prob(theta):
    return -0.5 * np.sum(theta**2)

with MPIPool() as pool:
    if not pool.is_master():
        pool.wait()
        sys.exit(0)
    np.random.seed(42)
    initial = np.random.randn(16, 3)
    chains = []
    for used in (pool, None):
        np.random.seed(7)  # the sampler begins with this state
        sampler = emcee.EnsembleSampler(16, 3, log_prob, pool=used)
        sampler.run_mcmc(initial, 20)
        chains.append(sampler.get_chain())
    assert np.array_equal(*chains)
    print("sampled", flush=True)
"""
    environment = with_packages("emcee", "schwimmbad", "multiprocess", "dill")
    done = run_program(text, 3, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["sampled"]


TESTS_OF_MPI_PYTEST = """
import pytest
from mpi4py import MPI
from pytest_mpi.parallel_assert import parallel_assert

@pytest.mark.parallel(2)
def test_ranks():
    comm = MPI.COMM_WORLD
    assert comm.size == 2
    parallel_assert(comm.allreduce(comm.rank) == 1)

@pytest.mark.parallel(2)
def test_that_fails():
    parallel_assert(MPI.COMM_WORLD.rank == 0, "as it should")
"""


def test_mpi_pytest(run_program, with_packages, tmp_path):
    """A plugin of pytest, whose asserts are collective; pytest runs on both ranks."""
    environment = with_packages("mpi-pytest")
    file = tmp_path / "test_parallel.py"
    file.write_text(TESTS_OF_MPI_PYTEST, encoding="utf-8")
    options = ["-q", "-p", "no:cacheprovider", "-m", "parallel[2]"]
    text = f"""
import sys
import pytest
sys.exit(0 if pytest.main({[*options, str(file)]!r}) == 1 else 3)
"""
    done = run_program(text, 2, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 failed, 1 passed") == 2, done.stdout
    assert "Parallel assertion failed on ranks: [1]" in done.stdout


def test_dask_mpi_starts_a_cluster(run_program, with_packages):
    """Rank 0 becomes the scheduler, rank 1 the program, the others workers."""
    pytest.importorskip("distributed", reason="dask.distributed is not installed")
    text = """
from dask_mpi import initialize
initialize(interface="lo", nthreads=1, dashboard=False)
from dask.distributed import Client
with Client() as client:
    client.wait_for_workers(1)
    print(client.gather(client.map(lambda x: x * x, range(5))), flush=True)
"""
    done = run_program(text, 3, environment=with_packages("dask-mpi"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0, 1, 4, 9, 16]" in done.stdout, done.stdout + done.stderr
