"""What ends a call on GPU arrays, and that every rank hears of it: nothing hangs or is left."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time

import numpy as np
import pytest
from tests.faults.test_ends import SOON_S, errors, is_broken, until
from tests.gpu.conftest import in_rank, left_on_gpu
from tests.ranks import Ended

from gpucoll.errors import (
    AbortedError,
    BackendError,
    DeadlineError,
    GpucollError,
    MismatchError,
    PeerLostError,
    StateError,
)
from gpucoll.transport.layout import Record

FLOAT32 = np.dtype("float32")


def ones(kit, count=8, dtype="float32"):
    return kit.seen_as(kit.bytes_of(np.ones(count, dtype).view(np.uint8)), (count,), dtype)


def counted(rank, function, *args, gives_back=True, **options):
    """Call ``function(comm, kit, *args)``; nothing of the library may be left, however it ends.

    On the GPU neither, where that still takes orders (`gives_back`).
    """
    ones(rank.kit)  # the first array makes the double's default streams
    before = left_on_gpu(rank)
    try:
        with rank.init(meet_s=20, **options) as comm:
            return function(comm, rank.kit, *args)
    finally:
        if rank.control is not None:
            assert rank.control.communicators == 0
            assert not gives_back or left_on_gpu(rank) == before
        names = [thread.name for thread in threading.enumerate()]
        assert "gpucoll-gpu" not in names


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


def certainly(comm, call, *args, **options):
    """Make a call, and wait until it has succeeded; where it is held up it finds out by itself."""
    call(*args, **options)
    comm.check()


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
    """The library waits for the other rank inside the call: whose lock keeps the watcher out."""
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


# --- late, gone -----------------------------------------------------------------------------------


def come_too_late(rank, way):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
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
        assert "rank 1 had not made this call" in str(error)
        assert "all_reduce(op=sum, float32, shape (8,)) (#2)" in str(error)
    assert "waited 0.3 s" in str(first) + str(other)


def come_too_late_where_nothing_moves(rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
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
            comm.all_reduce(ones(kit))
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
        comm.all_reduce(x, out=x)
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


@pytest.mark.parametrize("way", ["plan", "call", "asynchronous", "scan"])
def test_a_call_that_the_driver_keeps_is_ended(gpus, way):
    late, ended = errors(gpus.replies(2, fill_the_queue, way))
    assert isinstance(late, DeadlineError), late
    assert isinstance(ended, AbortedError | DeadlineError), ended


def be_killed(rank, when):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        comm.check()
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


# --- errors of the library and the GPU ------------------------------------------------------------


def fail_at_call(rank, code):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        comm.check()
        if comm.rank == 1:
            rank.control.fail_at(1, code, "ncclAllReduce")
        comm.all_reduce(ones(kit))
        comm.check()

    try:
        return counted(rank, calls)
    finally:
        rank.control.fail_at(0, 0)


@pytest.mark.parametrize("code", [1, 2, 3, 5, 6])
def test_an_error_of_the_library_at_one_rank(gpus, code):
    other, failed = errors(gpus.replies(2, fail_at_call, code))

    expected = PeerLostError if code == 6 else BackendError
    assert isinstance(failed, expected), failed
    assert f"code {code} of NCCL" in str(failed)
    assert isinstance(other, AbortedError), other
    assert "the GPU library of rank 1 failed in all_reduce(" in str(other)


def fail_beside(rank, on_rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        with rank.control.library_set(async_error_at=2 if comm.rank == on_rank else 0):
            comm.all_reduce(ones(kit))
            comm.check()

    return counted(rank, calls)


def test_an_asynchronous_error(gpus):
    other, failed = errors(gpus.replies(2, fail_beside, 1))

    assert isinstance(failed, PeerLostError), failed
    # Found by who looks, or by the call itself, which asks whether its work is on the stream.
    assert re.search("an asynchronous error|ncclAllReduce", str(failed)), failed
    assert isinstance(other, AbortedError | PeerLostError), other


def go_on_in_progress(rank):
    with rank.control.library_set(polls=5):

        def calls(comm, kit):
            results = [kit.read(comm.all_reduce(ones(kit))).tolist() for _ in range(3)]
            with comm.group():
                grouped = [comm.all_reduce(ones(kit)), comm.broadcast(ones(kit))]
            comm.check()
            return results, [kit.read(x).tolist() for x in grouped]

        return counted(rank, calls)


def test_what_is_in_progress_is_polled(gpus):
    expected = ([[3.0] * 8] * 3, [[3.0] * 8, [1.0] * 8])
    assert gpus.call_ranks(3, go_on_in_progress) == [expected] * 3


def interrupt_a_group(rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        backend = comm._gpu._connected.backend

        def interrupt(call):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            backend._enqueue_group(map(interrupt, range(1)))
        result = comm.all_reduce(ones(kit))
        comm.check()
        return kit.read(result).tolist()

    return counted(rank, calls)


def test_a_group_that_is_interrupted_is_ended(gpus):
    assert gpus.call_ranks(2, interrupt_a_group) == [[2.0] * 8] * 2


def connect_at_the_first_call(rank):
    def calls(comm, kit):
        with rank.control.library_set(connects=1):
            results = [comm.all_reduce(ones(kit)) for _ in range(3)]
            comm.check()
        return [kit.read(x).tolist() for x in results]

    return counted(rank, calls)


def test_a_first_call_that_waits_for_the_other_ranks(gpus):
    assert gpus.call_ranks(3, connect_at_the_first_call) == [[[3.0] * 8] * 3] * 3


def leave_before_the_first_call(rank):
    def calls(comm, kit):
        with rank.control.library_set(connects=1):
            if comm.rank:
                os._exit(3)
            comm.all_reduce(ones(kit))
        comm.check()

    return counted(rank, calls, device=rank.rank)


def test_a_rank_that_is_lost_while_the_library_connects_it(rank_server, gpus):
    with rank_server.fork(2) as pool:
        arguments = gpus.double, leave_before_the_first_call, ()
        pool.start(in_rank, *arguments, gives="seat", environment=gpus.variables)
        reply, left = pool.collect()

    assert isinstance(left, Ended)
    assert isinstance(reply.error, PeerLostError), reply


def stay_in_progress(rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        comm.check()
        with rank.control.library_set(polls=10**9):
            comm.all_reduce(ones(kit))

    return counted(rank, calls, timeout_s=0.3)


def test_what_stays_in_progress_is_a_deadline(gpus):
    for error in errors(gpus.replies(2, stay_in_progress)):
        assert isinstance(error, DeadlineError | AbortedError), error


# --- given up -------------------------------------------------------------------------------------


def abort_in_the_middle(rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        if comm.rank == 1:
            records = [comm._group.members.enqueued_words(rank, 2) for rank in (0, 2)]
            until(lambda: all(record[Record.SEQUENCE] == 2 for record in records))
            comm.abort()
            with pytest.raises(AbortedError):
                comm.all_reduce(ones(kit))
            return "aborted"
        begun, work = time.monotonic(), None
        with pytest.raises(AbortedError, match="rank 1 aborted it"):  # noqa: PT012
            work = comm.all_reduce(ones(kit), async_op=True)  # says so itself, where it is slow
            work.synchronize()
        assert time.monotonic() - begun < SOON_S
        assert work is None or isinstance(work.exception(), AbortedError)
        return "told"

    return counted(rank, calls)


def test_abort(gpus):
    assert gpus.call_ranks(3, abort_in_the_middle) == ["told", "aborted", "told"]


def interrupt(rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        comm.check()
        if comm.rank == 1:
            until(lambda: is_broken(comm))
            return None
        work = comm.all_reduce(ones(kit), async_op=True)
        sender = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        begun = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                sender.start()
                work.synchronize()
        finally:
            sender.join()
        took_s = time.monotonic() - begun
        comm.abort()
        return took_s

    return counted(rank, calls)


def test_ctrl_c_in_a_wait(gpus):
    assert gpus.call_ranks(2, interrupt)[0] < SOON_S


def use_from_a_second_thread(rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        with comm._gpu._entering, pytest.raises(StateError, match="another thread"):
            comm.all_reduce(ones(kit))
        comm.close()
        for call in (
            lambda: comm.all_reduce(ones(kit)),
            lambda: comm.send(ones(kit), 1 - comm.rank),
            lambda: comm.all_reduce([ones(kit)]),
        ):
            with pytest.raises(StateError, match="is closed"):
                call()

    return counted(rank, calls)


def test_a_second_thread_and_after_close(gpus):
    gpus.call_ranks(2, use_from_a_second_thread)


def break_the_gpu(rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        comm.check()
        rank.control.driver_set("error", 700)
        comm.all_reduce(ones(kit))
        comm.check()

    try:
        return counted(rank, calls, gives_back=False)
    except GpucollError as error:
        return type(error).__name__, str(error)
    finally:
        rank.control.driver_set("error", 0)


def test_an_error_of_the_gpu_itself(rank_server, gpus):
    with rank_server.fork(1) as pool:
        arguments = gpus.double, break_the_gpu, ()
        ((kind, text),) = pool.call(in_rank, *arguments, gives="seat", environment=gpus.variables)

    assert kind == "BackendError"
    assert "700" in text


def fail_once(rank):
    with rank.init() as comm:
        x, own = ones(rank.kit, 3 + rank.rank), ones(rank.kit, 16)
        comm.all_reduce(ones(rank.kit), async_op=True)
        comm.scan(own)
        comm.all_reduce(comm.empty(1000, like=own), out=ones(rank.kit, 1000))
        with pytest.raises(MismatchError):
            certainly(comm, comm.all_reduce, x, async_op=True)


def left_of_failures(rank):
    gc.collect()
    return [*left_on_gpu(rank), rank.control.count("memory")]


def fail_many_times(rank):
    fail_once(rank)  # whose arrays stay in the pool of the double's CuPy
    before = left_of_failures(rank)
    for _ in range(5):
        fail_once(rank)
        until(lambda: left_of_failures(rank) == before)  # memory may be given back by a thread


def test_nothing_is_left_of_communicators_that_failed(gpus):
    gpus.call_ranks(2, fail_many_times)


def _idle_thread(watcher):
    until(lambda: watcher._pause_s is None)
    return watcher._thread


def forget_one_that_is_idle(rank):
    comm = rank.init(device=rank.rank, on_async_error="raise")
    comm.all_reduce(ones(rank.kit))
    comm.check()
    thread = _idle_thread(comm._gpu._connected._watcher)
    del comm
    gc.collect()
    thread.join(20)
    return thread.is_alive()


def test_the_watcher_of_a_forgotten_communicator_ends(rank_server, gpus):
    with rank_server.fork(1) as pool:  # what it leaves goes with the process
        arguments = gpus.double, forget_one_that_is_idle, ()
        assert pool.call(in_rank, *arguments, gives="seat", environment=gpus.variables) == [False]
