"""GPU calls that differ, come late or never: every rank hears of it, nothing hangs or is left."""

from __future__ import annotations

import os
import re
import signal
import time

import numpy as np
import pytest
from tests.calls.gpu.conftest import in_rank
from tests.calls.gpu.failing import certainly, counted, ones
from tests.faults.test_ends import errors
from tests.observe.test_report import reporting
from tests.ranks import Ended
from tests.waiting import SOON_S, is_broken, until

from gpucoll.errors import AbortedError, DeadlineError, MismatchError, PeerLostError

# --- different calls ------------------------------------------------------------------------------

OTHERWISE = {
    "shape": lambda comm, kit: comm.all_reduce(ones(kit, 9)),
    "dtype": lambda comm, kit: comm.all_reduce(ones(kit, 8, "int32")),
    "op": lambda comm, kit: comm.all_reduce(ones(kit), "max"),
    "collective": lambda comm, kit: comm.all_gather(ones(kit)),
    "list": lambda comm, kit: comm.all_reduce([ones(kit), ones(kit)]),
    "asynchronous": lambda comm, kit: comm.all_reduce(ones(kit, 9), async_op=True).wait(),
    "plan": lambda comm, kit: comm.plan_all_reduce(ones(kit, 9))(),
}


def call_otherwise(rank, kind):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        different = OTHERWISE[kind] if comm.rank == 1 else OTHERWISE["shape"]
        if kind in ("shape", "asynchronous", "plan") and comm.rank != 1:
            different = lambda comm, kit: comm.all_reduce(ones(kit))  # noqa: E731
        with pytest.raises(MismatchError) as caught:
            certainly(comm, different, comm, kit)
        with pytest.raises(MismatchError):
            comm.all_reduce(ones(kit))
        with pytest.raises(MismatchError):
            comm.all_reduce(np.ones(3))
        return str(caught.value)

    return counted(rank, calls)


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("kind", OTHERWISE)
def test_a_mismatch_is_found_beside_the_call_and_names_the_odd_rank(gpus, kind):
    found = gpus.call_ranks(3, call_otherwise, kind)

    for text in found:
        assert re.search(r"rank 1 called \w+\(.*ranks 0, 2 called all_reduce\(", text), text
        assert "The communicator was aborted: close it" in text


def call_with_another_root(rank, name):
    def calls(comm, kit):
        getattr(comm, name)(ones(kit), root=int(comm.rank == 1))
        comm.check()

    return counted(rank, calls)


@pytest.mark.parametrize("name", ["broadcast", "reduce", "gather", "scatter"])
def test_another_root(gpus, name):
    for error in errors(gpus.replies(2, call_with_another_root, name)):
        assert isinstance(error, MismatchError), error
        assert "root=1" in str(error)
        assert "root=0" in str(error)


def call_in_another_order(rank):
    def calls(comm, kit):
        x, y = ones(kit), ones(kit, 3)
        for array in (x, y) if comm.rank else (y, x):
            comm.all_reduce(array)
        comm.check()

    return counted(rank, calls)


def test_another_order(gpus):
    for error in errors(gpus.replies(2, call_in_another_order)):
        assert isinstance(error, MismatchError), error


def never_meet(rank):
    def calls(comm, kit):
        with rank.control.library_set(connects=1):
            if comm.rank:
                comm.all_to_all(ones(kit))
            else:
                comm.all_reduce(ones(kit))
        comm.check()

    return counted(rank, calls)


def test_a_mismatch_while_the_library_connects_the_ranks(gpus):
    """The library waits for the other rank inside the call: whose lock keeps the monitor out."""
    for error in errors(gpus.replies(2, never_meet)):
        assert isinstance(error, MismatchError), error
        assert "all_to_all" in str(error)


def send_counts_that_differ(rank):
    def calls(comm, kit):
        sent, received = ([1, 2], [1, 1]) if comm.rank == 0 else ([2, 1], [2, 1])
        comm.all_to_all(ones(kit, 3), send_counts=sent, recv_counts=received)
        comm.check()

    return counted(rank, calls)


def test_counts_between_two_ranks_that_differ(gpus):
    for error in errors(gpus.replies(2, send_counts_that_differ)):
        assert isinstance(error, MismatchError), error
        assert "send_counts and recv_counts must agree" in str(error)


def fail_with_report(rank, folder):
    with rank.init() as comm:
        with reporting(folder), pytest.raises(MismatchError) as caught:
            certainly(comm, comm.all_reduce, ones(rank.kit, 8 + comm.rank))
        return str(caught.value)


def test_a_report(gpus, tmp_path):
    texts = gpus.call_ranks(2, fail_with_report, tmp_path)
    (path,) = tmp_path.iterdir()
    assert all(text.endswith(f". Report: {path}") for text in texts), texts
    said = path.read_text()
    assert "the ranks did not make the same call on GPU arrays (#1): " in said
    assert " all_reduce(op=sum, float32, shape (9,)) (#1) on GPU arrays" in said


# --- late, gone -----------------------------------------------------------------------------------


def come_too_late(rank, way):
    def calls(comm, kit):
        comm.all_reduce(ones(kit), timeout_s=20)
        if comm.rank == 1:
            until(lambda: is_broken(comm))
            comm.check()
        if way == "call":
            comm.all_reduce(ones(kit), timeout_s=0.3)
            comm.check()
        elif way == "work":
            comm.all_reduce(ones(kit), async_op=True, timeout_s=0.3).synchronize()
        elif way == "communicator":
            comm.all_reduce(ones(kit))
            comm.close()

    return counted(rank, calls, timeout_s=0.3 if way == "communicator" else 20.0)


@pytest.mark.parametrize("way", ["call", "work", "communicator"])
def test_a_deadline_names_the_late_rank(gpus, way):
    first, late, other = errors(gpus.replies(3, come_too_late, way))

    for error in (first, late, other):
        assert isinstance(error, DeadlineError), error
        assert (
            "rank 1 had not made this call. Rank 1 is in no call of this communicator; the last "
            "collective: all_reduce(op=sum, float32, shape (8,)) (#1) on GPU arrays. Is"
        ) in str(error)
        assert "all_reduce(op=sum, float32, shape (8,)) (#2)" in str(error)
    assert "waited 0.3 s" in str(first) + str(other)


def come_too_late_where_nothing_moves(rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit), timeout_s=20)
        if comm.rank == 1:
            until(lambda: is_broken(comm))
            comm.check()
        comm.all_reduce(ones(kit, 0))
        comm.check()

    return counted(rank, calls, timeout_s=0.5)


def test_a_late_rank_is_found_where_this_ranks_part_is_over(gpus):
    for error in errors(gpus.replies(2, come_too_late_where_nothing_moves)):
        assert isinstance(error, DeadlineError), error
        assert "rank 1 had not made this call" in str(error)


def hang_on_the_gpu(rank):
    def calls(comm, kit):
        with rank.control.library_set(hang_at=2):
            comm.all_reduce(ones(kit), timeout_s=20)
            comm.all_reduce(ones(kit))
            comm.check()

    return counted(rank, calls, timeout_s=0.3)


def test_a_gpu_that_hangs_is_a_deadline(gpus):
    for error in errors(gpus.replies(2, hang_on_the_gpu)):
        assert isinstance(error, DeadlineError), error
        assert "all ranks had made this call, but the GPUs had not finished it" in str(error)


def ask_for_more_scratch_behind_a_hang(rank):
    """Scratch memory that grows is given back first, which waits for the GPU: never in the dark."""

    def calls(comm, kit):
        comm.scan(ones(kit, 16))
        comm.check()
        with rank.control.library_set(hang_at=2):
            comm.all_reduce(ones(kit))
            comm.scan(ones(kit, 5000))

    return counted(rank, calls, timeout_s=0.3)


def test_memory_is_not_given_back_behind_a_call_that_hangs(gpus):
    for error in errors(gpus.replies(2, ask_for_more_scratch_behind_a_hang)):
        assert isinstance(error, DeadlineError), error
        assert "all_reduce(" in str(error)


def fill_the_queue(rank, way):
    """The driver keeps a call whose stream is full, behind one that waits for a rank."""
    if rank.rank == 1:
        with rank.init(device=1) as comm:
            x = ones(rank.kit)
            comm.all_reduce(x, out=x)
            comm.check()
            until(lambda: is_broken(comm))
            comm.check()
    with rank.init(device=0, timeout_s=1.5) as comm:
        x, queue = ones(rank.kit), 8
        plan = comm.plan_all_reduce(x, out=x)
        comm.all_reduce(x, out=x, timeout_s=20)
        out = ones(rank.kit)
        comm.check()
        device = comm._gpu._connected.device
        address, stream = x.data.ptr, rank.kit.stream()
        with stream:
            rank.control.driver_set("queue", queue)
            try:
                plan()  # three pieces: two events, and the work, which never ends
                room = int(way == "scan")  # for its first event: the driver keeps its first copy
                with device:
                    for _ in range(queue - 3 + 1 - room):  # one piece is taken to be run
                        device.fill(address, b"\0", 1, stream.ptr)
                if way == "plan":
                    plan()
                elif way == "scan":
                    comm.scan(x, out=out)
                elif way == "call":
                    comm.all_reduce(x, out=x, stream=stream)
                else:
                    comm.all_reduce(x, out=x, async_op=True)
            finally:
                rank.control.driver_set("queue", 0)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("way", ["plan", "call", "asynchronous", "scan"])
def test_a_call_that_the_driver_keeps_is_ended(gpus, way):
    late, ended = errors(gpus.replies(2, fill_the_queue, way))
    assert isinstance(late, DeadlineError), late
    assert isinstance(ended, AbortedError | DeadlineError), ended


def be_killed(rank, when):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        comm.check()
        comm.barrier()  # a rank that still connects would lose another call
        if comm.rank == 1:
            if when == "after":
                comm.all_reduce(ones(kit))  # posted, but it may not be done
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        comm.all_reduce(ones(kit))
        try:
            comm.check()
        finally:
            assert time.monotonic() - begun < SOON_S

    return counted(rank, calls)


def test_a_lost_rank(rank_server, gpus):
    with rank_server.fork(3) as pool:
        arguments = gpus.double, be_killed, ("before",)
        pool.start(in_rank, *arguments, gives="seat", environment=gpus.variables)
        first, killed, last = pool.collect()

    assert isinstance(killed, Ended)
    for reply in (first, last):
        assert isinstance(reply.error, PeerLostError), reply
        assert re.search(r"lost rank 1 in all_reduce\(.*\(#2\)", str(reply.error))
        assert "ended without closing" in str(reply.error)


def close_early(rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        if comm.rank == 1:
            comm.close()
            return
        comm.all_reduce(ones(kit))
        comm.check()

    return counted(rank, calls)


def test_a_rank_that_closes_early(gpus):
    first, second = gpus.replies(2, close_early)

    assert second.error is None
    assert isinstance(first.error, PeerLostError), first.error
    assert "it closed the communicator" in str(first.error)


def leave_in_peace(rank):
    def calls(comm, kit):
        for _ in range(3):
            y = comm.all_reduce(ones(kit))
        if comm.rank == 0:
            until(lambda: comm._group.members.has_closed(1))
        comm.check()
        return kit.read(y).tolist()

    return counted(rank, calls)


def test_a_rank_that_closes_when_all_is_done_is_no_loss(gpus):
    assert gpus.call_ranks(2, leave_in_peace) == [[2.0] * 8] * 2
