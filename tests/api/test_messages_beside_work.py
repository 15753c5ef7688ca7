"""Large messages that were begun go on while nobody waits for them: the compiled thread steps them.

None of these looks at its works by a call, which would take them on: only at their rows.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
from tests.messages import WAYS, choose_way, place
from tests.waiting import until

from gpucoll.errors import DeadlineError
from gpucoll.group.host.progress import thread
from gpucoll.transport.shared.words import THREAD_MIN_BYTES

COUNT = 3_000_000


def drop(held, group):
    """Let go of what is held; a thread that hears from others may hold the group for a moment."""
    held.clear()

    def is_gone():
        gc.collect()
        return group() is None

    until(is_gone)


def is_over(work):
    """Return whether a Work's messages are over, without taking them on."""
    return work._is_done or work._transfers.is_over()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.ranks(2, 3)
def test_they_go_on(comm, way, quick):
    choose_way(comm, way)
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    limit_s = None if quick else 20  # with a limit of its own Python begins it
    for _ in range(3):
        x, out = place(comm, way, COUNT, "i4"), place(comm, way, COUNT, "i4")
        x[:] = comm.rank
        works = [
            comm.recv(out, left, 5, async_op=True, timeout_s=limit_s),
            comm.send(x, right, 5, async_op=True, timeout_s=limit_s),
        ]
        until(lambda works=works: all(map(is_over, works)))
        assert (out == left).all()
        for work in works:
            work.wait()
        comm.barrier()


@pytest.mark.ranks(2)
def test_beside_other_communicators_and_calls(comm):
    """Calls that wait, calls that were started, and the messages of two communicators."""
    peer = 1 - comm.rank
    with comm.duplicate() as other:
        for round_number in range(20):
            works = []
            for each in (comm, other):
                x, out = np.full(COUNT // 10, round_number), np.empty(COUNT // 10, np.int64)
                works += [each.recv(out, peer, async_op=True), each.send(x, peer, async_op=True)]
            started = comm.all_reduce(np.ones(500_000), async_op=True)
            assert other.all_reduce(1) == 2
            assert started.wait()[0] == 2
            for work in works if round_number % 2 else reversed(works):
                work.wait()
            assert (out == round_number).all()


@pytest.mark.ranks(2)
def test_waiting_at_once(comm):
    x, out = np.ones(COUNT // 10), np.zeros(COUNT // 10)
    for _ in range(50):
        receive = comm.recv(out, 1 - comm.rank, async_op=True)
        comm.send(x, 1 - comm.rank, async_op=True).wait()
        receive.wait()
    assert out.all()


@pytest.mark.ranks(2)
def test_a_communicator_that_is_closed_or_dropped_while_they_are_pending(comm):
    for closes in (True, False):
        child = comm.duplicate(timeout_s=20)
        child._group.timeout_s = 0.05
        out = np.zeros(THREAD_MIN_BYTES)
        child.recv(out, 1 - comm.rank, 1, async_op=True)
        address = child._backend.messages._address | 1
        assert address in thread()._words
        comm.barrier()
        if closes:
            with pytest.raises(DeadlineError):
                child.close()
        else:
            group = weakref.ref(child._group)
            child.abort()
            held = [child]
            del child
            with pytest.warns(ResourceWarning):
                drop(held, group)
        until(lambda address=address: address not in thread()._words)
        comm.barrier()


@pytest.mark.ranks(2)
def test_a_forked_child_has_nothing_to_do_with_them(comm):
    peer = 1 - comm.rank
    out = np.zeros(COUNT)
    work = comm.recv(out, peer, async_op=True)
    if (pid := os.fork()) == 0:
        os._exit(int(thread().is_running))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    comm.send(np.ones(COUNT), peer)
    until(lambda: is_over(work))
    work.wait()
    assert out.all()


def test_a_program_may_end_with_them():
    """Nobody waits, nobody closes; the interpreter ends while the thread has messages."""
    code = (
        "import numpy as np, gpucoll\n"
        "comm = gpucoll.init()\n"
        f"works = [comm.recv(np.zeros({COUNT}), 0, tag, async_op=True) for tag in range(3)]\n"
        f"works.append(comm.send(np.ones({COUNT}), 0, 1, async_op=True))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.ranks(2)
def test_small_ones_ask_for_no_thread(comm):
    with comm.duplicate() as child:
        works = [child.recv(np.zeros(10), 1 - comm.rank, tag, async_op=True) for tag in range(2)]
        for tag in range(2):
            child.send(np.ones(10), 1 - comm.rank, tag)
        for work in works:
            work.wait()
        assert child._backend.messages._address | 1 not in thread()._words
