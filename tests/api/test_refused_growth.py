"""`grow` and `join` that are refused: what the error says, and that everybody goes on."""

from __future__ import annotations

import os
import re
import socket
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.growing import begin, join_and_count, where
from tests.shrinking import results

import gpucoll
from gpucoll import config
from gpucoll.api import growing, joining
from gpucoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    AuthenticationError,
    MismatchError,
    RendezvousDeadlineError,
    RendezvousError,
    StateError,
)
from gpucoll.rendezvous.door import Door
from gpucoll.rendezvous.door_place import DoorPlace


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
            return join_and_count(seat), ""
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
            return join_and_count(seat)
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
            return join_and_count(seat)
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
            return join_and_count(seat, meet=meet)
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
            return join_and_count(seat, meet=meet)
        comm = begin(seat, 2, timeout_s=60.0)
        given = {} if comm.rank else {"meet": meet}
        with pytest.raises(RendezvousError, match="rank 1: rank 0 was given meet, and this"):
            comm.grow(**given, wait_s=15)
        with comm.grow(meet=meet, wait_s=15) as comm:
            return comm.all_reduce(1)

    assert results(fresh(3, give_it_to_rank_0, f"file://{tmp_path}/meeting")) == [3] * 3


def test_a_rank_that_cannot_meet_newcomers_says_so_at_once(fresh, tmp_path):
    """All raise it, and the newcomer waits on."""

    def lack_the_secret(seat, meet):
        if seat.rank == 2:
            return join_and_count(seat, meet=meet), ""
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
