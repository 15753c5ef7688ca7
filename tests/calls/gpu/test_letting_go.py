"""The end of what a communicator has on its GPU: by close, by neglect, in other threads."""

from __future__ import annotations

import gc
import os
import threading
import warnings
import weakref

import numpy as np
import pytest
from tests.calls.gpu.conftest import in_rank
from tests.waiting import until

from gpucoll.backends.gpu import abandoned
from gpucoll.errors import ArgumentError, DeadlineError, StateError


def full(kit, value, count=1000):
    values = np.full(count, value, np.float32)
    return kit.seen_as(kit.bytes_of(values.view(np.uint8)), (count,), "float32")


# --- captured calls -------------------------------------------------------------------------------


def capture_many(rank):
    with rank.init() as comm:
        kit = rank.kit
        x, y = full(kit, 1), full(kit, 0)
        for async_op in (False, True):  # makes the own stream, and the events that are kept
            comm.all_reduce(x, out=y, async_op=async_op)
        comm.check()
        stream, kept, counts = kit.stream(), [], []
        for place in range(6):
            with stream, rank.control.captured(stream.ptr) as graph:
                for _ in range(5):
                    comm.all_reduce(x, out=y)
                    work = comm.all_reduce(x, out=y, async_op=True)
                    work.wait()
                    work.wait()  # as often as one likes
            graph.launch(stream.ptr)
            stream.synchronize()
            graph.close()
            if place == 0:
                kept.append(work)
            del work
            gc.collect()
            counts.append(rank.control.count("events"))
        return counts, kit.read(y)[0]


def leave_captures(rank):
    full(rank.kit, 1)  # the first array makes the double's default streams
    before = rank.control.count("events")
    counts, value = capture_many(rank)
    # The first one's work is kept, with its event; what is needed besides is there from then on.
    return counts[2:] == counts[1:2] * 4, value, rank.control.count("events") - before


@pytest.mark.soak
def test_captured_calls_leave_no_events(gpus):
    assert gpus.call_ranks(2, leave_captures) == [(True, 2.0, 0)] * 2


def capture_beside_dead_arrays(rank):
    """Arrays that outlive their communicator die in a capture, which waiting for the GPU ends."""
    with rank.init(device=rank.rank) as comm:
        kept = [comm.empty(1000, like=full(rank.kit, 1))]
    with rank.init(device=rank.rank) as comm:
        x, stream = full(rank.kit, 1), rank.kit.stream()
        comm.all_reduce(x, out=x)
        comm.check()
        gc.collect()
        held = comm.empty(1, like=x)  # what earlier calls on this rank have left is let go now
        memory = rank.control.count("memory")
        with stream, rank.control.captured(stream.ptr) as graph:
            kept.clear()
            gc.collect()
            comm.all_reduce(x, out=x)
        left = rank.control.count("memory") - memory
        graph.launch(stream.ptr)
        stream.synchronize()
        graph.close()
        comm.empty(1, like=x)
        left_in_the_end = rank.control.count("memory") - memory
        del held
        return left, rank.kit.read(x)[0], left_in_the_end


def test_arrays_that_die_in_a_capture_leave_it_alone(gpus):
    # What one gives back another one takes.
    assert gpus.call_ranks(2, capture_beside_dead_arrays) == [(0, 4.0, 0)] * 2


def refuse_in_a_capture(rank):
    """What cannot be captured draws no other stream into the capture: it would end in an error."""
    with rank.init() as comm:
        kit = rank.kit
        x, stream = full(kit, 1), kit.stream()
        comm.all_reduce(x, async_op=True).wait()
        comm.check()
        issuer = comm._gpu._connected.issuer
        calls = (lambda: comm.all_reduce(x, async_op=True), lambda: comm.all_reduce(x))
        with stream, rank.control.captured(stream.ptr) as graph:
            for call in calls:
                with pytest.raises(ArgumentError, match="captured graph"):
                    call()
            with issuer.device:
                drawn_in = issuer.device.is_capturing(issuer.own_stream)
        graph.close()
        return drawn_in, kit.read(comm.all_reduce(x))[0]


def test_what_is_refused_leaves_a_capture_alone(gpus):
    assert gpus.call_ranks(2, refuse_in_a_capture) == [(False, 2.0)] * 2


# --- memory that comes from no pool ---------------------------------------------------------------


def let_go_while_a_call_hangs(comm, kit):
    """Giving memory back waits for the GPU, which waits for a rank that never comes."""
    kit.cupy.cuda.set_allocator(None)
    try:
        x, last = full(kit, 1, 200_000), full(kit, 2)
    finally:
        kit.cupy.cuda.set_allocator()
    alive = weakref.ref(last._memory)
    comm.all_reduce(x, out=x)
    comm.check()
    comm.all_reduce(last, out=last)
    del last
    if comm.rank == 0:
        comm.send(x, 1, timeout_s=0.5)  # nobody receives it
        with pytest.raises(DeadlineError, match=r"waited 0\.5 s in send"):
            comm.check()
    else:
        comm.check()
        until(lambda: alive() is None)


@pytest.mark.parametrize("backend", ["nccl", "direct"])
def test_memory_is_let_go_beside_what_looks_for_deadlines(gpus, backend):
    gpus.call(2, let_go_while_a_call_hangs, backend=backend)


# --- threads --------------------------------------------------------------------------------------


def close_while_another_thread_calls(rank):
    comm = rank.init()
    comm.all_reduce(full(rank.kit, 1))
    with comm._gpu._alone(), pytest.raises(StateError, match="in another thread: close it after"):
        comm.close()
    was_open = not comm.is_closed
    comm.close()
    return was_open, rank.control.communicators


def test_no_close_while_another_thread_calls(gpus):
    assert gpus.call_ranks(2, close_while_another_thread_calls) == [(True, 0)] * 2


def hang_up(comm, kit, goes_on):
    """Let the monitor thread hang as in the driver, with the lock, at its next look; return it."""
    connected, hangs = comm._gpu._connected, threading.Event()
    thread, device = connected._monitor_thread._thread, connected.device
    query = device.query_event

    def query_without_end(event):
        if threading.current_thread() is thread:
            hangs.set()
            goes_on.wait(60)
        return query(event)

    device.query_event = query_without_end
    comm.all_reduce(full(kit, 1))
    assert hangs.wait(20)
    device.query_event = query
    return thread


def close_under_a_driver_that_hangs(rank):
    comm, goes_on = rank.init(), threading.Event()
    comm.all_reduce(full(rank.kit, 1))
    comm.check()
    try:
        thread = hang_up(comm, rank.kit, goes_on)
        comm._group.timeout_s = 0.1
        with pytest.raises(DeadlineError, match=r"waited 2 s at close for the thread that wat"):
            comm.close()
        left = rank.control.communicators
    finally:
        goes_on.set()
    thread.join(20)
    del comm
    until(lambda: gc.collect() >= 0 and len(abandoned._left) == 1)
    abandoned.end_all()
    return left, rank.control.communicators


@pytest.mark.soak
def test_a_monitor_thread_that_does_not_end(gpus):
    assert gpus.call_ranks(1, close_under_a_driver_that_hangs) == [(1, 0)]


# --- neglect --------------------------------------------------------------------------------------


def forget(rank):
    kit, control = rank.kit, rank.control
    x = full(kit, 1)  # the first array makes the double's default streams
    before = [control.count(what) for what in ("events", "streams")]
    comm = rank.init(device=rank.rank, on_async_error="raise")
    alive = weakref.ref(x._memory)
    comm.all_reduce(x, out=x)
    array = comm.empty(10, like=x)
    comm.scan(x)
    comm.check()
    aborts = control.calls("ncclCommAbort")
    with control.held():
        comm.all_reduce(x, out=x, async_op=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del comm, x
            # The monitor thread may have it at this moment.
            until(lambda: gc.collect() >= 0 and len(abandoned._left) == 1)
        in_between = control.communicators, control.calls("ncclCommAbort") - aborts
        was_alive = alive() is not None
    del array
    return before, in_between, was_alive, alive


def forget_one(rank, connects):
    """Drop a communicator with a call under way; another one ends it, by connecting or closing."""
    kit, control = rank.kit, rank.control
    other = None if connects else rank.init(device=rank.rank)
    left = control.communicators
    before, in_between, was_alive, alive = forget(rank)
    if other is None:
        other = rank.init(device=rank.rank)
    else:
        other.close()
    ended = not abandoned._left, alive() is None
    with rank.init() as comm:
        value = kit.read(comm.all_reduce(full(kit, 3)))[0]
    other.close()
    after = [control.count(what) for what in ("events", "streams")]
    assert control.communicators == control.registrations == 0
    return (in_between[0] - left, in_between[1], was_alive), ended, value, after == before


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("connects", [True, False])
def test_what_a_forgotten_communicator_leaves(rank_server, gpus, connects):
    with rank_server.fork(1) as pool:
        arguments = gpus.double, forget_one, (connects,)
        found = pool.call(in_rank, *arguments, gives="seat", environment=gpus.variables)
    assert found == [((1, 0, True), (True, True), 3.0, True)]


def keep_a_work(rank):
    """A Work keeps what its call needs, whatever becomes of the communicator's own object."""
    kit, control = rank.kit, rank.control
    comm = rank.init(device=rank.rank, on_async_error="raise")
    comm.all_reduce(full(kit, 1))
    comm.check()
    with control.held():
        work = comm.all_reduce(full(kit, 3), async_op=True)
        del comm
        gc.collect()
        abandoned.end_all()
        between = control.communicators
    work.synchronize()
    value = kit.read(work.wait())[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del work
        until(lambda: gc.collect() >= 0 and len(abandoned._left) == 1)
    abandoned.end_all()
    return between, value, control.communicators


def test_a_work_outlives_a_forgotten_communicator(rank_server, gpus):
    with rank_server.fork(1) as pool:
        arguments = gpus.double, keep_a_work, ()
        found = pool.call(in_rank, *arguments, gives="seat", environment=gpus.variables)
    assert found == [(1, 3.0, 0)]


def forget_and_fork(rank):
    """A forked child has a copy of the queue, and touches nothing of its parent's GPU."""
    forget(rank)
    aborts = rank.control.calls("ncclCommAbort")
    child = os.fork()
    if not child:
        abandoned.end_all()
        os._exit(rank.control.calls("ncclCommAbort") - aborts)
    _, status = os.waitpid(child, 0)
    in_child = os.waitstatus_to_exitcode(status), len(abandoned._left)
    abandoned.end_all()
    return in_child, rank.control.communicators


def test_what_is_left_is_not_a_forked_childs(rank_server, gpus):
    with rank_server.fork(1) as pool:
        arguments = gpus.double, forget_and_fork, ()
        found = pool.call(in_rank, *arguments, gives="seat", environment=gpus.variables)
    assert found == [((0, 1), 0)]
