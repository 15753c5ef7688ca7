"""`shrink` over several hosts: who goes on after losses, and who is told that it cannot."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from tests.group.world.test_namespaces import ENVIRONMENT, namespaces, on_namespaces
from tests.shrinking import arrive, die, facts, left_over, results, until_lost, use
from tests.shrinking import fresh_on_hosts as fresh
from tests.waiting import SOON_S, until

from gpucoll.errors import AbortedError, DeadlineError, MismatchError, PeerLostError, ShrinkError
from gpucoll.group.host.shrinking import Statements
from gpucoll.group.world import shrinking
from gpucoll.group.world.ballots import Ballots, create

__all__ = ["fresh", "namespaces"]


def expected(count, lost, epoch=1):
    left = tuple(rank for rank in range(count) if rank not in lost)
    return [(place, len(left), epoch, left) for place in range(len(left))]


# --- ranks that are killed ------------------------------------------------------------------------


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize(
    ("placed", "victims"),
    [
        ("ab", [1]),
        ("aabb", [1]),
        ("aabb", [2]),  # a leader: the other rank of its host goes on
        ("aabb", [0]),
        ("aabb", [2, 3]),  # a whole host
        ("aaabb", [0, 1]),
        ("abc", [0]),
        ("abab", [1]),
        ("aabbc", [0, 2]),
    ],
)
def test_killed_ranks(fresh, placed, victims):
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
            return facts(made), use(made)[-1][0], took_s, made.resumed_from

    found = results(fresh(placed, lose_and_go_on), victims)

    assert [each[0] for each in found] == expected(len(placed), victims)
    assert {each[1] for each in found} == {len(found) - 1}
    assert all(each[2] < SOON_S for each in found)
    assert len({each[3] for each in found}) == 1


@pytest.mark.soak
def test_again_and_again(fresh):
    def shrink_often(comm):
        seen = []
        for victim in (2, 0, 1):
            arrive(comm)
            if comm.rank == victim:
                die()
            until_lost(comm)
            comm = comm.shrink()
            seen.append((comm.epoch, comm.former_ranks, use(comm)[-1][0]))
        comm.close()
        return seen, left_over()

    found = results(fresh("aabbb", shrink_often), [2, 0, 3])

    history = [(1, (0, 1, 3, 4), 3), (2, (1, 2, 3), 2), (3, (0, 2), 1)]
    assert found == [(history, [])] * 2


def test_nothing_is_left_over(fresh):
    def lose(comm):
        arrive(comm)
        if comm.rank == 2:
            die()
        until_lost(comm)
        made = comm.shrink()
        made.barrier()
        made.close()
        return left_over()

    assert results(fresh("aabb", lose), [2]) == [[]] * 3


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize(
    ("placed", "victims"), [("ab", [0]), ("aabb", [0, 1]), ("aabb", [0, 2]), ("abc", [1, 2])]
)
def test_a_minority_raises(fresh, placed, victims):
    def lose(comm):
        arrive(comm)
        if comm.rank in victims:
            die()
        until_lost(comm)
        start = time.monotonic()
        try:
            made = comm.shrink()
        except ShrinkError as error:
            return time.monotonic() - start, str(error)
        # The second victim was still there when the first one's loss was told.
        until_lost(made)
        with made, pytest.raises(ShrinkError) as caught:
            made.shrink()
        return time.monotonic() - start, str(caught.value)

    for took_s, text in results(fresh(placed, lose), victims):
        assert took_s < SOON_S
        assert "cannot go on: of" in text
        assert "are needed" in text
        assert "Close the communicator" in text


# --- links that are cut ---------------------------------------------------------------------------


def lose_link(comm, ready):
    comm.barrier()
    if comm.rank == 0:
        with open(ready, "w"):
            pass
    error = until_lost(comm)
    start = time.monotonic()
    try:
        with comm.shrink() as made:
            took_s = time.monotonic() - start
            return type(error), took_s, facts(made), use(made)[-1][0]
    except ShrinkError as minority:
        return type(error), time.monotonic() - start, str(minority), left_over()


@pytest.mark.soak
@pytest.mark.parametrize(("placed", "cut"), [("aab", "b"), ("abc", "a"), ("aabb", "b")])
def test_a_cut_link(hosts, rank_server, namespaces, tmp_path, placed, cut):
    """The majority goes on, or the half with rank 0; the others raise, both in time."""
    ready, place = tmp_path / "ready", ord(cut) - ord("a")
    alone = [rank for rank, letter in enumerate(placed) if letter == cut]
    with rank_server.fork(len(placed)) as pool:
        hosts.start(
            pool,
            placed,
            on_namespaces,
            namespaces.names,
            lose_link,
            str(ready),
            gives="seat",
            environment=ENVIRONMENT,
        )
        try:
            until(ready.exists)
            namespaces.cut_off(place)
            found = results(pool.collect())
        finally:
            namespaces.restore(place)

    left = [rank for rank in range(len(placed)) if rank not in alone]
    for rank, (error, took_s, *rest) in enumerate(found):
        assert error is PeerLostError
        assert took_s < SOON_S
        if rank in alone:
            assert f"of {len(placed)} ranks rank" in rest[0]
            assert f"({len(alone)}), and" in rest[0]
            assert "cannot be reached" in rest[0]
        else:
            assert rest == [expected(len(placed), alone)[left.index(rank)], len(left) - 1]


# --- ranks that are stopped, late, or leave -------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_a_stopped_rank_is_left_behind(hosts, rank_server, late):
    def stop(comm):
        arrive(comm)
        if comm.rank == late:
            os.kill(os.getpid(), signal.SIGSTOP)
        error = until_lost(comm, timeout_s=0.5)
        try:
            # A leader that is stopped tells its ranks nothing: those wait a second longer.
            with comm.shrink(timeout_s=3) as made:
                return error, facts(made), use(made)[-1][0]
        except ShrinkError as left_behind:
            comm.close()
            return error, str(left_behind), left_over()

    others = [rank for rank in range(4) if rank != late]
    with rank_server.fork(4) as pool:
        hosts.start(pool, "aabb", stop)
        found = [reply.result for reply in pool.collect(only=others)]
        pool.ranks[late].send(signal.SIGCONT)
        (reply,) = pool.collect(only=[late])
    assert [each[1] for each in found] == expected(4, [late])
    assert all(isinstance(each[0], DeadlineError) for each in found)
    error, left_behind, left = reply.result
    assert isinstance(error, DeadlineError)
    assert f"rank {late} of 4" in left_behind
    assert "gone on" in left_behind
    assert left == []


@pytest.mark.soak
def test_ranks_come_at_different_times(fresh):
    def come(comm):
        arrive(comm)
        if comm.rank == 1:
            die()
        until_lost(comm)
        time.sleep(0.4 * (4 - comm.rank))  # so late
        with comm.shrink() as made:
            return facts(made), use(made)[-1][0]

    assert results(fresh("aabbc", come), [1]) == [(each, 3) for each in expected(5, [1])]


@pytest.mark.soak
@pytest.mark.parametrize("away", [0, 1, 2])
def test_a_rank_that_never_comes_counts_as_lost(fresh, away):
    def stay_away(comm):
        arrive(comm)
        if comm.rank == 3:
            comm.abort()
        until_lost(comm)
        if comm.rank == away:
            until(lambda: len(comm._group.gone_ranks()) or False, 10)
            with pytest.raises(ShrinkError):
                comm.shrink(timeout_s=0.2)
            return None
        with comm.shrink(timeout_s=2.0) as made:
            return facts(made), use(made)[-1][0]

    found = results(fresh("aabb", stay_away))

    left = [each for rank, each in enumerate(found) if rank != away]
    assert left == [(each, 2) for each in expected(4, [away])]


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("who", [0, 1, 3])
def test_a_rank_that_has_closed(fresh, who):
    def close(comm):
        arrive(comm)
        if comm.rank == who:
            comm.close()
            return None
        error = until_lost(comm)
        with comm.shrink() as made:
            return isinstance(error, PeerLostError), facts(made), use(made)[-1][0]

    found = results(fresh("aabb", close))

    left = [each for rank, each in enumerate(found) if rank != who]
    assert left == [(True, each, 2) for each in expected(4, [who])]


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("who", [0, 1, 2])
def test_ctrl_c_inside(fresh, who):
    def interrupt(comm):
        arrive(comm)
        if comm.rank == 3:
            comm.abort()
        until_lost(comm)
        if comm.rank == who:
            me, statements = threading.get_ident(), Statements(comm._group.host.members)

            def send():
                until(lambda: statements.round_of(comm._group.host.rank) == 1)
                signal.pthread_kill(me, signal.SIGINT)

            thread = threading.Thread(target=send)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                comm.shrink()
            thread.join()
            return None
        if comm.rank == who + 1 or who == 1:  # so that the others wait
            time.sleep(0.5)
        with comm.shrink() as made:
            return facts(made), use(made)[-1][0]

    found = results(fresh("aabb", interrupt))

    left = [each for rank, each in enumerate(found) if rank != who]
    assert left == [(each, 2) for each in expected(4, [who])]


# --- ranks that die on the way --------------------------------------------------------------------


def before_speaking(patch):
    patch.setattr(shrinking.WorldAgreement, "_turn", lambda *_: die())


def after_promising(patch):
    promise = Ballots.promise
    patch.setattr(Ballots, "promise", lambda *args: die() if promise(*args) else None)


def after_accepting(patch):
    accept = Ballots.accept
    patch.setattr(Ballots, "accept", lambda *args: die() if accept(*args) else None)


def before_telling(patch):
    patch.setattr(Ballots, "decide", lambda *_: die())


def once_decided(patch):
    patch.setattr(shrinking.WorldAgreement, "meeting_of", lambda *_: die())


def as_it_is_ready(patch):
    from gpucoll.rendezvous.guest import Guest

    send = Guest._send
    patch.setattr(Guest, "_send", lambda *args: die() if "ready" in args[1] else send(*args))


MOMENTS = (
    (before_speaking, 0),
    (before_speaking, 3),
    (after_promising, 0),
    (after_promising, 3),
    (after_accepting, 0),
    (after_accepting, 3),
    (before_telling, 0),
    (before_telling, 3),
    (once_decided, 0),
    (once_decided, 1),
    (once_decided, 6),
    (as_it_is_ready, 4),
)
SPEAKING = (after_promising, after_accepting, before_telling)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(("moment", "victim"), MOMENTS)
def test_a_rank_dies_inside(fresh, moment, victim):
    """Of three hosts with ranks 0 and 1, 3 to 5, and 6; rank 2 was the first that led there."""

    def lose_two(comm):
        arrive(comm)
        if comm.rank == 2:
            die()
        until_lost(comm)
        group = comm._group
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == victim:
                moment(patch)
            elif group.hosts.host_of(victim) == group.here and moment in SPEAKING:
                until(lambda: group._ballots.leader() >= 0)  # the victim speaks for the host
            made = comm.shrink(timeout_s=5)
        with made:
            return facts(made), made.resumed_from, use(made)[-1][0]

    replies = fresh("aabbbbc", lose_two)
    found = results(replies, [2, victim])

    assert [each[0] for each in found] == expected(7, [2, victim])
    assert len({each[1] for each in found}) == 1
    assert {each[2] for each in found} == {4}


# --- after what -----------------------------------------------------------------------------------


def test_a_communicator_that_is_whole(fresh):
    def shrink(comm):
        pending = comm.all_reduce(np.full(30_000, comm.rank), async_op=True)
        with comm.shrink() as made:
            assert pending.wait()[0] == 6
            return facts(made), made.resumed_from, use(made)[-1][0]

    assert results(fresh("aabb", shrink)) == [(each, 1, 3) for each in expected(4, [])]


@pytest.mark.soak
def test_others_wait_in_another_call(fresh):
    def shrink(comm):
        comm.barrier()
        error = until_lost(comm) if comm.rank > 1 else None
        with comm.shrink() as made:
            return error, facts(made)

    found = results(fresh("aabb", shrink))

    assert [each[1] for each in found] == expected(4, [])
    assert all(isinstance(each[0], AbortedError) for each in found[2:])


def test_after_a_mismatch(fresh):
    def disagree(comm):
        with pytest.raises(MismatchError):
            comm.all_reduce(np.ones(3 + comm.rank))
        with comm.shrink() as made:
            return facts(made), use(made)[-1][0]

    assert results(fresh("aab", disagree)) == [(each, 2) for each in expected(3, [])]


def test_completed_is_the_number_of_the_last_call(fresh):
    def count(comm):
        found = [comm.completed]
        comm.barrier()
        found.append(comm.completed)
        comm.all_reduce(np.ones(100_000))
        comm.all_gather_object("x" * 3000)
        found.append(comm.completed)
        if comm.rank == 2:
            die()
        until_lost(comm)
        with comm.shrink() as made:
            return found, comm_numbers(made, found[-1])

    def comm_numbers(made, before):
        return made.resumed_from - before, made.completed

    found = results(fresh("aabb", count), [2])

    assert all(each[0][:2] == [0, 1] for each in found)
    assert {each[0][2] for each in found} == {found[0][0][2]}
    assert all(each[1] == (0, 0) for each in found)


# --- what a host has promised ---------------------------------------------------------------------


def test_ballots():
    fd = create(4)
    mine, other = Ballots(fd, 4), Ballots(fd, 4)
    os.close(fd)
    assert mine.leader() == -1
    assert mine.follow(-1, 2)
    assert not other.follow(-1, 1)
    assert other.leader() == 2
    assert other.follow(2, 1)
    assert mine.promise(1, 5)
    assert not other.promise(1, 4)
    assert other.accepted(1) is None
    assert not other.accept(1, 4, {"a": 1})
    for ballot in (5, 6, 9):
        assert other.accept(1, ballot, {"a": ballot})
        assert mine.accepted(1) == (ballot, {"a": ballot})
    assert mine.accepted(2) is None
    mine.decide(1, {"a": 9})
    other.decide(1, {"a": 8})
    assert other.decided(1) == {"a": 9}
    mine.note(2)
    mine.note(1)
    assert other.latest() == 2
    assert not other.refusal(1)
    mine.refuse(1, "too few")
    assert other.refusal(1) == "too few"
    mine.close()
    other.close()
