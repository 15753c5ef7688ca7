"""What ranks under an MPI's mpiexec do with GPU arrays: ``gpu_program.py NAME...``, as `program`.

The GPUs are Host devices, whose memory is the host's: so real MPIs can be given its addresses.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np
from mpi4py import MPI
from tests.backends.mpi.program import WORLD, gpu_arrays, made
from tests.calls.gpu import cupy_double
from tests.calls.gpu.cases import run_cases
from tests.calls.gpu.kits import CupyKit, HostDeviceKit
from tests.calls.gpu.test_direct import cases_of, large
from tests.collective_cases import MOVEMENTS, REDUCTIONS
from tests.doubles import CUDA, HIP

import gpucoll
from gpucoll.arrays.operands import prepare
from gpucoll.backends.direct import backend as direct_backend
from gpucoll.backends.direct import kernel_reductions, through_mpi
from gpucoll.backends.direct.pieces import SLOT_BYTES
from gpucoll.backends.mpi import gpu_aware
from gpucoll.backends.mpi.words import MpiWords
from gpucoll.backends.protocol import Request
from gpucoll.collectives import Collective
from gpucoll.devices import open_device
from gpucoll.testing import device_arrays, host_device

DRIVERS = {"cuda": CUDA, "rocm": HIP}


def kit_of(comm) -> HostDeviceKit:
    kit = HostDeviceKit(device_arrays)
    kit.use(comm.rank)
    return kit


def connected(comm):
    """Return the direct backend of a communicator that has made a call."""
    return comm._gpu._connected.backend


def array(kit, values):
    values = np.asarray(values, np.int32)
    return kit.seen_as(kit.bytes_of(values.view(np.uint8)), values.shape, values.dtype)


def cases(n_cases: int = 16) -> None:
    """The common body of cases: what is moved by MPI between the devices, small sums staged."""
    with made() as comm:
        kit = kit_of(comm)
        size = comm.world_size
        run_cases(comm, kit, [case for name in MOVEMENTS for case in cases_of(name, size, n_cases)])
        run_cases(comm, kit, [case for name in REDUCTIONS for case in cases_of(name, size, 3)])
        facts, backend = comm.describe().facts, connected(comm)
        assert "through MPI" in facts["GPU arrays"], facts
        assert "MPI's messages between the GPUs" in facts["GPU path through MPI"], facts
        address = backend.slots_for_mpi.for_host(0)[0]
        assert backend.device.device_of(address) == backend.device.number


def by_kernels() -> None:
    """Reductions by kernels between movements of MPI's: all but the smallest, and user's ops."""
    kernel_reductions.STAGED_BYTES = 100
    with made() as comm:
        kit, size = kit_of(comm), comm.world_size
        run_cases(comm, kit, [case for name in REDUCTIONS for case in cases_of(name, size, 12)])
        how = comm.describe().facts["GPU path through MPI"]
        assert "reductions by the GPUs' kernels" in how, how
        kinds = [type(connected(comm).prepare(sum_of(kit, n))).__name__ for n in (25, 26)]
        assert kinds == ["StagedCall", "ComposedLaunch"], kinds


def sum_of(kit, count) -> Request:
    """Return an all_reduce that nobody makes."""
    both = prepare(array(kit, np.ones(count)), None)
    op = gpucoll.ReduceOp.parse("sum")
    return Request(Collective.ALL_REDUCE, both.source, both.destination, op)


def between_hosts() -> None:
    """Several hosts, and communicators made of others."""
    cases(6)
    gpu_arrays()


def rings() -> None:
    """Between hosts whose MPI takes no GPU addresses, GPUs reduce around rings."""
    with made() as comm:
        kit, count = kit_of(comm), 400_003
        mine = [np.arange(count) % 1000 + rank for rank in range(comm.world_size)]
        total = np.sum(mine, axis=0)
        assert (kit.read(comm.all_reduce(array(kit, mine[comm.rank]))) == total).all()
        blocks = array(kit, np.tile(mine[comm.rank], comm.world_size))
        assert (kit.read(comm.reduce_scatter(blocks)) == total).all()
        comm.check()
        assert "2 hosts" in comm.describe().facts["GPU path between hosts"]


def pieces() -> None:
    """Arrays of several pieces, the copies of which are late."""
    setattr(through_mpi, "GPU_SLOT_BYTES", SLOT_BYTES)  # noqa: B010  # it is imported there
    with made() as comm:
        kit = kit_of(comm)
        with host_device.delayed("copy", 0.005, comm.rank):
            large(comm, kit)


def streams() -> None:
    """A call only enqueues; MPI waits for the stream, and what comes behind it for MPI."""
    count = 70_000
    with made() as comm:
        kit, root = kit_of(comm), comm.world_size - 1
        x, y = array(kit, np.zeros(count)), array(kit, np.full(count, -1))
        comm.broadcast(x, root, out=y)
        comm.check()
        stream = kit.stream()
        with stream, host_device.held(kit.handle(stream), comm.rank):
            x.set(np.full(count, comm.rank + 7, np.int32))
            comm.broadcast(x, root, out=y)
            x.set(np.zeros(count, np.int32))
            work = comm.broadcast(x, root, out=x, async_op=True)
            z = y.copy()
            assert not work.done()
        stream.synchronize()
        assert (kit.read(z) == root + 7).all()
        work.synchronize()
        assert (kit.read(x) == 0).all()
        comm.check()
        stream.close()


def staged() -> None:
    """What the environment of one rank keeps from MPI, on all."""
    if WORLD.rank == 1:
        os.environ["GPUCOLL_MPI_GPU_ARRAYS"] = "staged"
    with made() as comm:
        kit = kit_of(comm)
        run_cases(comm, kit, [case for name in MOVEMENTS for case in cases_of(name, 2, 4)])
        how = comm.describe().facts["GPU path through MPI"]
        assert how.startswith("staged through page-locked host memory: MPI of rank 1"), how
        assert "GPUCOLL_MPI_GPU_ARRAYS=staged" in how, how
        assert connected(comm).slots_for_mpi is None


def left_with_requests() -> None:
    """MPI does not end what it has begun: the memory that it may still write is kept."""
    try:
        give_up_in_mpi()
        print("as expected", flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    WORLD.Barrier()  # both have said so: mpiexec ends the other when one is gone
    os._exit(0)  # MPI's end would wait for what was given up


def give_up_in_mpi() -> None:
    comm = made(on_async_error="raise")
    kit = kit_of(comm)
    x = array(kit, [comm.rank] * 3)
    comm.all_gather(x)
    comm.check()
    backend = connected(comm)
    if comm.rank:  # all agree on the call, but this rank never makes it through MPI
        backend.inner.backend.prepare = backend.inner.backend._host.prepare
        comm.all_gather(x)
        WORLD.Barrier()
        comm._give_up()
        return
    words = backend.inner.backend.memory.words(True).words
    comm.all_gather(x)
    while not words[MpiWords.n_requests]:
        time.sleep(0.001)
    comm._give_up()
    assert backend.inner.is_given_up
    assert backend.slots_for_mpi.for_host(0)[0], "given back, and MPI may still write it"
    assert backend in direct_backend._left_in_use
    WORLD.Barrier()


def trial() -> None:
    """A trial of each rank's, in a process that is no rank, whatever job this one belongs to."""
    gpu_aware._FOLDER = os.environ["GPUCOLL_TEST_FOLDER"]
    device = host_device.device(WORLD.rank)
    assert gpu_aware.tried(MPI, device, 60.0) == ""
    kept = gpu_aware._path(MPI, device)
    assert kept is not None
    assert kept.exists()
    program, gpu_aware.PROGRAM = gpu_aware.PROGRAM, (sys.executable, "-c", "raise SystemExit(3)")
    assert gpu_aware.tried(MPI, device, 60.0) == "", "it was not kept"
    kept.unlink()
    problem = gpu_aware.tried(MPI, device, 60.0)
    assert problem.startswith("a trial of it ended with code 3"), problem
    gpu_aware.PROGRAM = program
    assert gpu_aware.tried(MPI, device, 60.0) == problem, "it was not kept"
    kept.unlink()


def doubled() -> None:
    """GPUs of a vendor, through the double of its driver: MPI says so, is tried, and is used."""
    folder = os.environ["GPUCOLL_TEST_DOUBLES"]
    kind, says = os.environ["GPUCOLL_GPU_KIND"], os.environ["GPUCOLL_TEST_SAYS"]
    driver = ctypes.CDLL(str(Path(folder, DRIVERS[kind])), mode=ctypes.RTLD_GLOBAL)
    n_hosts = len({*os.environ.get("GPUCOLL_TEST_HOSTS", "a")})
    said_by = gpu_aware.said_by
    gpu_aware.said_by = lambda library, kind, said=says: said_by(ctypes.CDLL(said), kind)  # type: ignore[misc]
    gpu_aware._FOLDER = os.environ["GPUCOLL_TEST_FOLDER"]
    kit = CupyKit(cupy_double.install(kind))
    kernel_reductions.STAGED_BYTES = 100
    with made() as comm:
        kit.use(comm.rank)
        size = comm.world_size
        run_cases(comm, kit, [case for name in MOVEMENTS for case in cases_of(name, size, 6)])
        run_cases(comm, kit, [case for name in REDUCTIONS for case in cases_of(name, size, 4)])
        how = comm.describe().facts["GPU path through MPI"]
        assert how.startswith("movements by MPI's messages between the GPUs"), how
        assert "says yes, and a trial has shown it" in how, how
        backend = connected(comm)
        assert backend.device.device_of(backend.slots_for_mpi.for_host(1)[1]) == comm.rank
    results = [name for name in os.listdir(gpu_aware._FOLDER) if not name.endswith(".lock")]
    assert len(results) == n_hosts, "one rank of each host tries"
    if kind == "cuda":
        assert (driver.double_get(b"flushes") > 0) == (n_hosts > 1)


def on_gpu() -> None:
    """The machine's own GPU and its own MPI, one rank: asked, tried whatever it says, used."""
    import cupy

    kind = "rocm" if cupy.cuda.runtime.is_hip else "cuda"
    problem = gpu_aware.tried(MPI, open_device(kind, 0), 60.0)
    print(f"{MPI.Get_library_version().splitlines()[0]}: {gpu_aware.asked(MPI, kind).why}")
    print(f"a trial: {problem or 'passed'}")
    kit = CupyKit(cupy)
    for setting in ("auto", "staged", "trusted")[: 2 if problem else 3]:
        os.environ["GPUCOLL_MPI_GPU_ARRAYS"] = setting
        kernel_reductions.STAGED_BYTES = 100
        with made() as comm:
            kit.use(0)
            run_cases(comm, kit, [case for name in MOVEMENTS for case in cases_of(name, 1, 12)])
            run_cases(comm, kit, [case for name in REDUCTIONS for case in cases_of(name, 1, 12)])
            print(f"{setting}: {comm.describe().facts['GPU path through MPI']}")
            assert setting != "trusted" or connected(comm).slots_for_mpi is not None


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
    print(f"rank {WORLD.rank} has ended well", flush=True)
