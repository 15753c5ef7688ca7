"""Deadlines, Ctrl-C, and ranks that leave in the middle: who gets which error, and how soon."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from tests.ranks import Ended, Reply
from tests.waiting import SOON_S, is_broken, until

from gpucoll.errors import AbortedError, DeadlineError, PeerLostError
from gpucoll.transport.shared.layout import Record, RecordState
from gpucoll.transport.shared.words import Context


def has_begun(comm, rank, ahead=1):
    """Return whether another rank is in this communicator's next call (or the one after it)."""
    sequence = int(comm._group.context[Context.sequence]) + ahead
    return comm._group.members.record_words(rank, sequence)[Record.sequence] == sequence


def errors(replies):
    return [reply.error for reply in replies]


# --- deadlines ----------------------------------------------------------------------------------


def come_too_late(comm, late, calls):
    if comm.rank in late:
        until(lambda: is_broken(comm))
    calls(comm)


CALLS = {
    "barrier": lambda comm: comm.barrier(),
    "all_reduce": lambda comm: comm.all_reduce(np.ones(3)),
    "staged": lambda comm: comm.all_reduce(np.ones(200_000)),
    "asynchronous": lambda comm: comm.all_reduce(np.ones(3), async_op=True).wait(),
    "own deadline": lambda comm: comm.barrier(timeout_s=0.3),
    "objects": lambda comm: comm.all_gather_object(1),
    "plan": lambda comm: comm.plan_all_reduce(np.ones(3))(),
}


@pytest.mark.soak(quick=6)
@pytest.mark.parametrize("name", CALLS)
def test_a_deadline_names_who_is_missing(ranks, name):
    start = time.monotonic()
    timeout_s = 20 if name == "own deadline" else 0.3
    found = errors(ranks.replies(4, come_too_late, [1, 3], CALLS[name], timeout_s=timeout_s))

    assert time.monotonic() - start < SOON_S
    assert {type(error) for error in found} == {DeadlineError}
    for rank in (0, 2):
        assert "ranks 1, 3 had not arrived" in str(found[rank])
        assert f"rank {rank} of 4" in str(found[rank])
    assert any("waited 0.3 s in" in str(error) for error in found), found
    assert ranks.call(4, lambda comm: comm.all_reduce(1)) == [4] * 4


def test_a_broken_communicator_raises_the_same_at_once_and_can_be_closed(ranks):
    def try_again(comm):
        if comm.rank == 1:
            until(lambda: is_broken(comm))
        found = []
        for _ in range(3):
            try:
                comm.all_reduce(np.ones(2))
            except DeadlineError as error:
                found.append(str(error))
        comm.close()
        return found

    for found in ranks.call(2, try_again, timeout_s=0.2):
        assert len(found) == 3
        assert len(set(found)) == 1


def test_a_deadline_must_be_positive(ranks):
    def ask(comm, timeout_s):
        with pytest.raises(ValueError, match=r"timeout_s must be positive; got"):
            comm.barrier(timeout_s=timeout_s)
        return comm.all_reduce(1)

    for timeout_s in (0, -1.0, float("nan")):
        assert ranks.call(2, ask, timeout_s) == [2, 2]


# --- Ctrl-C and other signals -------------------------------------------------------------------


def interrupt_rank_0(comm, number, pids, call):
    """Ranks 0 and 1 wait in a call; rank 2 sends rank 0 a signal there."""
    if comm.rank < 2:
        call(comm)
        return
    until(lambda: has_begun(comm, 0) and has_begun(comm, 1))
    os.kill(pids[0], number)
    until(lambda: is_broken(comm))
    call(comm)


@pytest.mark.parametrize("name", ["barrier", "all_reduce", "staged", "objects", "plan"])
def test_ctrl_c_in_a_wait(ranks, name):
    pids = [rank.pid for rank in ranks.pool(3).ranks]
    start = time.monotonic()
    found = errors(ranks.replies(3, interrupt_rank_0, signal.SIGINT, pids, CALLS[name]))

    assert time.monotonic() - start < SOON_S
    assert isinstance(found[0], KeyboardInterrupt)
    for error in found[1:]:
        assert isinstance(error, AbortedError)
        assert "rank 0 was interrupted in" in str(error)
    assert ranks.call(3, lambda comm: comm.all_reduce(1)) == [3] * 3


def count_signals(comm, pids):
    """Rank 0 waits in a barrier while rank 1 sends it signals that a handler counts."""
    counted = []
    before = signal.signal(signal.SIGUSR2, lambda *_: counted.append(1))
    try:
        comm.barrier()
        if comm.rank == 1:
            until(lambda: has_begun(comm, 0))
            for _ in range(20):
                os.kill(pids[0], signal.SIGUSR2)
                time.sleep(0.002)  # spread over spinning, yielding and sleeping
        total = comm.all_reduce(np.arange(5.0))
    finally:
        signal.signal(signal.SIGUSR2, before)
    return len(counted), total.tolist()


def test_a_signal_handler_that_does_not_raise_disturbs_nothing(ranks):
    pids = [rank.pid for rank in ranks.pool(2).ranks]
    (counted, total), _ = ranks.call(2, count_signals, pids)

    assert counted >= 1
    assert total == [0, 2, 4, 6, 8]


def test_a_signal_handler_that_raises_is_raised_out_of_the_call(ranks):
    def be_told(comm, pids):
        def tell(*_):
            raise KeyError("told")

        before = signal.signal(signal.SIGUSR2, tell)
        try:
            interrupt_rank_0(comm, signal.SIGUSR2, pids, CALLS["barrier"])
        finally:
            signal.signal(signal.SIGUSR2, before)

    pids = [rank.pid for rank in ranks.pool(3).ranks]
    found = errors(ranks.replies(3, be_told, pids))

    assert isinstance(found[0], KeyError)
    assert {type(error) for error in found[1:]} == {AbortedError}


# --- ranks that leave ---------------------------------------------------------------------------


def leave(comm, how):
    if comm.rank == 1:
        until(lambda: has_begun(comm, 0))
        if how == "sys.exit":
            raise SystemExit(3)
        if how == "os._exit":
            os._exit(3)
        if how == "close":
            comm.close()
            return
    comm.all_reduce(np.ones(4))


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("how", ["sys.exit", "os._exit", "close"])
def test_a_rank_that_leaves_is_lost_at_once(ranks, how):
    start = time.monotonic()
    replies = ranks.replies(3, leave, how)

    assert time.monotonic() - start < SOON_S
    for rank in (0, 2):
        error = replies[rank].error
        assert isinstance(error, PeerLostError), error
        assert f"rank {rank} of 3 lost rank 1" in str(error)
        assert ("closed" in str(error)) == (how != "os._exit") or "without closing" in str(error)
    assert replies[1] == (Reply() if how == "close" else Ended(3))


def test_closing_after_the_last_call_disturbs_nobody(ranks):
    def close_early(comm):
        total = comm.all_reduce(np.full(50_000, comm.rank))
        comm.close()
        return int(total[0])

    for _ in range(20):
        assert ranks.call(4, close_early) == [6] * 4


def test_abort_reaches_everyone(ranks):
    def abort(comm):
        if comm.rank == 1:
            until(lambda: has_begun(comm, 0))
            comm.abort()
        comm.barrier()

    found = errors(ranks.replies(3, abort))

    assert {type(error) for error in found} == {AbortedError}
    assert all("rank 1 aborted it" in str(error) for error in found)


# --- leaving with calls under way ---------------------------------------------------------------


def leave_with_pending_call(comm):
    if comm.rank == 0:
        comm.all_reduce(np.ones(100_000), async_op=True)
        comm.all_reduce(np.ones(100_000), async_op=True)
        until(lambda: has_begun_itself(comm))
        raise SystemExit(5)
    until(lambda: is_broken(comm) or comm._group.members.gone_ranks() == [0])
    comm.barrier()


def has_begun_itself(comm):
    record = comm._group.members.record_words(0, int(comm._group.context[Context.sequence]))
    return record[Record.state] == RecordState.STARTED


def test_leaving_with_asynchronous_calls_under_way(ranks):
    replies = ranks.replies(2, leave_with_pending_call)

    assert replies[0] == Ended(5)
    assert isinstance(replies[1].error, (PeerLostError, AbortedError))


def close_with_long_call(comm):
    if comm.rank == 0:
        work = comm.all_reduce(np.ones(9), async_op=True, timeout_s=60)
        until(lambda: has_begun_itself(comm))
        try:
            comm.close()
        except DeadlineError as error:
            with pytest.raises(AbortedError, match="given up"):
                work.wait(10)
            return str(error)
        return "closed"
    until(lambda: is_broken(comm) or comm._group.members.gone_ranks() == [0])
    return None


def test_closing_gives_up_calls_that_do_not_end(ranks):
    replies = ranks.replies(2, close_with_long_call, timeout_s=0.3)

    assert isinstance(replies[0], Reply)
    assert replies[0].error is None
    assert "had not ended at close" in replies[0].result
