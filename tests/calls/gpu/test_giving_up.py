"""Errors of the library and of the GPU, aborts, and that nothing is left of what failed."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
import time

import pytest
from tests.calls.gpu.conftest import in_rank, left_on_gpu
from tests.calls.gpu.failing import certainly, counted, ones
from tests.faults.test_closing import left
from tests.faults.test_ends import errors
from tests.ranks import Ended
from tests.waiting import SOON_S, is_broken, until

from gpucoll.backends.nccl.library import IN_PROGRESS
from gpucoll.errors import (
    AbortedError,
    BackendError,
    DeadlineError,
    GpucollError,
    MismatchError,
    PeerLostError,
    StateError,
)
from gpucoll.transport.shared.layout import Record

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
        comm.all_reduce(ones(kit), timeout_s=20)
        comm.check()
        with rank.control.library_set(polls=10**9):
            comm.all_reduce(ones(kit))

    return counted(rank, calls, timeout_s=0.3)


def test_what_stays_in_progress_is_a_deadline(gpus):
    for error in errors(gpus.replies(2, stay_in_progress)):
        assert isinstance(error, DeadlineError | AbortedError), error


_LOOKED_S = 0.1
"""After so long who waits for the library has looked at the other ranks several times."""


def close_while_the_other_is_slow(rank):
    """Rank 1 sends and closes; rank 0's library is still at the receive long after that."""

    def calls(comm, kit):
        certainly(comm, comm.all_reduce, ones(kit))
        if comm.rank == 1:
            certainly(comm, comm.send, ones(kit), 0)
            return None
        connection = comm._gpu._connected.backend.connection
        library, closed_s = connection.library, []

        def is_slow():
            if comm._group.has_closed(1):
                closed_s.append(time.monotonic())
            return not closed_s or time.monotonic() - closed_s[0] < _LOOKED_S

        asked = library.async_error
        library.async_error = lambda handle: IN_PROGRESS if is_slow() else asked(handle)
        try:
            out = ones(kit)
            certainly(comm, comm.recv, out, 1)
        finally:
            del library.async_error
        return kit.read(out).tolist()

    return counted(rank, calls, timeout_s=20)


def test_a_rank_that_has_done_its_part_and_closed_is_not_lost(gpus):
    assert gpus.call_ranks(2, close_while_the_other_is_slow)[0] == [1.0] * 8


# --- given up -------------------------------------------------------------------------------------


def abort_in_the_middle(rank):
    def calls(comm, kit):
        comm.all_reduce(ones(kit))
        if comm.rank == 1:
            records = [comm._group.members.enqueued_words(rank, 2) for rank in (0, 2)]
            until(lambda: all(record[Record.sequence] == 2 for record in records))
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


def _idle_thread(monitor_thread):
    until(lambda: monitor_thread._pause_s is None)
    return monitor_thread._thread


def forget_one_that_is_idle(rank):
    comm = rank.init(device=rank.rank, on_async_error="raise")
    comm.all_reduce(ones(rank.kit))
    comm.check()
    thread = _idle_thread(comm._gpu._connected._monitor_thread)
    del comm
    gc.collect()
    thread.join(20)
    return thread.is_alive()


def test_the_monitor_thread_of_a_forgotten_communicator_ends(rank_server, gpus):
    with rank_server.fork(1) as pool:  # what it leaves goes with the process
        arguments = gpus.double, forget_one_that_is_idle, ()
        assert pool.call(in_rank, *arguments, gives="seat", environment=gpus.variables) == [False]


# --- close ----------------------------------------------------------------------------------------


def close_without_the_other(rank):
    """Close while a call goes on that rank 1 does not make; its own deadline is far away."""
    with rank.init() as comm:  # what a process has once
        comm.all_reduce(ones(rank.kit))
        comm.check()
    before, start = left(), time.monotonic()
    comm = rank.init()
    comm.all_reduce(ones(rank.kit))
    comm.check()
    error = None
    if rank.rank == 0:
        comm.all_reduce(ones(rank.kit), async_op=True)
        start = time.monotonic()
        with pytest.raises(DeadlineError) as raised:
            comm.close(timeout_s=0.2)
        error = str(raised.value)
    else:
        until(lambda: is_broken(comm))
        with contextlib.suppress(GpucollError):
            comm.close()
    return error, time.monotonic() - start < SOON_S, left() - before


def test_close_keeps_to_its_deadline_and_leaves_nothing(gpus):
    (error, was_soon, remains), (_, _, remains_elsewhere) = gpus.call_ranks(
        2, close_without_the_other
    )
    assert "rank 1 had not made this call" in error
    assert was_soon
    assert not remains
    assert not remains_elsewhere
