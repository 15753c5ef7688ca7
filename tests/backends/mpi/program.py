"""What ranks under an MPI's mpiexec run, by names of functions here: ``program.py NAME...``.

The ranks of a host of their own: ``GPUCOLL_TEST_HOSTS=aab`` says by rank who is on which.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from random import Random

if places := os.environ.get("GPUCOLL_TEST_HOSTS"):
    rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    os.environ["GPUCOLL_HOST_ID"] = f"host {places[rank]}"
    os.environ["GPUCOLL_INTERFACES"] = "lo"

import mpi4py

if level := os.environ.get("GPUCOLL_TEST_THREADS"):
    mpi4py.rc.thread_level = level

import numpy as np
import pytest
from mpi4py import MPI
from tests.api import test_random_messages
from tests.collective_cases import COLLECTIVES, COUNTED, REDUCTIONS, Case, draw, run_cases
from tests.dtypes import covering
from tests.group.world.test_message_ends import arrive_beside_work, receive_from_both_kinds
from tests.group.world.test_messages import cases as message_cases
from tests.waiting import is_broken, until

import gpucoll
from gpucoll.arrays.operands import prepare
from gpucoll.backends.cpu.wires.words import Wire, Wires
from gpucoll.backends.mpi import backend, ranks
from gpucoll.backends.protocol import Request
from gpucoll.collectives import Collective

WORLD = MPI.COMM_WORLD
OPERATIONS = covering()


def made(**given):
    return gpucoll.Communicator.from_mpi(WORLD, **{"backend": "mpi", "timeout_s": 60.0, **given})


def drawn_cases(world_size: int, counts: tuple[int, ...], n_cases: int) -> list[Case]:
    """Return cases of every collective: the same on all ranks."""
    random, cases = Random(world_size), []
    for place, (dtype, op) in enumerate(OPERATIONS[: 2 * n_cases]):
        name = REDUCTIONS[place % len(REDUCTIONS)]
        cases.append(
            draw(random, name, world_size, dtype=dtype, op=op, count=random.choice(counts))
        )
    for place in range(n_cases):
        name = COLLECTIVES[place % len(COLLECTIVES)]
        given = {"op": "sum"} if name in REDUCTIONS else {}
        if name in COUNTED:
            given["counts"] = random.choice(("", "even", "none", "one", "gaps", "steep"))
        dtype = random.choice(("int8", "float64", "float16", "complex64"))
        cases.append(
            draw(random, name, world_size, dtype=dtype, count=random.choice(counts), **given)
        )
    return cases


def cases() -> None:
    """The common body of cases, small and large."""
    with made() as comm:
        assert comm.describe().facts["host arrays"] == "backend mpi: asked for"
        size = comm.world_size
        run_cases(comm, drawn_cases(size, (0, 1, 3, 17, 700, 2500), 90))
        run_cases(comm, drawn_cases(size, (20_000, 70_001), 12))
        large = [Case("float16", 5_000_000, op="sum"), Case("int64", 1_500_000, op="avg")]
        run_cases(comm, [*large, Case("float32", 1_500_000, op="max", collective="scan")])


def met_by_init() -> None:
    """Ranks on several hosts, told of neither a meeting point nor a secret."""
    with gpucoll.init(timeout_s=60.0) as comm:
        facts = comm.describe().facts
        assert (
            facts["host arrays"] == "backend mpi: chosen by auto: made from MPI, on several hosts"
        )
        assert comm.all_reduce(np.ones(100_000))[-1] == comm.world_size == WORLD.size
    with gpucoll.Communicator.from_mpi(WORLD, backend="cpu") as comm:
        assert comm.all_reduce(np.ones(100_000))[-1] == WORLD.size


def pieces() -> None:
    """The same where no message may have more than a thousand bytes, as if they were 2^31."""
    backend.MOST_BYTES = 1000
    with made() as comm:
        run_cases(comm, drawn_cases(comm.world_size, (0, 3, 700, 2500), 60))


def as_among_many() -> None:
    """The same where MPI reduces all that it can, as among many ranks; and that in pieces, too."""
    backend.FEW_RANKS = 0
    cases()
    pieces()


def calls() -> None:
    """What is no collective on one array."""
    with made() as comm:
        size = comm.world_size
        for array in comm.all_reduce([np.ones(3), np.ones((2, 2))]):
            assert (array == size).all()
        works = [comm.all_reduce(np.full(4, i), async_op=True) for i in range(8)]
        assert [work.wait()[0] for work in works] == [size * i for i in range(8)]
        assert comm.all_gather_object({"rank": comm.rank}) == [{"rank": r} for r in range(size)]
        mark = os.urandom(16).hex()  # was in no memory before
        assert comm.all_gather_object(mark)[comm.rank] == mark
        is_one_host = not hasattr(comm._group, "hosts")
        assert is_one_host or comm._group.object_key, "nothing else protects what MPI carries"
        assert comm.all_gather(np.ones(comm.rank), counts="auto").size == size * (size - 1) // 2
        assert comm.all_reduce(np.ones(9000, np.float32), compression="int8_block")[0] == size
        with comm.duplicate() as same, comm.split(comm.rank % 2) as part:
            assert same.all_reduce(1) == size
            assert part.all_reduce(np.ones(70_000))[-1] == part.world_size
            assert "mpi" in part.describe().facts["host arrays"]
        record = np.zeros(3, [("a", "i4"), ("b", "f8")])
        record["b"] = comm.rank
        assert (comm.broadcast(record, size - 1)["b"] == size - 1).all()
        if size > 1:
            to, origin = (comm.rank + 1) % size, (comm.rank - 1) % size
            assert comm.send_recv(np.full(3, comm.rank), to, origin)[0] == origin
        comm.barrier()


def messages() -> None:
    """The common body of messages, each over a communicator of its own."""
    placed = os.environ["GPUCOLL_TEST_HOSTS"]
    n_cases = 0
    for function, given, where in (case.values for case in message_cases()):
        if where == placed:
            with made() as comm:
                function(comm, **given)
            n_cases += 1
    assert n_cases > 2
    many_at_once()
    traffic()


def many_at_once() -> None:
    """Small messages for a rank that calls nothing are taken many at a time, not one by one."""
    count, last = 6000, WORLD.size - 1
    with made() as comm:
        if comm.rank in {0, last}:
            comm.send_recv(np.ones(1), last - comm.rank, last - comm.rank)  # connects
        if comm.rank == last:
            for number in range(count):
                comm.send(np.full(1, number), 0)
        wires = comm._backend.messages._thread.wires
        n_steps = int(wires.words[Wires.n_steps])
        WORLD.Barrier()  # there MPI goes on: each send ends before the next one begins
        if comm.rank == 0:
            until(lambda: wires.wires[0].words[Wire.came_bytes] > 64 * count)
            assert wires.words[Wires.n_steps] - n_steps < count / 10
            out = np.zeros(1, int)
            assert [int(comm.recv(out, last)[0]) for _ in range(count)] == [*range(count)]


def traffic() -> None:
    """Messages of all kinds and sizes, whoever they are from."""
    with made() as comm:
        assert comm.describe().facts["messages"].endswith("between hosts through MPI")
        assert test_random_messages.run_traffic(comm, 7) == comm.world_size
        receive_from_both_kinds(comm)


def message_ends() -> None:
    """What ends a wait for a message between hosts, and what is left behind."""
    with made() as comm:
        if comm.world_size == 2:
            arrive_beside_work(comm)
    comm = made()
    if comm.rank:
        comm.send(np.full(5, comm.rank), 0, comm.rank)
        comm.close()  # what was sent stays
    else:
        until(lambda: all(map(comm._group.has_closed, range(1, comm.world_size))))
        for rank in range(comm.world_size - 1, 0, -1):
            assert comm.recv(np.zeros(5, int), rank, rank)[-1] == rank
        comm.close()
    for limit_s, large in ((0.3, False), (2.0, True)):
        comm = made()
        comm._group.timeout_s = limit_s  # now, so that it does not hold for the meeting, too
        last = comm.world_size - 1
        if comm.rank == 0:
            with pytest.raises(gpucoll.DeadlineError, match=f"rank 0 of .* waited {limit_s:g} s"):
                exchange_in_vain(comm, last, 20_000_000 if large else 8)
        else:
            until(lambda comm=comm: is_broken(comm))
        comm._give_up()


def exchange_in_vain(comm, dest: int, count: int) -> None:
    """Send, and receive what nobody sends."""
    comm.send(np.zeros(count), dest)
    comm.recv(np.zeros(1), dest)


def gpu_arrays() -> None:
    """Arrays of Host devices, which play GPUs: staged, and moved by MPI."""
    from gpucoll.testing import device_arrays

    with made() as comm:
        facts = comm.describe().facts
        assert "direct, whose ranks move arrays through MPI" in facts["GPU arrays"], facts
        for count in (3, 300_000):
            mine = device_arrays.asarray(np.full(count, comm.rank, np.float32))
            total = comm.all_reduce(mine)
            gathered = comm.all_gather(mine)
            with comm.split(0, -comm.rank) as turned:
                again = turned.broadcast(mine, 0)
                turned.check()
                assert again.get()[-1] == comm.world_size - 1
            comm.check()
            assert total.get()[-1] == sum(range(comm.world_size))
            assert gathered.get()[::count][-1] == comm.world_size - 1


def beside() -> None:
    """MPI and several communicators of its ranks, in turn."""
    backwards = WORLD.Split(0, -WORLD.rank)
    for _ in range(3):
        with made(backend="auto") as comm, gpucoll.Communicator.from_mpi(backwards) as turned:
            assert turned.rank == WORLD.size - 1 - WORLD.rank
            assert comm.all_reduce(1) == WORLD.allreduce(1) == turned.all_reduce(1)
    with gpucoll.Communicator.from_mpi(MPI.COMM_SELF, backend="mpi") as alone:
        assert alone.all_reduce(np.full(3, 2.0)).tolist() == [2.0] * 3
    backwards.Free()
    comm = gpucoll.init(backend="mpi")
    kept = gpucoll.Communicator.from_mpi(WORLD)
    assert comm.all_reduce(1) == WORLD.size
    following, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    assert comm.send_recv(np.full(9000, comm.rank), following, before)[-1] == before
    WORLD.Barrier()
    MPI.Finalize()
    with pytest.raises(gpucoll.StateError, match="MPI was finalised"):
        comm.all_reduce(np.ones(3))
    if "cpu" in kept.describe().facts["host arrays"]:
        assert kept.all_reduce(1) == kept.world_size
    kept.close()
    comm.close()


def mismatch() -> None:
    """Ranks that do not agree are told, and go on."""
    with made() as comm:
        for count in (3, 100_000):
            mine = np.ones(count + comm.rank // (comm.world_size - 1))
            with pytest.raises(gpucoll.MismatchError, match=rf"shape \({count + 1},\)"):
                comm.all_reduce(mine)
            assert comm.all_reduce(np.ones(count))[-1] == comm.world_size


def other_calls() -> None:
    """A rank calls something else, small or large: all are told who and what, and go on."""
    with made() as comm:
        for odd in (1, comm.world_size - 1):  # on another host than rank 0, or maybe not
            for count in (3, 3_800, 100_000):  # 30 KB from each root are small
                call_something_else(comm, odd, count)


def call_something_else(comm, odd: int, count: int) -> None:
    x, other_count, is_odd = np.ones(count), 100_003 - count, comm.rank == odd
    calls = {
        rf"all_reduce\(op=max, float64, shape \({count},": lambda: comm.all_reduce(
            x, op="max" if is_odd else "sum"
        ),
        r"all_reduce\(op=sum, float32,": lambda: comm.all_reduce(
            x.astype(np.float32) if is_odd else x
        ),
        rf"all_reduce\(op=sum, float64, shape \({other_count},": lambda: comm.all_reduce(
            np.ones(other_count) if is_odd else x
        ),
        rf"broadcast\(float64, shape \({count},\), root=1": lambda: comm.broadcast(x, int(is_odd)),
        r"all_gather\(": lambda: (comm.all_gather if is_odd else comm.all_reduce)(x),
        r"barrier\(": lambda: comm.barrier() if is_odd else comm.all_reduce(x),
        r"broadcast_object\(": lambda: comm.broadcast_object(1) if is_odd else comm.all_reduce(x),
    }
    for text, call in calls.items():
        with pytest.raises(gpucoll.MismatchError, match=rf"rank {odd} called {text}"):
            call()
        assert comm.all_reduce(x)[-1] == comm.world_size
    for text in ("scan", "all_reduce"):  # the two in another order
        is_mine = is_odd == (text == "scan")
        with pytest.raises(gpucoll.MismatchError, match=rf"rank {odd} called {text}\("):
            (comm.scan if is_mine else comm.all_reduce)(x)
    assert comm.all_reduce(x)[-1] == comm.world_size


def late() -> None:
    """A rank that does not come, once for good and once stopped: the others end in time."""
    for count, stops in ((3, False), (100_000, False), (3, True), (100_000, True)):
        comm = made()
        pids = comm.all_gather_object(os.getpid())
        x = np.ones(count)
        comm.all_reduce(x)
        if comm.rank:
            with pytest.raises(gpucoll.DeadlineError, match="rank 0"):
                comm.all_reduce(x, timeout_s=0.3)
            os.kill(pids[0], signal.SIGCONT)
        elif comm.world_size > 1:
            if stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            elif count == 3:  # it calls something that is no collective
                comm.send(x, 1)
            while not comm._group.is_aborted:
                time.sleep(0.01)
        comm._give_up()


def leave() -> None:
    """End without MPI's end, for which some mpiexecs kill the ranks that are still there."""
    print("as expected", flush=True)
    WORLD.Barrier()  # all have said so
    os._exit(0)


def make_no_sum(comm, x: np.ndarray) -> None:
    """Agree on the all_reduce of such an array, and never make it through MPI."""
    both = prepare(x, x)
    op = gpucoll.ReduceOp.parse("sum")
    request = Request(Collective.ALL_REDUCE, both.source, both.destination, op)
    comm._backend._host.prepare(request).run()


def interrupts() -> None:
    sender = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    sender.start()


def given_up() -> None:
    """MPI does not end what it has begun: the call does, in time, and its memory is kept."""
    x = np.ones(3)
    for error, before in ((gpucoll.DeadlineError, time.time), (KeyboardInterrupt, interrupts)):
        comm = made(timeout_s=1.0 if error is gpucoll.DeadlineError else 60.0)
        comm.all_reduce(x, out=x)  # the next one goes in one compiled step
        if comm.rank:
            make_no_sum(comm, x)
            comm._give_up()
            continue
        backend, n_known = comm._backend, sys.getrefcount(x)
        with pytest.raises(error):  # noqa: PT012
            before()
            comm.all_reduce(x, out=x)
        assert backend.memory.is_given_up
        comm._give_up()
        del comm, backend
        gc.collect()
        assert sys.getrefcount(x) > n_known, f"nobody keeps what MPI may still write: {error}"
    leave()  # MPI's end would wait for it


def given_up_tensor() -> None:
    """The same of a result that the call itself makes."""
    import torch

    WORLD.Barrier()  # how long the import takes is not what the short deadline is for
    comm, x = made(timeout_s=1.0), torch.ones(3)
    comm.all_reduce(x)
    if comm.rank:
        make_no_sum(comm, np.ones(3, np.float32))
    else:
        with pytest.raises(gpucoll.DeadlineError, match="all_reduce"):
            comm.all_reduce(x)
        kept = [held for held in ranks._left_behind if type(held) is tuple and held[0] is x]
        assert [type(out) for _, out in kept] == [torch.Tensor], kept
    leave()


def given_up_between_hosts() -> None:
    """The same of a large call: every rank has come to it, but for one MPI is never asked."""
    comm = made()
    x, exchanges = np.ones(100_000), comm._group.exchanges
    if comm.rank:
        skips = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(lambda *_: 0)
        exchanges.words.large = ctypes.cast(skips, ctypes.c_void_p).value
        comm.all_reduce(x, out=x)
    else:
        with pytest.raises(gpucoll.DeadlineError, match=r"all ranks had begun .* not come through"):
            comm.all_reduce(x, out=x, timeout_s=0.5)
        assert comm._backend._memory.is_given_up
        comm._give_up()
        del comm
        gc.collect()
        assert sys.getrefcount(x) > 2, "nobody keeps what MPI may still write"
    leave()


def killed() -> None:
    """A rank that is gone: the others say which, where their mpiexec lets them."""
    comm = made()
    comm.all_reduce(np.ones(100_000))
    comm.all_reduce(np.ones(3))
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            comm.all_reduce(np.ones(3))
            comm.all_reduce(np.ones(100_000))
    except gpucoll.PeerLostError as error:
        print(f"rank {comm.rank}: {error}", flush=True)
    comm.close()
    os._exit(3)


def refused() -> None:
    """What cannot be, said on every rank."""
    comm = WORLD.Split(WORLD.rank % 2)
    other = 1 - WORLD.rank % 2
    between = comm.Create_intercomm(0, WORLD, other)
    expected = [
        (lambda: gpucoll.Communicator.from_mpi(between), gpucoll.ArgumentTypeError, r"Merge\(\)"),
        (lambda: gpucoll.Communicator.from_mpi(MPI.COMM_NULL), gpucoll.ArgumentError, "COMM_NULL"),
        (lambda: gpucoll.Communicator.from_mpi(3), gpucoll.ArgumentTypeError, "MPI.COMM_WORLD"),
        (
            lambda: gpucoll.init(backend="mpi", rank=0, world_size=1),
            gpucoll.ArgumentError,
            "omit rank",
        ),
    ]
    for call, kind, text in expected:
        with pytest.raises(kind, match=text):
            call()
    if WORLD.rank == 0:  # alone: the others never call it
        with pytest.raises(gpucoll.RendezvousDeadlineError, match="not every rank"):
            gpucoll.Communicator.from_mpi(WORLD, timeout_s=0.3)
    leave()  # MPI's end would wait for what only one rank has begun


def threads() -> None:
    """MPI that was initialised for one thread alone."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        with pytest.raises(gpucoll.BackendUnavailableError, match="MPI_THREAD_"):
            made()
    with gpucoll.Communicator.from_mpi(WORLD, timeout_s=30.0) as comm:  # needs no threads of MPI's
        assert comm.all_reduce(1) == WORLD.size


if __name__ == "__main__":
    if sys.argv[1] == "bench":
        from gpucoll.bench.cli import main

        sys.exit(main(sys.argv[2:]))
    try:
        for name in sys.argv[1:]:
            globals()[name]()
    except Exception:  # MPI's end would wait for the others, and they for this rank
        traceback.print_exc()
        os._exit(1)
    print(f"rank {WORLD.rank if not MPI.Is_finalized() else '?'} has ended well", flush=True)
