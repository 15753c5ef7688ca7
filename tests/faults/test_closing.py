"""`close` in every situation: it returns within its deadline, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.waiting import SOON_S, is_broken, thread_names, until

import gpucoll
from gpucoll.errors import GpucollError, StateError
from gpucoll.transport.shared.words import THREAD_MIN_BYTES

LARGE = 1 << 18
DEADLINE_S = 0.2
"""Of `close`, which the calls' own is far beyond."""


def left():
    """Return what this process has: threads of Python's, descriptors, mappings of shared memory."""
    has = Counter(thread_names())
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            has[re.sub(r"\[\d+\]", "", os.readlink(f"/proc/self/fd/{number}"))] += 1
    with open("/proc/self/maps") as maps:
        has.update(line.split(None, 5)[5] for line in maps if "memfd:" in line)
    return has


def closed(comm):
    """Close; return the kind of error, and whether it came too late."""
    start = time.monotonic()
    try:
        comm.close(timeout_s=DEADLINE_S)
        kind = None
    except GpucollError as error:
        kind = type(error).__name__
    return kind, time.monotonic() - start > SOON_S


def counted(comm):
    """Gather by exchanged counts, which Python runs."""
    return comm.all_gather(np.ones(3), counts="auto", async_op=True)


def several(comm):
    return [comm.all_reduce(np.ones(n), async_op=True) for n in (3, LARGE, 5)] + [counted(comm)]


# Each gets a communicator that is about to be closed and another one of the same ranks, which goes
# on. Rank 0 mostly does something that the others do not, and what they do not come to is pending.


def nothing(own, other):
    own.all_reduce(np.ones(3))


def ended(own, other):
    for work in several(own):
        work.wait()


def ended_unasked(own, other):
    return several(own)


def pending(start):
    """Return what leaves a call of rank 0 pending."""

    def situation(own, other):
        return start(own) if own.rank == 0 else None

    return situation


def many(comm):
    return [comm.all_reduce(np.ones(n % 7 + 1), async_op=True) for n in range(90)]


def received(count):
    return pending(lambda comm: comm.recv(np.ones(count), 1, 5, async_op=True))


def sent(own, other):
    if own.rank == 0:
        return own.send(np.ones(THREAD_MIN_BYTES), 1, 5, async_op=True)
    return None


def unreceived(own, other):
    if own.rank == 0:
        own.send(np.ones(3), 1, 5)
    other.barrier()


def messages_and_calls(own, other):
    return several(own) if own.rank == 0 else own.recv(np.ones(3), 0, 5, async_op=True)


def aborted(own, other):
    works = several(own)
    if own.rank == 0:
        own.abort()
    return works


def mismatched(own, other):
    """Every rank has had the error; nobody has agreed on where to go on."""
    with pytest.raises(GpucollError):
        own.all_reduce(np.ones(3 + own.rank))


def mismatched_unasked(own, other):
    return own.all_reduce(np.ones(3 + own.rank), async_op=True), several(own)


def late(own, other):
    if own.rank == 0:
        with pytest.raises(GpucollError):
            own.all_reduce(np.ones(LARGE), async_op=True, timeout_s=0.05).wait()
    else:
        until(lambda: is_broken(own))


def interrupted(own, other):
    works = several(own) if own.rank == 0 else []
    if works:
        interrupt(works[-1].wait)
    return works


def interrupt(function):
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        function()
    timer.join()


def watched(own, other):
    """Python's threads wait for calls and messages that do not come."""
    works = [*several(own), own.recv(np.ones(3), 1, 5, async_op=True)] if own.rank == 0 else []
    for work in works:
        work.add_done_callback(lambda work: None)
    return works


def polled(own, other):
    works = several(own) if own.rank == 0 else []
    with contextlib.suppress(GpucollError):
        gpucoll.wait_all(works, timeout_s=0.1)
    return works


def divided(own, other):
    """Its children live on."""
    child = own.duplicate()
    works = several(child), own.recv(np.ones(3), 1 - min(own.rank, 1), 5, async_op=True)
    return child, works


SITUATIONS = {
    "nothing": nothing,
    "ended": ended,
    "ended unasked": ended_unasked,
    "small": pending(lambda comm: comm.all_reduce(np.ones(3), async_op=True)),
    "large": pending(lambda comm: comm.all_reduce(np.ones(LARGE), async_op=True)),
    "many": pending(many),
    "Python's": pending(counted),
    "compressed": pending(
        lambda comm: comm.all_reduce(np.ones(99, "f4"), compression="float16", async_op=True)
    ),
    "several": pending(several),
    "receive": received(3),
    "large receive": received(THREAD_MIN_BYTES),
    "large send": sent,
    "object": pending(lambda comm: comm.recv_object(1, 5, async_op=True)),
    "unreceived": unreceived,
    "messages and calls": messages_and_calls,
    "aborted": aborted,
    "mismatched": mismatched,
    "mismatched unasked": mismatched_unasked,
    "late": late,
    "interrupted": interrupted,
    "watched": watched,
    "polled": polled,
    "divided": divided,
}


def before_all(comm):
    """Return what is left of a communicator that has done everything: what a process has once."""
    with comm.duplicate() as first:
        for work in [*several(first), *many(first)]:
            work.wait()
        work = first.recv(np.ones(THREAD_MIN_BYTES), first.rank, 5, async_op=True)
        first.send(np.ones(THREAD_MIN_BYTES), first.rank, 5)
        work.wait()
        first.all_reduce(np.ones(99, "f4"), compression="float16")
    comm.barrier()
    return left()


def close_in(comm, situation):
    """Return how closing went, and what is left that was not there before."""
    before = before_all(comm)
    own = comm.duplicate()
    kept: Any = None
    with contextlib.suppress(GpucollError):  # of ranks that are told before they have begun
        kept = situation(own, comm)
    comm.barrier()
    found = closed(own)
    if situation is divided:
        comm.barrier()
        kept[0].check()
        kept[0].close()
    comm.barrier()
    return found, left() - before


def check(replies):
    for reply in replies:
        assert reply.error is None, reply.trace
        (_, is_late), remains = reply.result
        assert not is_late
        assert not remains


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("name", SITUATIONS)
def test_it_leaves_nothing(ranks, name):
    check(ranks.replies(3, close_in, SITUATIONS[name]))


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("name", SITUATIONS)
def test_it_leaves_nothing_on_several_hosts(hosts, name):
    check(hosts.replies("aab", close_in, SITUATIONS[name]))


# --- a rank that is lost --------------------------------------------------------------------------


def close_after_a_loss(comm, waits):
    before = before_all(comm)
    own = comm.duplicate()
    if own.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    works = []
    with contextlib.suppress(GpucollError):  # it is known before all have begun
        works.append(own.recv(np.ones(3), 2, 5, async_op=True))
        works += several(own)
    for work in works if waits else ():
        with contextlib.suppress(GpucollError):
            work.wait()
    return closed(own), left() - before


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("placed", ["aaa", "aab", "aba"])
def test_it_leaves_nothing_after_a_loss(hosts, placed, waits):
    check(hosts.replies(placed, close_after_a_loss, waits)[:2])


# --- interrupts, other threads, callbacks ---------------------------------------------------------


def close_interrupted(comm):
    before = before_all(comm)
    own = comm.duplicate()
    if comm.rank == 0:
        works = [*several(own), own.recv(np.ones(3), 1, 5, async_op=True)]
        interrupt(own.close)
        assert all(work.exception() is not None or not work.done() for work in works)
    comm.barrier()
    found = closed(own)
    return found, left() - before


def test_an_interrupt_in_it_leaves_nothing(ranks):
    check(ranks.replies(2, close_interrupted))


def note_error(raised, function, *given):
    try:
        function(*given)
    except GpucollError as error:
        raised.append(type(error))


def close_beside_a_thread(comm, makes_call):
    """Another thread is in a call that does not end: waits for a Work, for a message."""
    before = before_all(comm)
    own, found = comm.duplicate(), (None, False)
    raised: list[type] = []
    if comm.rank == 0:
        thread = threading.Thread(target=note_error, args=(raised, makes_call, own))
        thread.start()
        until(lambda: own._group.is_running or own._queue.is_busy)
        if not own._queue.is_busy:
            with pytest.raises(StateError, match="in another thread"):
                own.close()
            assert not own.is_closed
            own.abort()
        found = closed(own)
        thread.join(SOON_S)
        assert raised
    comm.barrier()
    own.close()
    return found, left() - before


IN_A_THREAD = {
    "barrier": lambda comm: comm.barrier(),
    "large": lambda comm: comm.all_reduce(np.ones(LARGE)),
    "recv": lambda comm: comm.recv(np.ones(3), 1),
    "Work": lambda comm: comm.all_reduce(np.ones(LARGE), async_op=True).wait(),
    "Python's Work": lambda comm: counted(comm).wait(),
}


@pytest.mark.parametrize("name", IN_A_THREAD)
def test_it_leaves_nothing_beside_a_thread(ranks, name):
    check(ranks.replies(2, close_beside_a_thread, IN_A_THREAD[name]))


def leave_a_block(comm):
    """An exception leaves the block while a thread is in a call."""
    before = before_all(comm)
    own = comm.duplicate()
    raised: list[type] = []
    thread = threading.Thread(target=note_error, args=(raised, own.barrier))

    def fail():
        with own:
            thread.start()
            until(lambda: own._group.is_running)
            raise KeyError

    if comm.rank == 0:
        with pytest.raises(KeyError):
            fail()
        assert own.is_closed
        thread.join(SOON_S)
        assert raised
    comm.barrier()
    own.close()
    return (None, False), left() - before


def test_a_block_that_is_left_by_an_exception_closes_beside_a_thread(ranks):
    check(ranks.replies(2, leave_a_block))


def close_beside_a_callback(comm):
    """A callback of the user's hangs, in a thread of the library's: close does not wait for it."""
    before = before_all(comm)
    own = comm.duplicate()
    goes_on, hang = threading.Event(), []

    def called(work):
        if threading.current_thread() is not threading.main_thread():
            hang.append(work)
            goes_on.wait(40)

    works = [
        own.recv(np.ones(3), 1 - comm.rank, 5, async_op=True),
        own.all_reduce(np.ones(LARGE), async_op=True),
    ]
    for work in works:
        work.add_done_callback(called)
    works.append(own.send(np.ones(3), 1 - comm.rank, 5, async_op=True))
    until(lambda: hang)
    found = closed(own)
    goes_on.set()
    comm.barrier()
    until(lambda: not left() - before)  # the threads end when they come back
    return found, left() - before


@pytest.mark.soak
def test_it_does_not_wait_for_a_callback(ranks):
    check(ranks.replies(2, close_beside_a_callback))
