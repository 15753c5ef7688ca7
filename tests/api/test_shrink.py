"""`shrink` on one host: who goes on after losses, with what, and who is told what else."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import numpy as np
import pytest
from tests.shrinking import LOSSES, arrive, die, facts, fresh, left_over, results, until_lost, use
from tests.waiting import SOON_S, until

import gpucoll
from gpucoll.errors import (
    AbortedError,
    ArgumentError,
    DeadlineError,
    GpucollError,
    MismatchError,
    PeerLostError,
    ShrinkError,
    StateError,
)
from gpucoll.group.host import shrinking
from gpucoll.group.survivors import are_enough
from gpucoll.transport.shared.layout import Record, RecordState

# --- ranks that are killed ------------------------------------------------------------------------


__all__ = ["fresh"]


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize(
    ("count", "victims"), [(2, [1]), (3, [0]), (4, [0]), (4, [2]), (5, [0, 3])]
)
def test_killed_ranks(fresh, count, victims):
    def lose_and_go_on(comm):
        arrive(comm)
        if comm.rank in victims:
            die()
        error = until_lost(comm)
        start = time.monotonic()
        with comm.shrink() as made:
            took_s = time.monotonic() - start
            assert isinstance(error, PeerLostError)
            assert comm.is_closed
            used = use(made)
            return facts(made), used, took_s, made._group.timeout_s, os.getpid()

    found = results(fresh(count, lose_and_go_on), victims)

    left = tuple(rank for rank in range(count) if rank not in victims)
    pids = [each[-1] for each in found]
    for place, (who, used, took_s, timeout_s, _) in enumerate(found):
        assert who == (place, len(left), 1, left)
        assert used == list(enumerate(pids))
        assert took_s < SOON_S
        assert timeout_s == 20.0


def test_again_and_again(fresh):
    def shrink_often(comm):
        seen = []
        for victim in (4, 0, 1):
            arrive(comm)
            if comm.rank == victim:
                die()
            until_lost(comm)
            comm = comm.shrink()
            seen.append((comm.epoch, comm.former_ranks, use(comm)[-1][0]))
        comm.close()
        return seen, left_over()

    found = results(fresh(5, shrink_often), [4, 0, 2])

    expected = [(1, (0, 1, 2, 3), 3), (2, (1, 2, 3), 2), (3, (0, 2), 1)]
    assert [each[0] for each in found] == [expected] * 2
    assert [each[1] for each in found] == [[], []]


def test_nothing_is_left_over(fresh):
    def lose(comm):
        names = left_over()
        arrive(comm)
        if comm.rank == 1:
            die()
        until_lost(comm)
        made = comm.shrink()
        between = left_over()
        made.close()
        return sorted(names), sorted(between), left_over()

    for before, between, after in results(fresh(3, lose), [1]):
        assert len(between) < len(before)
        assert after == []


# --- who may go on --------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "victims"), [(2, [0]), (3, [0, 1]), (4, [0, 1]), (5, [1, 2, 4])])
def test_a_minority_raises(fresh, count, victims):
    def lose(comm):
        arrive(comm)
        if comm.rank in victims:
            die()
        until_lost(comm)
        until(lambda: len(comm._group.ended_ranks()) == len(victims))
        with pytest.raises(ShrinkError) as caught:
            comm.shrink()
        assert not comm.is_closed
        with pytest.raises(GpucollError):
            comm.barrier()
        return str(caught.value)

    for text in results(fresh(count, lose), victims):
        left = [rank for rank in range(count) if rank not in victims]
        assert f"of {count} ranks rank" in text
        number = re.search(rf"\((\d)\), and {count // 2 + 1} are needed", text)
        assert number is not None
        assert 1 <= int(number[1]) <= len(left)  # one of them may have closed already
        assert all(str(rank) in text for rank in victims)
        assert "ended, closed or gave up" in text
        assert "Close the communicator" in text


def test_half_with_the_lowest_rank_goes_on(fresh):
    def lose(comm):
        arrive(comm)
        if comm.rank in (1, 3):
            die()
        until_lost(comm)
        until(lambda: len(comm._group.ended_ranks()) == 2)
        with comm.shrink() as made:
            return facts(made), made.all_reduce(1)

    found = results(fresh(4, lose), [1, 3])

    assert found == [((0, 2, 1, (0, 2)), 2), ((1, 2, 1, (0, 2)), 2)]


def test_any_two_that_are_enough_have_a_rank_in_common():
    for count in range(1, 8):
        former = [3 * rank + 1 for rank in range(count)]
        sets = [
            {former[place] for place in range(count) if bits >> place & 1}
            for bits in range(1, 1 << count)
        ]
        enough = [ranks for ranks in sets if are_enough(sorted(ranks), former)]
        assert set(former) in enough
        assert all(one & other for one in enough for other in enough)
        assert all(ranks in enough for ranks in sets if 2 * len(ranks) > count)


# --- ranks that are stopped, late, or leave -------------------------------------------------------


@pytest.mark.soak
def test_a_stopped_rank_is_left_behind(rank_server):
    def stop(comm, late):
        comm.barrier()
        if comm.rank == late:
            os.kill(os.getpid(), signal.SIGSTOP)
        error = until_lost(comm, timeout_s=0.5)
        try:
            with comm.shrink(timeout_s=2) as made:
                return error, facts(made), use(made)
        except ShrinkError as left_behind:
            comm.close()
            return error, left_behind, left_over()

    for late in (0, 2):
        others = [rank for rank in range(3) if rank != late]
        with rank_server.fork(3) as pool:
            pool.start(stop, late)
            found = [reply.result for reply in pool.collect(only=others)]
            pool.ranks[late].send(signal.SIGCONT)
            (reply,) = pool.collect(only=[late])
        for place, (error, who, _) in enumerate(found):
            assert isinstance(error, DeadlineError)
            assert who == (place, 2, 1, tuple(others))
        error, left_behind, left = reply.result
        assert isinstance(error, DeadlineError)
        assert f"ranks {others[0]}, {others[1]} have gone on" in str(left_behind)
        assert f"rank {late} of 3 came too late" in str(left_behind)
        assert left == []


@pytest.mark.soak
def test_ranks_come_at_different_times(fresh):
    def come(comm):
        arrive(comm)
        if comm.rank == 1:
            die()
        until_lost(comm)
        time.sleep(0.4 * comm.rank)  # so late
        with comm.shrink() as made:
            return facts(made), use(made)[-1][0]

    found = results(fresh(4, come), [1])

    assert found == [((place, 3, 1, (0, 2, 3)), 2) for place in range(3)]


@pytest.mark.soak
def test_a_rank_that_never_comes_counts_as_lost(fresh):
    def stay_away(comm):
        comm.barrier()
        if comm.rank == 0:
            comm.abort()
        error = until_lost(comm)
        if comm.rank == 1:
            peers = comm._group.members
            until(lambda: peers.has_closed(0) and peers.has_closed(2))
            with pytest.raises(ShrinkError, match="ranks 0, 2 have gone on"):
                comm.shrink()
            return None
        with comm.shrink(timeout_s=2) as made:
            return error, facts(made), use(made)[-1][0]

    found = results(fresh(3, stay_away))

    for place, rank in enumerate((0, 2)):
        error, who, last = found[rank]
        assert isinstance(error, AbortedError)
        assert (who, last) == ((place, 2, 1, (0, 2)), 1)


def test_too_few_come_in_time(fresh):
    """Those who come later are enough without the one who has given up."""

    def stay_away(comm):
        comm.barrier()
        if comm.rank == 0:
            comm.abort()
        until_lost(comm)
        if not comm.rank:
            with pytest.raises(ShrinkError) as caught:
                comm.shrink(timeout_s=0.2)
            return str(caught.value)
        until(lambda: shrinking.Statements(comm._group.members).round_of(0) < 0)
        with comm.shrink() as made:
            return facts(made)

    found = results(fresh(3, stay_away))

    assert "ranks 1, 2 did not come in 0.2 s" in found[0]
    assert "unless other ranks go on" in found[0]
    assert found[1:] == [(place, 2, 1, (1, 2)) for place in range(2)]


def test_a_rank_that_has_closed(fresh):
    def close(comm):
        comm.barrier()
        if comm.rank == 2:
            comm.close()
            return None
        error = until_lost(comm)
        with comm.shrink() as made:
            return isinstance(error, PeerLostError), facts(made), use(made)[-1][0]

    found = results(fresh(3, close))

    assert found[:2] == [(True, (place, 2, 1, (0, 1)), 1) for place in range(2)]


@pytest.mark.parametrize("who", [0, 1, 2])
def test_ctrl_c_inside(fresh, who):
    def interrupt(comm):
        comm.barrier()
        if comm.rank == 0:
            comm.abort()
        until_lost(comm)
        if comm.rank == who:
            timer = threading.Timer(
                0.1, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]
            )
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                comm.shrink()
            timer.join()
            return left_behind(comm)
        if comm.rank == 3:  # so that the others wait
            until(lambda: shrinking.Statements(comm._group.members).round_of(who) < 0)
        with comm.shrink() as made:
            return facts(made), use(made)[-1][0]

    def left_behind(comm):
        until(lambda: comm._group.gone_ranks())
        with pytest.raises(ShrinkError):
            comm.shrink()

    found = results(fresh(4, interrupt))

    left = tuple(rank for rank in range(4) if rank != who)
    assert [found[rank] for rank in left] == [((place, 3, 1, left), 2) for place in range(3)]


# --- ranks that die on the way --------------------------------------------------------------------


def before_deciding(patch):
    patch.setattr(shrinking.HostAgreement, "_settle", lambda *_: die())


def once_decided(patch):
    patch.setattr(shrinking.HostAgreement, "meeting_of", lambda *_: die())


def when_all_have_it(patch):
    patch.setattr(shrinking.HostAgreement, "commit", lambda *_: die())


def as_it_is_ready(patch):
    from gpucoll.rendezvous.guest import Guest

    send = Guest._send
    patch.setattr(Guest, "_send", lambda *args: die() if "ready" in args[1] else send(*args))


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        (before_deciding, 0),
        (before_deciding, 3),
        (once_decided, 0),
        (once_decided, 3),
        (when_all_have_it, 0),
        (as_it_is_ready, 3),
    ],
)
def test_a_rank_dies_inside(fresh, moment, victim):
    def lose_two(comm):
        arrive(comm)
        if comm.rank == 2:
            die()
        until_lost(comm)
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == victim:
                moment(patch)
            made = comm.shrink()
        with made:
            return facts(made), made.resumed_from, use(made)[-1][0], comm.is_closed

    start = time.monotonic()
    found = results(fresh(5, lose_two), [2, victim])

    assert time.monotonic() - start < SOON_S
    left = tuple(rank for rank in range(5) if rank not in (2, victim))
    assert [each[0] for each in found] == [(place, 3, 1, left) for place in range(3)]
    assert {each[1] for each in found} == {found[0][1]}
    assert {each[2:] for each in found} == {(2, True)}


def test_the_first_rank_dies_when_all_have_it(fresh):
    """It has said so in the segment, and told nobody: all have a communicator, which is broken."""

    def lose_two(comm):
        arrive(comm)
        if comm.rank == 2:
            die()
        until_lost(comm)
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 0:
                commit = shrinking.HostAgreement.commit
                patch.setattr(
                    shrinking.HostAgreement, "commit", lambda *args: (commit(*args), die())
                )
            made = comm.shrink()
        first = facts(made)
        until_lost(made)
        with made.shrink() as second:
            return first, facts(second), use(second)[-1][0]

    found = results(fresh(5, lose_two), [0, 2])

    for place, (first, second, last) in enumerate(found):
        assert first == (place + 1, 4, 1, (0, 1, 3, 4))
        assert second == (place, 3, 2, (1, 2, 3))
        assert last == 2


@pytest.mark.soak
def test_a_rank_is_stopped_while_they_meet(rank_server):
    """It was agreed on, and does not come: it is late there, and the rest goes on without it."""

    meeting_of = shrinking.HostAgreement.meeting_of

    def stop_first(*args):
        os.kill(os.getpid(), signal.SIGSTOP)
        return meeting_of(*args)

    def lose_two(comm):
        patch = pytest.MonkeyPatch()
        comm.barrier()
        if comm.rank == 0:
            comm.abort()
        until_lost(comm)
        if comm.rank == 1:
            patch.setattr(shrinking.HostAgreement, "meeting_of", stop_first)
        try:
            with comm.shrink(timeout_s=2) as made:
                return facts(made), use(made)[-1][0]
        except ShrinkError as error:
            return str(error)
        finally:
            patch.undo()

    with rank_server.fork(4) as pool:
        pool.start(lose_two)
        found = [reply.result for reply in pool.collect(only=[0, 2, 3])]
        pool.ranks[1].send(signal.SIGCONT)
        (reply,) = pool.collect(only=[1])
    assert found == [((place, 3, 1, (0, 2, 3)), 2) for place in range(3)]
    assert "ranks 0, 2, 3 have gone on" in reply.result


# --- after what -----------------------------------------------------------------------------------


def test_a_communicator_that_is_whole(fresh):
    def shrink(comm):
        pending = comm.all_reduce(np.full(30_000, comm.rank), async_op=True)
        with comm.shrink() as made:
            assert pending.wait()[0] == 3
            assert comm.is_closed
            return facts(made), made.resumed_from, use(made)[-1][0]

    found = results(fresh(3, shrink))

    assert found == [((place, 3, 1, (0, 1, 2)), 1, 2) for place in range(3)]


@pytest.mark.soak
def test_others_wait_in_another_call(fresh):
    """They are told, and come."""

    def shrink(comm):
        comm.barrier()
        error = until_lost(comm) if comm.rank else None
        with comm.shrink() as made:
            return error, facts(made)

    start = time.monotonic()
    found = results(fresh(3, shrink))

    assert time.monotonic() - start < SOON_S
    assert [each[1] for each in found] == [(place, 3, 1, (0, 1, 2)) for place in range(3)]
    assert all(isinstance(each[0], AbortedError) for each in found[1:])


def test_after_a_mismatch(fresh):
    def disagree(comm):
        with pytest.raises(MismatchError):
            comm.all_reduce(np.ones(3 + comm.rank))
        assert comm.all_reduce(1) == 3
        with comm.shrink() as made:
            return facts(made), use(made)[-1][0]

    assert results(fresh(3, disagree)) == [((place, 3, 1, (0, 1, 2)), 2) for place in range(3)]


def test_what_is_pending_ends(fresh):
    def pend(comm):
        if comm.rank == 1:
            for source in (0, 2):  # both calls of both are pending
                comm.recv(np.empty(1), source, tag=1)
            die()
        work = comm.all_reduce(np.ones(100_000), async_op=True)
        message = comm.recv(np.empty(3), source=0 if comm.rank else 2, async_op=True)
        comm.send(np.ones(1), dest=1, tag=1)
        until_lost(comm)
        with comm.shrink() as made:
            used = use(made)[-1][0]
            raised = []
            for pending in (work, message):
                with pytest.raises(GpucollError) as caught:
                    pending.wait(timeout_s=5)
                raised.append(type(caught.value))
            return raised, used

    for (of_work, of_message), used in results(fresh(3, pend), [1]):
        assert of_work is PeerLostError
        assert of_message in (PeerLostError, StateError)
        assert used == 1


def test_bad_use(fresh):
    def misuse(comm):
        for timeout_s in (0, -1, float("nan")):
            with pytest.raises(ArgumentError):
                comm.shrink(timeout_s=timeout_s)
        comm.barrier()
        comm.close()
        with pytest.raises(StateError, match="closed"):
            comm.shrink()
        with pytest.raises(StateError, match="closed"):
            _ = comm.completed
        return comm.epoch, comm.resumed_from, comm.former_ranks

    assert results(fresh(2, misuse)) == [(0, None, None)] * 2


def test_a_forked_child(fresh):
    def fork(comm):
        pid = os.fork()
        if not pid:
            try:
                comm.shrink()
            except StateError as error:
                os._exit(7 if "forked" in str(error) else 8)
            os._exit(9)
        comm.barrier()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert results(fresh(2, fork)) == [7, 7]


def test_one_rank_alone():
    with gpucoll.init(rank=0, world_size=1) as comm:
        comm.all_reduce(1)
        made = comm.shrink()
        with made.shrink() as again:
            assert facts(again) == (0, 1, 2, (0,))
            assert again.all_reduce(5) == 5


# --- where it resumes -----------------------------------------------------------------------------


def test_resumed_from_is_what_all_have_completed(fresh):
    """A small broadcast's root does not wait: it is ahead, and told how far the others are."""

    def run_ahead(comm):
        comm.barrier()
        before = comm.completed
        if comm.rank == 0:
            for _ in range(3):
                comm.broadcast(np.ones(4))
            record = comm._group.members.record_words(1, before + 1)
            until(lambda: record[Record.state] == RecordState.DONE)
            comm.abort()
        elif comm.rank == 1:
            comm.broadcast(np.ones(4))
            until(lambda: comm._group.is_aborted)
        else:
            until(lambda: comm._group.is_aborted)
        ahead = comm.completed - before
        with comm.shrink() as made:
            return ahead, made.resumed_from - before

    assert results(fresh(3, run_ahead)) == [(3, 0), (1, 0), (0, 0)]


def test_completed_counts_as_errors_do(fresh):
    def count(comm):
        found = [comm.completed]
        comm.barrier()
        found.append(comm.completed)
        comm.all_reduce(np.ones(100_000))
        found.append(comm.completed)
        comm.all_gather_object("x" * 3000)
        found.append(comm.completed)
        works = [comm.all_reduce(1, async_op=True) for _ in range(40)]
        for work in works:
            work.wait()
        found.append(comm.completed)
        comm.abort()
        until_lost(comm)
        return found, comm.completed

    for found, last in results(fresh(2, count)):
        assert found[:3] == [0, 1, 2]
        assert found[3] > 2
        assert found[4] == found[3] + 40
        assert last == found[4]


def test_a_deadline_in_a_call(fresh):
    """Who was late in a call is there in `shrink`, and all know that it was not completed."""

    def be_late(comm):
        comm.barrier()
        if comm.rank == 1:
            until(lambda: comm._group.is_aborted)
        with pytest.raises(LOSSES) as caught:
            comm.all_reduce(np.ones(4), timeout_s=0.2)
        text = str(caught.value)
        interrupted = [int(number) for number in re.findall(r"#(\d+)", text)]
        done = comm.completed
        with comm.shrink() as made:
            return interrupted[:1], done, made.resumed_from, facts(made), use(made)[-1][0]

    for place, (interrupted, *rest) in enumerate(results(fresh(3, be_late))):
        assert interrupted == [2]
        assert rest == [1, 1, (place, 3, 1, (0, 1, 2)), 2]
