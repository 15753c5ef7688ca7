"""`grow` and `join` on one host: who gets in, and what failing on the way costs the others."""

from __future__ import annotations

import os
import signal
import threading
from unittest import mock

import numpy as np
import pytest
from tests.growing import begin, join_or_grow, members, where
from tests.ranks import Ended
from tests.shrinking import LOSSES, die, left_over, results, until_lost

import gpucoll
from gpucoll import config
from gpucoll.api import communicator, growing, joining
from gpucoll.errors import PeerLostError, RendezvousDeadlineError
from gpucoll.rendezvous.door_caller import Caller

# --- who gets in ----------------------------------------------------------------------------------


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize(("n_old", "n_new"), [(2, 1), (1, 2), (3, 3), (4, 1)])
def test_newcomers_get_the_highest_numbers(fresh, n_old, n_new):
    def grow_once(seat):
        with join_or_grow(seat, n_old) as comm:
            found = members(comm)
            rank = comm.rank
        return rank, found, left_over()

    replies = results(fresh(n_old + n_new, grow_once))

    former = tuple(range(n_old))
    for seat, (rank, found, left) in enumerate(replies):
        assert rank == seat if seat < n_old else rank >= n_old
        assert [each[:3] for each in found] == [(r, 1, former) for r in range(n_old + n_new)]
        assert len({each[3] for each in found}) == 1
        assert left == []


def test_nobody_waits(ranks):
    def look_often(comm):
        os.environ[config.JOB] = "nobody comes"
        try:
            before = comm.completed
            same = [comm.grow() is comm for _ in range(3)]
            return same, comm.epoch, comm.all_reduce(1), comm.completed - before
        finally:
            del os.environ[config.JOB]

    for same, epoch, total, n_calls in ranks.call(3, look_often):
        assert same == [True] * 3
        assert (epoch, total, n_calls) == (0, 3, 4)


def test_at_most_so_many_at_once(fresh):
    def grow_twice(seat):
        if seat.rank:
            with gpucoll.join(**where(seat), timeout_s=20) as comm:
                if comm.world_size == 3:
                    comm = comm.grow(**where(seat), wait_s=15, at_most=1)
                return comm.epoch, comm.all_reduce(1)
        comm = begin(seat, 1)
        comm = comm.grow(**where(seat), wait_s=15, at_most=2)
        comm = comm.grow(**where(seat), wait_s=15, at_most=1)
        with comm:
            return comm.epoch, comm.all_reduce(1)

    assert results(fresh(4, grow_twice)) == [(2, 4)] * 4


def test_lost_ranks_are_won_back(fresh):
    """The life of an elastic job: a rank dies, the others go on, another one takes its place."""

    def lose_and_win(seat):
        if seat.rank == 3:
            comm = gpucoll.join(**where(seat), timeout_s=20)
            state = None
        else:
            comm, state = begin(seat, 3), np.arange(5) + 1
            comm.barrier()
            if comm.rank == 1:
                die()
            until_lost(comm)
            comm = comm.shrink()
            comm = comm.grow(**where(seat), wait_s=15)
        with comm:
            state = comm.broadcast_object(state)
            return comm.rank, comm.epoch, comm.former_ranks, state.tolist()

    found = results(fresh(4, lose_and_win), [1])

    assert found == [(rank, 2, (0, 1), [1, 2, 3, 4, 5]) for rank in (0, 1, 2)]


def test_settings_are_those_of_the_ranks(fresh):
    def grow_ordered(seat):
        if seat.rank:
            comm = gpucoll.join(**where(seat), timeout_s=20)
        else:
            comm = begin(seat, 1, deterministic="order", timeout_s=7.0)
            comm = comm.grow(**where(seat), wait_s=15)
        with comm:
            return comm._group.keeps_order, comm._group.timeout_s, comm._wish.keeps_order

    assert results(fresh(2, grow_ordered)) == [(True, 7.0, True)] * 2


def test_a_process_of_an_elastic_launcher_joins_by_init(fresh):
    def start_again(seat):
        if seat.rank == 0:
            return join_or_grow(seat, 1).all_reduce(1)
        os.environ[config.JOIN] = "1"
        where(seat)
        try:
            with gpucoll.init(timeout_s=20) as comm:
                return comm.all_reduce(1)
        finally:
            del os.environ[config.JOIN]

    assert results(fresh(2, start_again)) == [2, 2]


# --- newcomers that fail --------------------------------------------------------------------------

MOMENTS = ("answers", "meets", "has met", "waits")


def fail_at(moment, fail):
    """Return a context in which a newcomer fails at one of the moments of its way."""
    create, say, message = communicator.create, Caller.say, Caller.next_message

    def say_first(caller, said):
        say(caller, said)
        fail()

    def create_and_fail(*args, **given):
        if moment == "meets":
            fail()
        made = create(*args, **given)
        if moment == "has met":
            fail()
        return made

    def wait_and_fail(caller):
        said = message(caller)
        if "in" in said:
            fail()
        return said

    if moment == "answers":
        return mock.patch.object(Caller, "say", say_first)
    if moment == "waits":
        return mock.patch.object(Caller, "next_message", wait_and_fail)
    return mock.patch.object(joining, "create", create_and_fail)


def use_beside_failing(seat, moment, fail, n_old, timeout_s):
    if seat.rank == seat.world_size - 1:
        with fail_at(moment, fail):
            gpucoll.join(**where(seat), timeout_s=20)
        raise AssertionError("it was to fail")
    comm = begin(seat, n_old)
    grown = comm.grow(**where(seat), wait_s=15, timeout_s=timeout_s)
    total = None
    try:
        total = grown.all_reduce(1)
    except PeerLostError:  # it died after all had gone over
        grown = grown.shrink()
        total = grown.all_reduce(1)
    with grown:
        return total, grown is comm, left_over() != []


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_newcomer_that_is_killed(fresh, moment):
    replies = fresh(3, use_beside_failing, moment, die, 2, 10.0)

    assert isinstance(replies[2], Ended)
    stays = moment != "waits"
    assert results(replies, [2]) == [(2, stays, True)] * 2


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.soak
@pytest.mark.parametrize("moment", MOMENTS[:3])
def test_a_newcomer_that_is_stopped(fresh, moment):
    """It costs the others what the meeting may take, and no more."""
    replies = fresh(3, use_beside_failing, moment, stop, 2, 1.0, but=[2])

    assert results(replies) == [(2, True, True)] * 2


def test_one_newcomer_fails_and_another_gets_in(fresh):
    def join_beside(seat):
        if seat.rank == 2:
            with fail_at("meets", die):
                gpucoll.join(**where(seat), timeout_s=20)
        with join_or_grow(seat, 1) as comm:
            if comm.world_size == 1:
                comm = comm.grow(**where(seat), wait_s=15)
            return comm.all_reduce(1)

    replies = fresh(3, join_beside)

    assert results(replies, [2]) == [2, 2]


def test_a_newcomer_without_memory_says_so_and_the_others_go_on(fresh):
    def fail():
        raise MemoryError("nothing left")

    def join_in_vain(seat):
        if seat.rank == 1:
            with fail_at("meets", fail), pytest.raises(MemoryError, match="nothing left"):
                gpucoll.join(**where(seat), timeout_s=20)
            return 1, left_over()
        with begin(seat, 1) as comm:
            assert comm.grow(**where(seat), wait_s=15, timeout_s=1.0) is comm
            return comm.all_reduce(1), []

    assert results(fresh(2, join_in_vain)) == [(1, [])] * 2


# --- ranks that fail ------------------------------------------------------------------------------


def rank_fails(moment, fail):
    """Return a context in which a rank fails at one of the moments of `grow`."""
    usual = getattr(growing.Growing, moment)

    def fail_first(call, *args):
        found = usual(call, *args)
        fail()
        return found

    return mock.patch.object(growing.Growing, moment, fail_first)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("moment", ["_plan", "_meet", "_is_made_by_all"])
@pytest.mark.parametrize("victim", [0, 1])
def test_an_old_rank_that_is_killed(fresh, victim, moment):
    """All others agree whether the growth has taken place, and go on together."""

    def lose_in_grow(seat):
        if seat.rank == 3:
            try:
                comm = gpucoll.join(**where(seat), timeout_s=20)
            except RendezvousDeadlineError:
                return "never in"
        else:
            comm = begin(seat, 3)
            if seat.rank == victim:
                comm.barrier()
                with rank_fails(moment, die):
                    comm.grow(**where(seat), wait_s=15)
        while True:
            try:
                comm.barrier()
                if comm.world_size == 3 and comm.epoch:
                    break
                comm = comm.grow(**where(seat), wait_s=15)
            except LOSSES:
                comm = comm.shrink(timeout_s=5)
        with comm:
            return comm.world_size, comm.all_gather_object(seat.rank)

    replies = fresh(4, lose_in_grow)

    left = [seat for seat in range(4) if seat != victim]
    found = results(replies, [victim])
    assert [(size, sorted(seats)) for size, seats in found] == [(3, left)] * 3


def test_ctrl_c_at_the_door_gives_the_call_up(fresh):
    def wait_for_nobody(seat):
        comm = begin(seat, 2)
        if seat.rank == 0:
            timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                comm.grow(**where(seat), wait_s=60)
            timer.join()
        else:
            with pytest.raises(gpucoll.AbortedError):
                comm.grow(**where(seat), wait_s=60)
        comm.close()
        return left_over()

    assert results(fresh(2, wait_for_nobody)) == [[], []]


def test_ctrl_c_in_join(fresh):
    def join_nobody(seat):
        where(seat)
        timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            gpucoll.join(timeout_s=60)
        timer.join()
        return left_over()

    assert results(fresh(1, join_nobody)) == [[]]


def test_ctrl_c_while_rank_0_waits_for_newcomers_that_have_met(fresh):
    def interrupt(seat):
        if seat.rank == 1:
            with pytest.raises(RendezvousDeadlineError):
                gpucoll.join(**where(seat), timeout_s=0.8)
            return left_over()
        with (
            begin(seat, 1) as comm,
            mock.patch.object(growing.Growing, "_have_made", side_effect=KeyboardInterrupt),
            mock.patch.object(growing, "drop", wraps=growing.drop) as drop,
        ):
            try:
                comm.grow(**where(seat), wait_s=15)
            except KeyboardInterrupt:
                assert drop.call_args[0][0].is_closed
        return left_over()

    assert results(fresh(2, interrupt)) == [[], []]


@pytest.mark.parametrize("victim", [0, 2])
def test_ctrl_c_after_all_have_gone_over_leaves_nothing(fresh, victim):
    def interrupt(seat):
        def arrive(made, timeout_s):
            raise KeyboardInterrupt

        if seat.rank == victim:
            module = joining if victim == 2 else growing
            with mock.patch.object(module, "arrive", arrive), pytest.raises(KeyboardInterrupt):
                join_or_grow(seat, 2)
            return left_over()
        comm = join_or_grow(seat, 2)
        until_lost(comm)
        with comm.shrink() as comm:
            return comm.all_reduce(1)

    found = results(fresh(3, interrupt))

    assert found[victim] == []
    assert [each for seat, each in enumerate(found) if seat != victim] == [2, 2]
