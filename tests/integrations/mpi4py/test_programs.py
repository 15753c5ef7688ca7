"""Programs of mpi4py that compare what they get with NumPy; each is right on mpi4py itself, too."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("programs")


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(
    ("name", "n_ranks"),
    [
        ("collectives", 1),
        ("collectives", 2),
        ("collectives", 3),
        ("messages", 2),
        ("communicators", 2),
        ("communicators", 3),
        ("details", 1),
        ("details", 3),
        ("intercommunicators", 2),
        ("intercommunicators", 3),
        ("windows", 1),
        ("windows", 3),
        ("threads", 2),
        ("threads", 3),
    ],
)
def test_a_program(name, n_ranks, run_program):
    done = run_program(PROGRAMS / f"{name}.py", n_ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["done"] * n_ranks, done.stdout + done.stderr


def test_under_its_own_name(run_program):
    text = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import gpucoll.integrations.mpi4py as front
assert mpi4py is front and MPI is front.MPI and not MPI.Is_initialized()
try:
    MPI.COMM_WORLD.Barrier()
except MPI.Exception as error:
    assert "Init" in str(error)
MPI.Init()
assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
assert MPI.COMM_WORLD.allreduce(1) == 2
assert MPI.COMM_WORLD.Get_parent() == MPI.COMM_NULL
assert MPI.COMM_SELF.allgather(MPI.COMM_WORLD.rank) == [MPI.COMM_WORLD.rank]
MPI.Finalize()
assert MPI.Is_finalized()
"""
    done = run_program(text, 2)
    assert done.returncode == 0, done.stdout + done.stderr


def test_threads_wait_behind_each_other(run_program):
    text = """
import threading
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
other = 1 - comm.rank
got = []
def exchange(tag):
    for n in range(20):
        request = comm.isend((tag, n), other, tag)
        got.append(comm.recv(source=other, tag=tag) == (tag, n))
        request.wait()
threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert got == [True] * 60, got
"""
    done = run_program(text, 2)
    assert done.returncode == 0, done.stdout + done.stderr


def test_cancelled_sends(run_program):
    """Each send is either taken back or received; the words that large ones need run out."""
    text = """
import numpy as np
from mpi4py import MPI
comm, told, status = MPI.COMM_WORLD, MPI.COMM_WORLD.Dup(), MPI.Status()
COUNT, SIZE = 700, 2500
if comm.rank == 0:
    requests = [comm.Isend(np.full(SIZE, 1.0 * n), 1, n) for n in range(COUNT)]
    sent = []
    for n, request in enumerate(requests):
        if n % 2:
            request.Cancel()
        if not (request.Get_status(status) and status.Is_cancelled()):
            sent.append(n)
    assert COUNT // 2 < len(sent) < COUNT, len(sent)
    told.send(sent, 1)
    MPI.Request.Waitall(requests)
else:
    sent, out = told.recv(source=0), np.empty(SIZE)
    for n in sent:
        comm.Recv(out, 0, MPI.ANY_TAG, status)
        assert status.tag == n and out.tolist() == [n] * SIZE
    assert not comm.Iprobe()
comm.Barrier()
"""
    done = run_program(text, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""


def test_messages_to_ranks_that_have_ended(run_program):
    """They are no error of MPI's; a communicator that is freed before tells of them."""
    text = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
freed = comm.Dup()
if comm.rank == 0:
    comm.send("stop", 1)
    freed.send("nobody asks for this", 1)
freed.Barrier()
freed.Free()
"""
    done = run_program(text, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 to rank 1" in done.stderr or "from rank 0" in done.stderr
    assert "MPI_COMM_WORLD" not in done.stderr, done.stderr


def test_arrays_by_dlpack(run_program):
    text = """
import numpy as np
from mpi4py import MPI
class Array:
    def __init__(self, array): self.array = array
    def __dlpack_device__(self): return self.array.__dlpack_device__()
    def __dlpack__(self, **named): return self.array.__dlpack__()
comm = MPI.COMM_WORLD
x, out = np.arange(4.0), np.zeros(4)
comm.Allreduce(Array(x), Array(out))
assert out.tolist() == (2 * x).tolist()
comm.Bcast(Array(out), 1)
"""
    done = run_program(text, 2)
    assert done.returncode == 0, done.stdout + done.stderr
