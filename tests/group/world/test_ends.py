"""Ranks of several hosts that are late, interrupted, leave, or are gone: who is told what."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import numpy as np
import pytest
from tests.faults.test_ends import CALLS, come_too_late, errors
from tests.ranks import Ended
from tests.waiting import SOON_S, is_broken, until

from gpucoll.errors import AbortedError, DeadlineError, GpucollError, PeerLostError, StateError
from gpucoll.transport.shared.layout import Abort

SHAPES = ["ab", "aabb", "abc", "abbb", "abab"]


# --- deadlines ----------------------------------------------------------------------------------


@pytest.mark.soak(quick=6)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("placed", "late"), [("aabb", 1), ("aabb", 2), ("aabb", 3), ("abc", 2)])
def test_a_deadline_names_who_is_missing(hosts, name, placed, late):
    timeout_s = 20 if name == "own deadline" else 0.3
    start = time.monotonic()

    found = errors(hosts.replies(placed, come_too_late, [late], CALLS[name], timeout_s=timeout_s))

    assert time.monotonic() - start < SOON_S
    for rank, error in enumerate(found):
        assert isinstance(error, DeadlineError), error
        assert f"rank {rank} of {len(placed)}" in str(error)
        assert f"rank {late} had not arrived" in str(error)
    gave_up = r"waited 0.[0-3]\d* s in|gave up waiting in"
    assert all(re.search(gave_up, str(error)) for error in found), found


def test_a_deadline_says_where_the_late_rank_is(hosts):
    def be_late(comm):
        comm.barrier()
        if comm.rank == 3:
            comm.split(None)
            until(lambda: is_broken(comm))
        else:
            comm.split(None)
            comm.all_reduce(1, timeout_s=0.3)

    found = errors(hosts.replies("aabb", be_late))

    for error in found[:3]:
        assert isinstance(error, DeadlineError)
        assert "rank 3 is in no call of this communicator" in str(error).lower(), error
        assert "split()" in str(error), error


def test_several_late_ranks_on_several_hosts(hosts):
    found = errors(
        hosts.replies("aabbc", come_too_late, [1, 2, 4], CALLS["barrier"], timeout_s=0.3)
    )

    assert {type(error) for error in found} == {DeadlineError}
    named = "".join(map(str, found))
    assert "rank 1 had not arrived" in named or "rank 2 had not arrived" in named


@pytest.mark.soak
def test_a_stopped_rank_is_late_and_not_lost(hosts, rank_server):
    def stop(comm, late):
        comm.barrier()
        if comm.rank == late:
            os.kill(os.getpid(), signal.SIGSTOP)
        comm.all_reduce(np.ones(3), timeout_s=0.5)

    for late in (2, 3):
        others = [rank for rank in range(4) if rank != late]
        with rank_server.fork(4) as pool:
            hosts.start(pool, "aabb", stop, late)
            found = errors(pool.collect(only=others))
            pool.ranks[late].send(signal.SIGCONT)
            (error,) = errors(pool.collect(only=[late]))
        for each in [*found, error]:
            assert isinstance(each, DeadlineError), each
        assert all("rank" in str(each) and str(late) in str(each) for each in found), found


# --- what leaves ----------------------------------------------------------------------------------


def interrupt(comm, who, name):
    """One rank waits in a call for the last one, and gets a Ctrl-C there."""
    comm.barrier()
    if comm.rank == comm.world_size - 1:
        until(lambda: is_broken(comm))
    elif comm.rank == who:
        me = threading.get_ident()

        def send():
            until(lambda: comm._group.is_running)
            signal.pthread_kill(me, signal.SIGINT)

        thread = threading.Thread(target=send)
        thread.start()
        try:
            CALLS[name](comm)
        finally:
            thread.join()
    CALLS[name](comm)


@pytest.mark.parametrize("name", ["barrier", "all_reduce", "staged", "objects", "plan"])
@pytest.mark.parametrize("who", [0, 1, 2])
def test_ctrl_c_in_a_wait(hosts, name, who):
    start = time.monotonic()

    found = errors(hosts.replies("aabb", interrupt, who, name))

    assert time.monotonic() - start < SOON_S
    assert isinstance(found[who], KeyboardInterrupt), found
    for rank, error in enumerate(found):
        if rank != who:
            assert isinstance(error, AbortedError), error
            assert f"rank {who} was interrupted in" in str(error)
            assert f"rank {rank} of 4" in str(error)


def test_what_a_rank_of_another_host_raised_is_told_to_all(hosts):
    """As where it has said so in the meeting of a part, which the others have no part in."""

    def blame(comm):
        comm.barrier()
        if comm.rank == 0:
            comm._group.break_with(Abort.INTERRUPTED, 2, "PeerLostError: rank 3 is gone.")
        until(lambda: is_broken(comm))
        comm.check()

    for rank, error in enumerate(errors(hosts.replies("aabb", blame))):
        assert isinstance(error, AbortedError), error
        assert f"rank {rank} of 4" in str(error)
        assert "rank 2 aborted it, because it raised PeerLostError: rank 3 is gone. " in str(error)


@pytest.mark.parametrize("who", range(4))
def test_abort(hosts, who):
    def abort(comm):
        comm.barrier()
        if comm.rank == who:
            comm.abort()
        comm.all_reduce(1)

    found = errors(hosts.replies("aabb", abort))

    for rank, error in enumerate(found):
        assert isinstance(error, AbortedError), error
        if rank != who:
            assert f"rank {who}" in str(error)


@pytest.mark.parametrize("who", range(4))
def test_an_exception_that_leaves_the_block(hosts, who):
    def leave(comm):
        comm.barrier()
        if comm.rank == who:
            raise LookupError("of the test")
        comm.all_reduce(1)

    start = time.monotonic()
    found = errors(hosts.replies("abab", leave))

    assert time.monotonic() - start < SOON_S
    for rank, error in enumerate(found):
        if rank == who:
            assert isinstance(error, LookupError)
        else:
            assert isinstance(error, PeerLostError), error
            assert f"rank {who} " in str(error)
            assert "LookupError: of the test" in str(error)


@pytest.mark.parametrize("who", range(4))
@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_rank_that_closes(hosts, who, is_waiting):
    """Others wait for it in a call, or call only after it has closed."""

    def close(comm):
        comm.barrier()
        if comm.rank == who:
            comm.close()
            return
        if not is_waiting:
            until(lambda: comm._group.has_closed(who))
        comm.all_reduce(1)

    start = time.monotonic()
    found = errors(hosts.replies("aabb", close))

    assert time.monotonic() - start < SOON_S
    for rank, error in enumerate(found):
        if rank != who:
            assert isinstance(error, PeerLostError), error
            assert f"rank {who} " in str(error)
            assert "it closed the communicator" in str(error)


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("placed", SHAPES)
def test_ranks_close_in_any_order(hosts, placed):
    def close(comm, first):
        comm.barrier()
        if comm.rank != first:
            until(lambda: comm._group.has_closed(first))
        comm.check()
        comm.close()
        return comm.is_closed

    for first in range(len(placed)):
        assert all(hosts.call(placed, close, first))


def test_a_forked_child_can_do_nothing_and_the_others_work_on(hosts):
    def fork(comm):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                comm.barrier()
            except StateError:
                comm.close()
                status = 0
            finally:
                os._exit(status)
        total = comm.all_reduce(1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), total, comm.all_reduce(2)

    assert hosts.call("aabb", fork) == [(0, 4, 8)] * 4


# --- killed ---------------------------------------------------------------------------------------


def call_until_killed(comm, placed, who, is_calling):
    comm.barrier()
    if comm.rank == who:
        if is_calling:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends it, whatever it is doing
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        while is_calling:
            comm.all_reduce(np.ones(1000))
        if (
            placed[comm.rank] != placed[who]
        ):  # who leads a host is told at once, whatever its program does
            until(lambda: is_broken(comm))
        comm.all_reduce(1)
    except GpucollError as error:
        return error
    return None


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("is_calling", [False, True])
@pytest.mark.parametrize("who", range(5))
def test_a_killed_rank_is_lost(hosts, rank_server, who, is_calling):
    placed = "aabbc"
    with rank_server.fork(len(placed)) as pool:
        start = time.monotonic()
        hosts.start(pool, placed, call_until_killed, placed, who, is_calling)
        replies = pool.collect()

    assert time.monotonic() - start < SOON_S
    assert isinstance(replies[who], Ended)
    for rank, reply in enumerate(replies):
        if rank != who:
            error = reply.error or reply.result
            assert isinstance(error, PeerLostError), error
            assert f"rank {who} " in str(error), error
            assert str(error).startswith(f"rank {rank} of 5"), error
