"""mpi4jax's names, and its own tests on them; see `suite`."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.integrations.jax.suite.left_out import FILES, LEFT_OUT, TESTS

MODULE = "gpucoll.integrations.jax.mpi4jax"

PROGRAM = """
import jax, jax.numpy as jnp, mpi4jax, numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
x = jnp.full((3, 2), float(rank))
total = jax.jit(lambda x: mpi4jax.allreduce(x, op=MPI.SUM))(x)
np.testing.assert_array_equal(total, np.full((3, 2), size * (size - 1) / 2))
own = jax.grad(lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=comm).sum() * (rank + 1))(x)
np.testing.assert_array_equal(own, np.full((3, 2), rank + 1))
assert mpi4jax.allgather(x).shape == (size, 3, 2)
assert mpi4jax.gather(x, 0).shape == ((size, 3, 2) if rank == 0 else (3, 2))
row = mpi4jax.scatter(jnp.arange(size) if rank == 0 else jnp.int32(0), 0)
assert row == rank
assert mpi4jax.bcast(x, 1)[0, 0] == 1
assert mpi4jax.alltoall(jnp.full(size, rank)).tolist() == list(range(size))
assert mpi4jax.scan(jnp.int32(1), op=MPI.SUM) == rank + 1
half = comm.Split(rank % 2)
assert mpi4jax.allreduce(jnp.int32(1), op=MPI.SUM, comm=half) == half.Get_size()
status = MPI.Status()
found = mpi4jax.sendrecv(x, x, (rank - 1) % size, (rank + 1) % size, sendtag=7, status=status)
assert found[0, 0] == (rank - 1) % size == status.Get_source()
assert status.Get_tag() == 7
for call in (lambda: mpi4jax.allreduce(x, op=MPI.MAXLOC), lambda: mpi4jax.barrier(token=1)):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        print(type(error).__name__)
    else:
        raise AssertionError
mpi4jax.barrier()
print("passed")
"""


def test_the_names(run_ranks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    printed = run_ranks(2, "-m", MODULE, program)
    assert printed.count("passed") == 2, printed


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_mpi4jaxs_own_tests(run_ranks, n_ranks):
    """Run them from the checkout that GPUCOLL_TEST_MPI4JAX names: 30 to 40 s each."""
    folder = os.environ.get("GPUCOLL_TEST_MPI4JAX")
    if not folder:
        pytest.skip("GPUCOLL_TEST_MPI4JAX names no checkout of mpi4jax")
    chosen = " and ".join(f"not {name}" for name in LEFT_OUT)
    files = [str(Path(folder) / "tests" / file) for file in FILES]
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}/tests", "-k", chosen]
    printed = run_ranks(
        n_ranks, "-m", MODULE, "-m", "pytest", *options, *files, "-c", os.devnull, timeout_s=240
    )
    ended = re.findall(r"^(\d+) passed(?:, (\d+) skipped)?, (\d+) deselected", printed, re.M)
    assert len(ended) == n_ranks, printed
    for passed, skipped, left_out in ended:
        assert int(left_out) == len(LEFT_OUT)
        assert int(passed) + int(skipped or 0) == TESTS - len(LEFT_OUT)
        assert int(passed) >= 70
