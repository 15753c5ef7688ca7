"""Bad input, ranks that differ, deadlines, deaths: errors of mpi4py's kind and gpucoll's."""

from __future__ import annotations

import pytest

START = """
import numpy as np
import gpucoll
from mpi4py import MPI
comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
x, y = np.ones(4), np.empty(4)
def fails(function, *kinds, error_class=None, says=""):
    try:
        function()
    except kinds as error:
        assert all(isinstance(error, kind) for kind in kinds), type(error).__mro__
        if error_class is not None:
            assert error.Get_error_class() == error_class, repr(error)
        assert says in str(error), str(error)
    else:
        raise AssertionError(f"nothing was raised, but {kinds} were expected")
"""

BAD = (
    START
    + """
E = MPI.Exception
fails(lambda: comm.Allreduce(x, np.empty(3)), E, ValueError, gpucoll.ArgumentError)
fails(lambda: comm.Allreduce(x, y, MPI.BAND), E, ValueError, error_class=MPI.ERR_OP)
fails(lambda: comm.Allreduce(x, y, MPI.OP_NULL), E, error_class=MPI.ERR_OP)
fails(lambda: comm.Allreduce(x, y, max), TypeError)
fails(lambda: comm.Allreduce([x, 5], [y, 5]), E, ValueError)
fails(lambda: comm.Allreduce([x, -1], y), E, ValueError, error_class=MPI.ERR_COUNT)
fails(lambda: comm.Send([x, 1, 2, 3, 4], 0), E, ValueError)
fails(lambda: comm.Send("text", 0), E, TypeError)
fails(lambda: comm.Send(np.array([object()]), 0), E, KeyError)
fails(lambda: comm.Send(x[::2], 0), E, BufferError)
fails(lambda: comm.Send(x.astype(">f8"), 0), E, BufferError)
fails(lambda: comm.Recv(b"read-only", 0), E, BufferError)
fails(lambda: comm.Send(x, size), E, error_class=MPI.ERR_RANK)
fails(lambda: comm.Send(x, 0, -5), E, error_class=MPI.ERR_TAG)
fails(lambda: comm.Bcast(x, size), E, error_class=MPI.ERR_ROOT)
fails(lambda: comm.Gather(x, np.empty(3), rank), E, ValueError)
fails(lambda: comm.scatter([1] * (size + 1), rank), ValueError)
fails(lambda: MPI.COMM_NULL.Barrier(), E, error_class=MPI.ERR_COMM)
fails(lambda: MPI.COMM_WORLD.Free(), E, error_class=MPI.ERR_COMM)
fails(lambda: comm.Create_cart([size + 1]), E, error_class=MPI.ERR_DIMS)
fails(lambda: comm.Send([MPI.BOTTOM, 1, MPI.INT], 0), NotImplementedError, says="pass the array")
fails(lambda: comm.Spawn("x"), NotImplementedError, says="gpucoll-run")
fails(lambda: MPI.File.Open(comm, "x"), NotImplementedError)
fails(lambda: MPI.Win.Create_dynamic(comm=comm), NotImplementedError, says="Win.Create")
fails(lambda: MPI.Win.Create(x), E, error_class=MPI.ERR_COMM)
window = MPI.Win.Create(x, 8, comm=comm)
fails(lambda: window.Put(y, size), E, error_class=MPI.ERR_RANK)
fails(lambda: window.Put(y, 0, 1), E, error_class=MPI.ERR_RMA_RANGE, says="span bytes 8 to 40")
fails(lambda: window.Get(y, 0, -1), E, error_class=MPI.ERR_RMA_RANGE)
fails(lambda: window.Accumulate(y, 0, op=MPI.BAND), E, error_class=MPI.ERR_OP)
fails(lambda: window.Put(y[::2], 0), E, BufferError)
window.Free()
fails(lambda: window.Put(y, 0), E, error_class=MPI.ERR_WIN)
fails(lambda: MPI.Open_port(), NotImplementedError)
fails(lambda: MPI.no_such_name, AttributeError)
comm.Barrier()  # all is as before
twin = comm.Dup()
twin.Free()
fails(lambda: twin.Barrier(), E, error_class=MPI.ERR_COMM)
"""
)

MISMATCH = (
    START
    + """
fails(lambda: comm.Allreduce(np.ones(3 + rank), np.empty(3 + rank)),
      MPI.Exception, gpucoll.MismatchError, error_class=MPI.ERR_NOT_SAME, says="rank 1")
assert comm.allreduce(1) == size
"""
)

LATE = (
    START
    + """
if rank == 0:
    fails(lambda: comm.Recv(x, 1), MPI.Exception, gpucoll.DeadlineError, TimeoutError)
else:
    fails(lambda: comm.Barrier(), MPI.Exception, gpucoll.GpucollError)
"""
)

KILLED = (
    START
    + """
import os, signal
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
fails(lambda: comm.Allreduce(x, y), MPI.Exception, gpucoll.PeerLostError,
      error_class=MPI.ERR_PROC_FAILED)
print("noticed", flush=True)
"""
)

HANDLER = (
    START
    + """
seen = []
handler = MPI.Comm.Create_errhandler(lambda comm, code: seen.append(MPI.Get_error_class(code)))
comm.Set_errhandler(handler)
fails(lambda: comm.Allreduce(np.ones(3 + rank), np.empty(3 + rank)), gpucoll.MismatchError)
assert seen == [MPI.ERR_NOT_SAME]
comm.Set_errhandler(MPI.ERRORS_RETURN)
"""
)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("program", [BAD, MISMATCH, HANDLER], ids=["bad", "mismatch", "handler"])
def test_errors(program, run_program):
    done = run_program(program, 2)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
def test_a_deadline(run_program):
    done = run_program(LATE, 2, environment={"GPUCOLL_TIMEOUT_S": "2"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_killed_rank(run_program):
    done = run_program(KILLED, 2)
    assert "noticed" in done.stdout, done.stdout + done.stderr


def test_abort_ends_all_ranks(run_program):
    done = run_program(START + "if rank == 1: comm.Abort(3)\ncomm.Barrier()\n", 2)
    assert done.returncode != 0
    assert "Abort(3)" in done.stderr
