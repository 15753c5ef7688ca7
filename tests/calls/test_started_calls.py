"""Asynchronous collectives: posted ahead, run by waiters and by the process's own thread."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import selectors
import sys
import threading
from typing import Any

import numpy as np
import pytest
from tests.waiting import thread_names, until

import gpucoll
from gpucoll import ReduceOp
from gpucoll.calls import work_queue
from gpucoll.entries.collectives import MAX_ENTRIES
from gpucoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    MismatchError,
    StateError,
)
from gpucoll.group.host import progress
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.words import Context

LARGE = 1 << 18
"""Elements of an array that no slot holds."""


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("dtype", ["f4", "i2", "c16"])
@pytest.mark.ranks(1, 2, 3, 4, 7)
def test_many_at_once(comm, dtype):
    """More than are posted ahead, more than the compiled queue has room for; mixed with large."""
    P, r = comm.world_size, comm.rank  # noqa: N806
    sizes = [3, 0, 700, LARGE // 4, 1, 9000] * 16
    inputs = [np.full(size, place % 5 + r, dtype) for place, size in enumerate(sizes)]
    works = [comm.all_reduce(x, async_op=True) for x in inputs]
    gathered = [comm.all_gather(x, async_op=True) for x in inputs[:7]]
    for place in random.Random(r).sample(range(len(works)), len(works)):
        first = P * (place % 5) + P * (P - 1) // 2
        assert (works[place].wait() == np.full(sizes[place], first, dtype)).all()
    for place, work in enumerate(gathered):
        rows = work.wait().reshape(P, -1)
        assert (rows == np.arange(P).reshape(P, 1) + place % 5).all()
    assert comm.all_reduce(1) == P


@pytest.mark.ranks(2, 3)
def test_each_reads_what_the_one_before_has_written(comm):
    """Although small ones are posted when they are started."""
    P = comm.world_size  # noqa: N806
    x, y = np.ones(5), np.zeros(8)
    works = [comm.all_reduce(x, out=x, async_op=True) for _ in range(6)]
    works += [comm.all_reduce(x, out=y[2:7], async_op=True)]
    works += [comm.all_reduce(y[:6], out=y[:6], async_op=True)]
    gpucoll.wait_all(works)
    assert (x == P**6).all()
    assert (y == [0, 0, *[P**8] * 4, P**7, 0]).all()


@pytest.mark.ranks(2)
def test_what_was_started_keeps_its_factor(comm):
    """Also when the entry that has started it has forgotten the op, for those of later calls."""
    x = np.ones(3)
    op = ReduceOp.scaled_sum(0.5)
    comm.all_reduce(x, out=np.zeros(3), op=op)  # the entry knows it
    if comm.rank == 1:
        comm.recv(np.zeros(1), 0)
    works = [comm.all_reduce(x, out=np.zeros(3), op=op, async_op=True)]
    factors = [2.0 + place for place in range(MAX_ENTRIES + 1)]
    for factor in factors:
        later = ReduceOp.scaled_sum(factor)
        works.append(comm.all_reduce(x, out=np.zeros(3), op=later, async_op=True))
    if comm.rank == 0:
        gc.collect()
        noise = [np.full(size, 9.0) for size in range(1, 9) for _ in range(500)]
        comm.send(np.zeros(1), 1)
        assert noise
    assert [work.wait()[0] for work in works] == [2 * factor for factor in (0.5, *factors)]


@pytest.mark.ranks(2)
def test_arrays_in_shared_memory(comm):
    x = comm.empty(LARGE, "f4")
    for count in (4, 1000, LARGE):
        x[:] = comm.rank + 1
        out = comm.empty(count, "f4")
        works = [comm.all_reduce(x[:count], out=out, async_op=True) for _ in range(3)]
        works.append(comm.all_reduce(x[:count], out=x[:count], async_op=True))
        gpucoll.wait_all(works)
        assert (out == 3).all()
        assert (x[:count] == 3).all()


@pytest.mark.ranks(2, 3)
def test_a_small_call_does_not_wait_for_who_computes(comm):
    """It was posted when it was started: a rank that waits goes on though the others do not."""
    x = np.arange(4.0)
    other = comm.duplicate()
    comm.all_reduce(x, async_op=True).wait()
    before = int(comm._group.context[Context.sequence])
    works = [comm.all_reduce(x, async_op=True) for _ in range(layout.AHEAD - 1)]
    works.append(comm.all_gather(x, async_op=True))
    assert int(comm._group.context[Context.sequence]) - before == layout.AHEAD
    if comm.rank == 0:
        gpucoll.wait_all(works)
    other.barrier()  # to which rank 0 comes last
    gpucoll.wait_all(works)
    other.close()


@pytest.mark.ranks(2)
def test_a_large_call_goes_on_while_python_computes(comm):
    """In the process's thread: nobody waits here, and the interpreter is never free."""
    x = np.full(LARGE, comm.rank + 1.0)
    work = comm.all_reduce(x, async_op=True)
    deadline = 200_000_000
    while not comm._queue.begin_compiled().ended() and deadline:
        deadline -= 1
    assert deadline
    assert (work.wait() == 3).all()
    assert progress.thread().is_running


@pytest.mark.ranks(2, 3)
def test_from_several_threads(comm):
    """On communicators of their own, with a thread each; and calls that others wait for."""
    comms = [comm.duplicate() for _ in range(3)]
    wrong = []

    def work_with(own, number):
        for turn in range(60):
            x = np.full(1 + 4000 * (turn % 3), number + own.rank)
            results = gpucoll.wait_all([own.all_reduce(x, async_op=True) for _ in range(3)])
            first = number * own.world_size + own.world_size * (own.world_size - 1) // 2
            if any((result != first).any() for result in results):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work_with, args=(c, n)) for n, c in enumerate(comms)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for own in comms:
        own.close()


@pytest.mark.ranks(2)
def test_any_thread_may_start(comm):
    works = []

    def start():
        works.append(comm.all_reduce(np.ones(3), async_op=True))

    for _ in range(5):
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    works.append(comm.all_reduce(np.ones(LARGE), async_op=True))
    waiting = [threading.Thread(target=work.wait) for work in works for _ in range(2)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    assert [work.wait()[0] for work in works] == [2.0] * 6
    assert comm.all_reduce(1) == 2


@pytest.mark.parametrize(
    ("is_known", "is_waited_for"), [(False, True), (True, True), (True, False)]
)
@pytest.mark.ranks(2)
def test_what_needs_python_begins_after_another_threads_call(comm, is_known, is_waited_for):
    """The blocking call is run by a compiled entry that knows it, or else by Python."""
    own, other = comm.duplicate(), comm.duplicate()
    if is_known:
        own.all_reduce(np.ones(3))
    if comm.rank == 0:
        blocking = threading.Thread(target=own.all_reduce, args=(np.ones(3),))
        blocking.start()
        until(lambda: own._group.is_running)
    else:
        other.barrier()  # rank 0 has tried to run the call that it has begun
        own.all_reduce(np.ones(3))
    work = own.all_gather(np.full(1 + comm.rank, 4.0), counts="auto", async_op=True)
    if comm.rank == 0:
        waiting = threading.Thread(target=work.wait)
        if is_waited_for:
            waiting.start()
        until(lambda: work._is_done or is_kept_waiting(own._queue, waiting))
        assert not work._is_done
        other.barrier()
        blocking.join()
        if is_waited_for:
            waiting.join()
        else:
            until(work.done)
    assert work.wait().tolist() == [4.0] * 3
    own.close()
    other.close()


def is_kept_waiting(queue, waiting):
    """Return whether a thread sleeps because it may not run the call yet."""
    frames = sys._current_frames()
    places = {
        frames[each.ident].f_code for each in (waiting, queue._thread) if each.ident in frames
    }
    own = frames.get(waiting.ident)
    is_asleep = own is not None and own.f_code is threading.Condition.wait.__code__
    return is_asleep or work_queue.WorkQueue._wait_for_entries.__code__ in places


@pytest.mark.ranks(2)
def test_done_and_exception(comm):
    for count in (3, LARGE):
        work = comm.all_reduce(np.ones(count), async_op=True)
        until(work.done)
        assert work.exception() is None
        assert work.wait()[0] == 2
        assert work.wait(0) is work.wait()


# --- who is told of the end -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, LARGE])
@pytest.mark.ranks(2)
def test_callbacks(comm, count):
    """Without anybody waiting; once; at once where it has ended; and they may start calls."""
    told, further = [], []
    ended = threading.Event()

    def note(work):
        told.append(work)
        further.append(comm.all_reduce(np.full(2, 5.0), async_op=True))
        ended.set()

    work = comm.all_reduce(np.ones(count), async_op=True)
    work.add_done_callback(note)
    assert ended.wait(20)
    assert work.wait()[0] == 2
    work.add_done_callback(told.append)
    assert told == [work, work]
    assert further[0].wait()[0] == 10


@pytest.mark.ranks(2)
def test_a_callback_that_raises_changes_nothing(comm, monkeypatch):
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    told: list[Any] = []
    work = comm.all_reduce(np.ones(3), async_op=True)

    def fail(work):
        raise ValueError("mine")

    work.add_done_callback(fail)
    work.add_done_callback(told.append)
    assert work.wait()[0] == 2
    until(lambda: told == [work])
    assert [str(item.exc_value) for item in raised] == ["mine"]
    with pytest.raises(ArgumentTypeError, match="needs a function"):
        work.add_done_callback(3)


@pytest.mark.ranks(2)
def test_a_descriptor_for_selectors(comm):
    works = [comm.all_reduce(np.ones(count), async_op=True) for count in (3, LARGE, 7)]
    with selectors.DefaultSelector() as selector:
        for work in works:
            assert work.fileno() == work.fileno()
            selector.register(work, selectors.EVENT_READ)
        left = set(works)
        while left:
            for key, _ in selector.select(20):
                ended: Any = key.fileobj
                assert ended.done()
                selector.unregister(ended)
                left.discard(ended)
    late = comm.all_reduce(np.ones(3), async_op=True)
    late.wait()
    assert os.read(late.fileno(), 1) == b""  # readable at once


@pytest.mark.ranks(2)
def test_await(comm):
    async def both():
        counts = (3, LARGE)
        works = [comm.all_reduce(np.ones(count), async_op=True) for count in counts]
        first, second = await asyncio.gather(*map(wait_for, works))
        return first[0] + second[0] + (await works[0])[0]

    async def wait_for(work):
        return await work

    assert asyncio.run(both()) == 6


@pytest.mark.ranks(2)
def test_wait_any_and_wait_all(comm):
    works = [comm.all_reduce(np.ones(count), async_op=True) for count in (3, LARGE, 5)]
    left = list(works)
    while left:
        place = gpucoll.wait_any(left, timeout_s=20)
        assert left.pop(place).wait()[0] == 2
    assert [result[0] for result in gpucoll.wait_all(works, timeout_s=5)] == [2, 2, 2]
    assert gpucoll.wait_all([]) == []
    with pytest.raises(ArgumentError, match="at least one"):
        gpucoll.wait_any([])
    with pytest.raises(ArgumentTypeError, match="async_op=True returned"):
        gpucoll.wait_all([works[0], 3])  # type: ignore[list-item]
    other = comm.duplicate()
    if comm.rank == 0:
        work = comm.all_reduce(np.ones(3), async_op=True)
        with pytest.raises(DeadlineError, match="none of 1 calls"):
            gpucoll.wait_any([work], timeout_s=0.01)
        with pytest.raises(DeadlineError, match="it goes on"):
            gpucoll.wait_all([work], timeout_s=0.01)
        other.barrier()
    else:
        other.barrier()
        work = comm.all_reduce(np.ones(3), async_op=True)
    other.close()
    assert gpucoll.wait_all([work])[0][0] == 2


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, LARGE])
@pytest.mark.ranks(2, 3)
def test_a_mismatch_is_raised_by_its_own_work(comm, count):
    """And by no other; those started behind it are made again, alike on all ranks."""
    P = comm.world_size  # noqa: N806
    odd = comm.rank == 1
    before = comm.all_reduce(np.full(4, 1.0), async_op=True)
    failing = comm.all_reduce(np.ones(count + odd), async_op=True)
    behind = [comm.all_reduce(np.full(4 + n, n + 1.0), async_op=True) for n in range(6)]
    with pytest.raises(MismatchError, match="rank 1 called all_reduce"):
        failing.wait()
    assert before.wait()[0] == P
    assert [work.wait()[0] for work in behind] == [P * (n + 1) for n in range(6)]
    with pytest.raises(MismatchError):
        failing.wait()
    assert isinstance(failing.exception(), MismatchError)
    assert comm.all_reduce(1) == P


@pytest.mark.ranks(2)
def test_a_failure_that_nobody_waits_for_is_raised_by_check(comm):
    failing = comm.all_reduce(np.ones(3 + comm.rank), async_op=True)
    assert comm.all_reduce(1) == 2  # not by another call
    with pytest.raises(MismatchError):
        comm.check()
    comm.check()
    assert failing.done()


@pytest.mark.ranks(2)
def test_a_call_has_its_own_deadline(comm):
    own = comm.duplicate()
    if comm.rank == 0:
        work = own.all_reduce(np.ones(LARGE), async_op=True, timeout_s=0.05)
        behind = own.all_reduce(np.ones(3), async_op=True)
        with pytest.raises(DeadlineError, match=r"waited 0\.05 s in all_reduce"):
            work.wait()
        with pytest.raises(DeadlineError):
            behind.wait()
    comm.barrier()
    own._give_up()


@pytest.mark.ranks(2)
def test_after_the_end(comm):
    own = comm.duplicate()
    work = own.all_reduce(np.ones(3), async_op=True)
    result = work.wait()
    unasked = own.all_reduce(np.ones(LARGE), async_op=True)
    own.close()
    assert work.wait() is result
    assert unasked.wait()[0] == 2
    with pytest.raises(StateError, match="closed"):
        own.all_reduce(np.ones(3), async_op=True)
    comm.barrier()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.ranks(2)
def test_a_forked_child_has_nothing_of_it(comm):
    other = comm.duplicate()
    if comm.rank == 1:
        other.barrier()  # rank 0 has forked: what it has started has not ended before
    small = comm.all_reduce(np.ones(3), async_op=True)
    large = comm.all_reduce(np.ones(LARGE), async_op=True)
    if comm.rank == 0:
        fork_with_pending(small, large)
        other.barrier()
    assert small.wait()[0] == large.wait()[0] == 2
    other.close()


def fork_with_pending(*works):
    child = os.fork()
    if child == 0:
        code = 0
        for work in works:
            try:
                work.wait()
                code = 1
            except StateError:
                pass
        if progress.thread().is_running:
            code = 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.ranks(2)
def test_nothing_is_left(comm):
    """Neither descriptors, nor threads of Python's, nor references to arrays."""
    x, out = np.ones(3), np.ones(3)
    comm.all_reduce(x, out=out, async_op=True).wait()
    gc.collect()
    before = sys.getrefcount(x), sys.getrefcount(out)
    threads = thread_names()
    for _ in range(3000):
        comm.all_reduce(x, out=out, async_op=True).wait()
    works = [comm.all_reduce(x, out=out, async_op=True) for _ in range(60)]
    del works
    assert comm.all_reduce(1) == 2
    comm.check()
    assert not comm._queue._works
    assert int(comm._group.context[Context.pending]) == 0
    assert thread_names() == threads
    assert (sys.getrefcount(x), sys.getrefcount(out)) == before
