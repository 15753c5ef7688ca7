"""mpi4py's package beside MPI: options, typing, and its modules of plain Python."""

from __future__ import annotations

import os

import pytest

from gpucoll.integrations.mpi4py import installed


@pytest.fixture(scope="module")
def with_mpi4py(tmp_path_factory, packages) -> dict[str, str]:
    """Return an environment in which mpi4py is installed; no MPI is."""
    folder = packages.fetched(tmp_path_factory.mktemp("installed"), "mpi4py==4.1.2")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_options_come_from_the_environment(run_program):
    text = """
import sys
import mpi4py
assert sys.modules["mpi4py.rc"] is mpi4py.rc
import mpi4py.rc
mpi4py.rc.initialize = True
mpi4py.rc(threads=True)
for attempt in (lambda: setattr(mpi4py.rc, "no_such", 1), lambda: mpi4py.rc(no_such=1)):
    try: attempt()
    except TypeError: pass
    else: raise AssertionError
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from mpi4py import MPI
assert [str(item.message) for item in said] == ["mpi4py.rc.errors: unexpected value 'loud'"], said
assert not MPI.Is_initialized()
rc = mpi4py.rc
assert (rc.initialize, rc.threads, rc.irecv_bufsz, rc.errors) == (False, False, 8, "exception")
"""
    named = {"INITIALIZE": "No", "THREADS": "0", "IRECV_BUFSZ": "8", "ERRORS": "loud"}
    variables = {f"MPI4PY_RC_{name}": value for name, value in named.items()}
    done = run_program(text, 1, environment=variables)
    assert done.returncode == 0, done.stdout + done.stderr


def test_typing_and_type_codes(run_program):
    text = """
from mpi4py import MPI
from mpi4py.typing import BufSpec, BufSpecV, Buffer, InPlace, TargetSpec, TypeSpec
def function(x: Buffer, y: BufSpec, z: InPlace) -> TypeSpec: ...
codes = {"INT": "i", "BYTE": "B", "CHAR": "c", "C_BOOL": "b1", "INT32_T": "i4", "AINT": "p"}
for name, code in codes.items():
    datatype = getattr(MPI, name)
    assert MPI._typecode(datatype) == datatype.tocode() == code
assert MPI._typecode(MPI.DOUBLE_INT) is None and MPI._typealign(MPI.DOUBLE_INT) == 8
both = MPI.Datatype.Create_struct([1, 1], [0, 32], [MPI.LONG_DOUBLE_INT, MPI.INT])
assert both.extent == 48
"""
    done = run_program(text, 1)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
def test_modules_of_an_installed_mpi4py(run_program, with_mpi4py):
    text = """
import os, sys
import numpy as np
import mpi4py
from mpi4py import MPI, bench, run
from mpi4py import futures
from mpi4py.util import dtlib, pkl5, pool, sync
import gpucoll.integrations.mpi4py as front
assert sys.modules["mpi4py.MPI"] is MPI
assert mpi4py is front and pkl5.MPI is front.MPI and futures._core.MPI is front.MPI
assert os.path.isdir(mpi4py.get_include())
pair = np.dtype([("value", "f8"), ("index", "i4")], align=True)
assert dtlib.to_numpy_dtype(dtlib.from_numpy_dtype(pair)).itemsize == pair.itemsize
comm = pkl5.Intracomm(MPI.COMM_WORLD)
rank, size = comm.rank, comm.size
large = np.full(1 << 18, rank)
assert [part[-1] for part in comm.allgather(large)] == list(range(size))
assert comm.bcast(large if rank == 0 else None, 0)[5] == 0
request = comm.isend(large, (rank + 1) % size)
assert comm.recv()[0] == (rank - 1) % size
request.wait()
with futures.MPICommExecutor(MPI.COMM_SELF) as executor:
    assert list(executor.map(abs, [-1, -2])) == [1, 2]
"""
    done = run_program(text, 2, environment=with_mpi4py)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
def test_commands_of_an_installed_mpi4py(run_program, with_mpi4py):
    done = run_program("-m", 2, "mpi4py.bench", "helloworld", environment=with_mpi4py)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Hello, World!") == 2
    code = "import sys; from mpi4py import MPI; sys.exit(3 * MPI.COMM_WORLD.rank)"
    done = run_program("-m", 2, "mpi4py.run", "-c", code, environment=with_mpi4py)
    assert done.returncode != 0
    assert "MPI.Abort(3) on rank 1 of 2" in done.stderr


@pytest.mark.soak
def test_pools_of_mpi4py(run_program, with_mpi4py, tmp_path):
    """`-m mpi4py.futures` makes workers of all ranks but the first; so does MPICommExecutor."""
    program = tmp_path / "pool.py"
    program.write_text(
        """
from mpi4py import MPI
from mpi4py.futures import MPIPoolExecutor
def place(x): return x * x, MPI.COMM_WORLD.rank
def show(results):
    results = list(results)
    assert [value for value, _ in results] == [x * x for x in range(20)]
    print("squared on", *sorted({rank for _, rank in results}), flush=True)
if __name__ == "__main__":
    with MPIPoolExecutor() as pool:
        show(pool.map(place, range(20)))
""",
        encoding="utf-8",
    )
    done = run_program("-m", 3, "mpi4py.futures", str(program), environment=with_mpi4py)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() in (["squared", "on", "1", "2"], ["squared", "on", "1"])
    text = """
from mpi4py import MPI
from mpi4py.futures import MPICommExecutor
with MPICommExecutor(MPI.COMM_WORLD, root=1) as pool:
    if pool is not None:
        assert list(pool.map(abs, range(-9, 0))) == list(range(9, 0, -1))
        print("mapped by", MPI.COMM_WORLD.rank, flush=True)
"""
    done = run_program(text, 3, environment=with_mpi4py)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["mapped", "by", "1"]


def test_a_pool_that_would_start_processes(run_program, with_mpi4py):
    """mpi4py.futures spawns in a thread: the error ends the program, which waits for ever."""
    text = """
from mpi4py.futures import MPIPoolExecutor
if __name__ == "__main__":
    MPIPoolExecutor().submit(abs, -1).result()
"""
    done = run_program(text, 1, environment=with_mpi4py)
    assert done.returncode != 0
    assert "gpucoll-run -n 4 -m gpucoll.integrations.mpi4py -m mpi4py.futures" in done.stderr


def test_without_an_installed_mpi4py(monkeypatch):
    monkeypatch.setattr(installed, "folder", lambda: None)
    with pytest.raises(ModuleNotFoundError, match=r"mpi4py.util.pkl5 .* pip install mpi4py"):
        installed.spec_of("mpi4py.util.pkl5")
    assert installed.spec_of("mpi4py.no_such_module") is None
