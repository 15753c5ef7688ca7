"""Calls that cannot be made now: after close, from another thread, in a child; and a full arena."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
from tests.waiting import until

import gpucoll
from gpucoll.errors import StateError
from gpucoll.group.host import progress
from gpucoll.transport.shared.words import THREAD_QUEUES, Thread


def x():
    return np.zeros(4, np.float32)


USES = {
    "all_reduce": lambda c: c.all_reduce(x()),
    "number": lambda c: c.all_reduce(1),
    "broadcast": lambda c: c.broadcast(x()),
    "asynchronous": lambda c: c.all_reduce(x(), async_op=True),
    "barrier": lambda c: c.barrier(),
    "objects": lambda c: c.all_gather_object(1),
    "split": lambda c: c.split(0),
    "duplicate": lambda c: c.duplicate(),
    "empty": lambda c: c.empty(3),
}


@pytest.mark.ranks(2)
def test_use_after_close(comm):
    comm.all_reduce(x())  # the compiled entry knows it
    plan = comm.plan_all_reduce(x())
    plan()
    comm.close()
    comm.close()
    for use in (*USES.values(), lambda c: plan()):
        with pytest.raises(StateError, match=rf"rank {comm.rank} of 2 is closed"):
            use(comm)
    assert comm.is_closed
    assert repr(comm) == f"<gpucoll.Communicator rank {comm.rank} of 2 closed>"


def served():
    """Return the queues that the process's compiled thread serves."""
    words = progress.thread()._words
    return set(words[Thread.queues : Thread.queues + THREAD_QUEUES].tolist()) - {0}


@pytest.mark.ranks(2)
def test_an_asynchronous_call_after_close_leaves_the_thread_no_queue(comm):
    """The thread would read the queue's memory when the communicator is gone."""
    before = served()
    comm.close()
    with pytest.raises(StateError, match="is closed"):
        comm.all_reduce(x(), async_op=True)
    assert served() == before


def message(comm):
    comm.send(x(), 0) if comm.rank else comm.recv(x(), 1)


@pytest.mark.parametrize(
    "use", [USES["all_reduce"], USES["barrier"], lambda c: c.all_reduce([x(), x()]), message]
)
@pytest.mark.ranks(2)
def test_other_threads_run_while_a_short_call_waits(comm, use):
    """Rank 1 comes only when a thread of rank 0, which waits for it, has told it to."""
    use(comm)  # the compiled entry knows it
    with comm.duplicate() as other:
        if comm.rank == 1:
            other.barrier()
            use(comm)
            return

        def call_rank_1():
            while not comm._group.is_running:
                pass
            other.barrier()

        thread = threading.Thread(target=call_rank_1)
        thread.start()
        use(comm)
        thread.join()


@pytest.mark.ranks(2)
def test_a_second_thread_is_refused(comm):
    comm.all_reduce(x())
    errors = []

    def intrude():
        deadline = time.monotonic() + 10
        while not comm._group.is_running and time.monotonic() < deadline:
            pass
        for name in ("all_reduce", "barrier", "broadcast", "objects"):
            try:
                USES[name](comm)
            except StateError as error:
                errors.append(str(error))

    if comm.rank == 0:
        thread = threading.Thread(target=intrude)
        thread.start()
        comm.barrier()
        thread.join()
    else:
        deadline = time.monotonic() + 10
        while not comm._group.members.record_words(0, 2)[1] and time.monotonic() < deadline:
            pass
        threading.Event().wait(0.3)  # leave rank 0 in its barrier for its other thread to see
        comm.barrier()
    assert comm.all_reduce(1) == 2
    assert len(errors) == (4 if comm.rank == 0 else 0)
    assert all("another thread of rank 0 of 2" in text and "duplicate" in text for text in errors)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.ranks(2)
def test_a_forked_child_is_refused_and_disturbs_nobody(comm):
    """Fork on every rank: the child may do nothing here, and its end is nobody's business."""
    comm.all_reduce(x())
    array = comm.empty(1000)
    array[:] = comm.rank
    plan = comm.plan_all_reduce(x())
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for use in (*USES.values(), lambda c: plan(), lambda c: c.abort()):
                with pytest.raises(StateError, match=rf"forked from rank {comm.rank} of 2"):
                    use(comm)
            del array
            comm.close()
            os.write(writing, b"refused")
        except BaseException as error:
            os.write(writing, repr(error).encode()[:4000])
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    total = comm.all_reduce(array, out=array)
    assert said == "refused"
    assert total[0] == 1.0
    assert plan().tolist() == [0.0] * 4


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.ranks(2)
def test_a_forked_child_is_refused_while_its_parent_waits_for_a_message(comm):
    """The child has the queue of asynchronous calls, but not the thread that serves it."""
    peer, received = 1 - comm.rank, np.zeros(1)
    work = comm.recv(received, peer, 7, async_op=True)
    uses = {
        "send": lambda: comm.send(x(), peer),
        "recv": lambda: comm.recv(x(), peer),
        "probe": lambda: comm.probe(peer),
        "asynchronous": lambda: comm.recv(x(), peer, async_op=True),
        "all_reduce": lambda: comm.all_reduce(x()),
        "work": work.wait,
    }
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)  # where it hangs, its end says where
            for name, use in uses.items():
                os.write(writing, f"{name} ".encode())
                with pytest.raises(StateError, match="forked from"):
                    use()
            os.write(writing, b"refused")
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    comm.send(np.ones(1), peer, 7)
    assert work.wait(20) is received
    assert said == " ".join([*uses, "refused"])


@pytest.mark.ranks(2)
def test_a_communicator_cannot_be_pickled(comm):
    with pytest.raises(TypeError, match="belongs to its process"):
        pickle.dumps(comm)
    with pytest.raises(TypeError):
        pickle.dumps(comm.all_reduce(x(), async_op=True))
    with pytest.raises(TypeError):
        pickle.dumps(comm.plan_all_reduce(x()))
    assert comm.all_reduce(1) == 2


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def drop_communicators(comm, is_waited_for):
    """Return whether everything is gone that dropped communicators had."""
    comm.duplicate().close()  # what a process has once
    gc.collect()
    before = descriptors()
    for _ in range(3):
        dropped = comm.duplicate()
        assert descriptors() > before
        work = dropped.all_reduce(np.ones(3), async_op=True)
        if is_waited_for:
            work.wait()
        del dropped, work
    comm.barrier()

    def is_gone():
        gc.collect()
        return threading.active_count() == 1 and descriptors() == before

    until(is_gone)
    return True


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_communicator_that_is_dropped_lets_go_of_everything(is_waited_for):
    """Its thread, too, which an asynchronous call has started."""
    # Not ranks of tests, which keep their communicators to abort them.
    assert gpucoll.launch(drop_communicators, 2, (is_waited_for,), timeout_s=60) == [True] * 2


@pytest.mark.ranks(2)
def test_a_full_arena(comm):
    size = comm._group.members.arena.size_bytes
    with pytest.raises(MemoryError, match="GPUCOLL_ARENA_BYTES"):
        comm.empty(size + 1, np.uint8)
    most = comm.empty(size // 2, np.uint8)
    with pytest.raises(MemoryError, match="in use"):
        comm.empty(size // 2 + 4096, np.uint8)
    del most
    again = comm.empty(size // 2 + 4096, np.uint8)
    assert again.nbytes > size // 2
    assert comm.all_reduce(1) == 2
