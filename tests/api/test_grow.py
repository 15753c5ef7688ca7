"""`grow` and `join` on one host: who gets in, what it costs the others, and what goes wrong."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.growing import begin, join_or_grow, members, where
from tests.ranks import Ended
from tests.shrinking import LOSSES, die, left_over, results, until_lost

import gpucoll
from gpucoll import config
from gpucoll.api import communicator, growing, joining
from gpucoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    AuthenticationError,
    MismatchError,
    PeerLostError,
    RendezvousDeadlineError,
    RendezvousError,
    StateError,
)
from gpucoll.rendezvous.door import Door
from gpucoll.rendezvous.door_caller import Caller
from gpucoll.rendezvous.door_place import DoorPlace


@pytest.fixture
def fresh(rank_server):
    """Call a function on seats of fresh processes, of which some may end; return the replies."""

    def call(count, function, *args, but=()):
        with rank_server.fork(count) as pool:
            pool.start(function, *args, gives="seat")
            going = [rank for rank in range(count) if rank not in but]
            replies = pool.collect(only=going)
            if but:
                pool.kill()
            return replies

    return call


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


# --- what is wrong --------------------------------------------------------------------------------


def test_nobody_lets_it_in(fresh):
    def join_nobody(seat):
        where(seat)
        with pytest.raises(RendezvousDeadlineError) as caught:
            gpucoll.join(timeout_s=0.3)
        return str(caught.value)

    (text,) = results(fresh(1, join_nobody))

    assert text.startswith("a process waited 0.3 s in join: nobody let it in at this host.")
    assert "Do the ranks call grow, with the same meet and name" in text


def test_nothing_says_where(ranks):
    def grow_anywhere(comm):
        with pytest.raises(RendezvousError, match="nothing says where newcomers wait"):
            comm.grow()
        with pytest.raises(RendezvousError, match="nothing says where newcomers wait"):
            gpucoll.join()
        return comm.all_reduce(1)

    assert ranks.call(2, grow_anywhere) == [2, 2]


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"at_most": 0}, ArgumentError, "at_most must be at least 1; got 0"),
    ({"at_most": 1.5}, ArgumentTypeError, "at_most must be an int or None; got 1.5"),
    ({"wait_s": -1}, ArgumentError, "wait_s must be between 0 and"),
    ({"wait_s": float("nan")}, ArgumentError, "wait_s must be between 0 and"),
    ({"wait_s": "long"}, ArgumentTypeError, "wait_s must be a number of seconds; got 'long'"),
    ({"timeout_s": 0}, ArgumentError, "timeout_s must be positive"),
    ({"meet": "http://x"}, ArgumentError, "meet must be tcp://"),
    ({"meet": 5}, ArgumentTypeError, "or a store with set and get; got int"),
    ({"name": ""}, ArgumentError, "name must have 1 to 200 printable characters"),
]


def test_wrong_arguments_change_nothing(ranks):
    def grow_wrongly(comm):
        os.environ[config.JOB] = "wrong arguments"
        try:
            for given, kind, text in WRONG:
                with pytest.raises(kind, match=re.escape(text)):
                    comm.grow(**given)
            assert comm.grow() is comm
            return comm.all_reduce(1)
        finally:
            del os.environ[config.JOB]

    assert ranks.call(2, grow_wrongly) == [2, 2]


def test_a_place_that_is_taken(ranks):
    """Rank 0 alone sees it; all raise it, and go on."""

    def grow_there(comm, port):
        with mock.patch.dict(os.environ, {config.SECRET: "a secret that is long enough"}):
            with pytest.raises(RendezvousError) as caught:
                comm.grow(meet=f"tcp://127.0.0.1:{port}")
            return comm.all_reduce(1), str(caught.value)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = ranks.call(2, grow_there, port)

    for rank, (total, text) in enumerate(found):
        assert total == 2
        assert text.startswith(
            f"rank {rank} of 2 in grow: rank 0 of 2 cannot listen at the meeting"
        )
        assert "has the port" in text


def test_another_version_is_turned_away(fresh):
    def join_with_another(seat):
        if seat.rank == 1:
            with (
                mock.patch.dict(growing.SAME, {"the version of gpucoll": "0.0.1"}),
                pytest.raises(RendezvousError) as caught,
            ):
                gpucoll.join(**where(seat), timeout_s=20)
            return str(caught.value)
        with begin(seat, 1) as comm:
            assert comm.grow(**where(seat), wait_s=0.5) is comm
            return ""

    text = results(fresh(2, join_with_another))[1]

    assert "did not let this process join: this process does not belong here" in text
    assert "the version of gpucoll is 0.0.1, and" in text


def test_messages_that_would_be_lost(fresh):
    def grow_too_soon(seat):
        if seat.rank == 2:
            with gpucoll.join(**where(seat), timeout_s=20) as comm:
                return comm.all_reduce(1), ""
        comm = begin(seat, 2)
        if comm.rank == 1:
            comm.send(np.arange(3), 0, tag=7)
        comm.barrier()
        with pytest.raises(MismatchError) as caught:
            comm.grow(**where(seat), wait_s=15)
        if comm.rank == 0:
            comm.recv(source=1, tag=7)
        with comm.grow(**where(seat), wait_s=15) as comm:
            return comm.all_reduce(1), str(caught.value)

    found = results(fresh(3, grow_too_soon))

    assert [total for total, _ in found] == [3] * 3
    for rank, (_, text) in enumerate(found[:2]):
        assert text.startswith(f"rank {rank} of 2 cannot grow while messages wait to be received")
        assert "rank 0 has one from rank 1 with tag 7. Receive them first" in text


def test_a_message_that_is_sent_while_rank_0_is_at_the_door(fresh):
    """It would be lost as well."""

    def send_late(seat):
        if seat.rank == 2:
            with gpucoll.join(**where(seat), timeout_s=20) as comm:
                return comm.all_reduce(1)
        comm = begin(seat, 2)
        usual = Door.ask

        def ask_and_tell(door, *args):
            found = usual(door, *args)
            comm.send(np.arange(1), 1)
            return found

        if comm.rank == 1:
            comm.recv(source=0)
            comm.send(np.arange(3), 0, tag=7)
        with (
            mock.patch.object(Door, "ask", ask_and_tell),
            pytest.raises(MismatchError, match="rank 0 has one from rank 1 with tag 7"),
        ):
            comm.grow(**where(seat), wait_s=15)
        if comm.rank == 0:
            comm.recv(source=1, tag=7)
        with comm.grow(**where(seat), wait_s=15) as comm:
            return comm.all_reduce(1)

    assert results(fresh(3, send_late)) == [3] * 3


def test_receives_that_nobody_sends_to(fresh):
    def await_nothing(seat):
        if seat.rank == 2:
            with gpucoll.join(**where(seat), timeout_s=20) as comm:
                return comm.all_reduce(1)
        comm = begin(seat, 2)
        work = comm.recv(source=1, tag=7, async_op=True) if comm.rank == 0 else None
        with (
            mock.patch.object(growing, "_ON_THEIR_WAY_S", 0.05),
            pytest.raises(MismatchError, match="rank 0 has 1 asynchronous that nobody sends"),
        ):
            comm.grow(**where(seat), wait_s=15)
        if work is None:
            comm.send(np.arange(3), 0, tag=7)
        else:
            assert work.wait().tolist() == [0, 1, 2]
        with comm.grow(**where(seat), wait_s=15) as comm:
            return comm.all_reduce(1)

    assert results(fresh(3, await_nothing)) == [3] * 3


def test_two_communicators_at_one_place_without_names(fresh, tmp_path):
    """Ranks that read what the other one has written say so at once."""

    def grow_where_another_has(seat, meet):
        if seat.rank == 2:
            with gpucoll.join(meet=meet, timeout_s=20) as comm:
                return comm.all_reduce(1)
        comm = begin(seat, 2, timeout_s=60.0)
        usual = growing.key_of
        with (
            mock.patch.object(growing, "key_of", lambda *a: f"{usual(*a)}{comm.rank}"),
            pytest.raises(RendezvousError, match="rank 1: it finds another secret at file"),
        ):
            comm.grow(meet=meet, wait_s=15)
        with comm.grow(meet=meet, wait_s=15) as comm:
            return comm.all_reduce(1)

    assert results(fresh(3, grow_where_another_has, f"file://{tmp_path}/meeting")) == [3] * 3


def test_rank_0_alone_is_given_a_place(fresh, tmp_path):
    def give_it_to_rank_0(seat, meet):
        if seat.rank == 2:
            with gpucoll.join(meet=meet, timeout_s=20) as comm:
                return comm.all_reduce(1)
        comm = begin(seat, 2, timeout_s=60.0)
        given = {} if comm.rank else {"meet": meet}
        with pytest.raises(RendezvousError, match="rank 1: rank 0 was given meet, and this"):
            comm.grow(**given, wait_s=15)
        with comm.grow(meet=meet, wait_s=15) as comm:
            return comm.all_reduce(1)

    assert results(fresh(3, give_it_to_rank_0, f"file://{tmp_path}/meeting")) == [3] * 3


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


def test_a_rank_that_cannot_meet_newcomers_says_so_at_once(fresh, tmp_path):
    """All raise it, and the newcomer waits on."""

    def lack_the_secret(seat, meet):
        if seat.rank == 2:
            with gpucoll.join(meet=meet, timeout_s=20) as comm:
                return comm.all_reduce(1), ""
        comm = begin(seat, 2, timeout_s=60.0)
        failure = AuthenticationError(f"rank {comm.rank} of 2 has no secret")
        with (
            mock.patch.object(DoorPlace, "credentials", side_effect=failure),
            pytest.raises(RendezvousError) as caught,
        ):
            comm.grow(meet=meet, wait_s=15)
        with comm.grow(meet=meet, wait_s=15) as comm:
            return comm.all_reduce(1), str(caught.value)

    found = results(fresh(3, lack_the_secret, f"file://{tmp_path}/meeting"))

    assert [total for total, _ in found] == [3] * 3
    for rank, (_, text) in enumerate(found[:2]):
        assert text.startswith(f"rank {rank} of 2 cannot grow: rank 1: has no secret. The comm")


def test_a_secret_that_is_too_short_on_rank_0_breaks_nothing(ranks):
    def grow_there(comm):
        with mock.patch.dict(os.environ, {config.SECRET: "" if comm.rank else "short"}):
            with pytest.raises(RendezvousError, match="holds a secret of 5 bytes"):
                comm.grow(meet="tcp://127.0.0.1:1")
            return comm.all_reduce(1)

    assert ranks.call(2, grow_there) == [2, 2]


def test_a_newcomer_that_cannot_meet_anybody_leaves(fresh):
    """It has too few descriptors, for example; the others are not kept waiting for it."""

    def join_in_vain(seat):
        if seat.rank == 1:
            failure = RendezvousError("too few file descriptors")
            with (
                mock.patch.object(joining, "create", side_effect=failure),
                pytest.raises(RendezvousError, match="too few"),
            ):
                gpucoll.join(**where(seat), timeout_s=20)
            return 1
        with begin(seat, 1, timeout_s=60.0) as comm:
            assert comm.grow(**where(seat), wait_s=15) is comm
            return comm.all_reduce(1)

    assert results(fresh(2, join_in_vain)) == [1, 1]


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


def test_ranks_of_an_mpi(ranks):
    def grow_over_mpi(comm):
        os.environ[config.JOB] = "grow over MPI"
        try:
            with (
                mock.patch.object(comm._group, "over_mpi", object()),
                pytest.raises(StateError, match="MPI adds none"),
            ):
                comm.grow()
            return comm.all_reduce(1)
        finally:
            del os.environ[config.JOB]

    assert ranks.call(2, grow_over_mpi) == [2, 2]


def test_another_call_beside_grow(ranks):
    """It is compared as every call is."""

    def differ(comm):
        os.environ[config.JOB] = "another call"
        try:
            call = comm.barrier if comm.rank else comm.grow
            with pytest.raises(MismatchError) as caught:
                call()
            return str(caught.value)
        finally:
            del os.environ[config.JOB]

    for text in ranks.call(2, differ):
        assert "rank 0 called grow" in text


def test_inside_a_group(ranks):
    def grow_in_group(comm):
        with comm.group(), pytest.raises(StateError, match=r"grow cannot be called inside group"):
            comm.grow(meet="file:///nowhere")
        return comm.all_reduce(1)

    assert ranks.call(2, grow_in_group) == [2, 2]
