"""`grow` and `join` over several hosts: newcomers of old hosts and of new ones, and strangers."""

from __future__ import annotations

import os
from unittest import mock

import pytest
from tests.growing import begin, join_or_grow, members, where
from tests.ranks import Ended
from tests.shrinking import LOSSES, die, left_over, results

import gpucoll
from gpucoll import config
from gpucoll.api import communicator, growing
from gpucoll.errors import ArgumentError, AuthenticationError, ShrinkError


@pytest.fixture
def fresh(hosts, rank_server):
    """Call a function on seats of fresh processes on several hosts; return the replies."""

    def call(placed, function, *args):
        with rank_server.fork(len(placed)) as pool:
            hosts.start(pool, placed, function, *args, gives="seat")
            return pool.collect()

    return call


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize(
    ("placed", "n_old"),
    [
        ("ab", 1),  # the first rank of another host
        ("aab", 2),  # one host becomes two
        ("abab", 2),
        ("aaa", 2),  # one host, over TCP
        ("abcabc", 3),
        ("aabbcd", 4),
    ],
)
def test_newcomers_of_old_and_of_new_hosts(fresh, placed, n_old):
    def grow_once(seat):
        with join_or_grow(seat, n_old) as comm:
            found = members(comm)
            hosts = comm.all_gather_object(os.environ[config.HOST_ID])
        return comm.rank, found, hosts, left_over()

    replies = results(fresh(placed, grow_once))

    for seat, (rank, found, hosts, left) in enumerate(replies):
        assert rank == seat if seat < n_old else rank >= n_old
        assert [each[:3] for each in found] == [
            (r, 1, (*range(n_old),)) for r in range(len(placed))
        ]
        assert hosts[rank] == f"host {placed[seat]}"
        assert left == []


def test_a_newcomer_that_is_killed_leaves_the_others_whole(fresh):
    def join_beside(seat):
        if seat.rank == 2:
            create = communicator.create

            def create_and_die(*args, **given):
                create(*args, **given)
                die()

            with mock.patch("gpucoll.api.joining.create", create_and_die):
                gpucoll.join(**where(seat), timeout_s=20)
        comm = begin(seat, 2)
        grown = comm.grow(**where(seat), wait_s=15, timeout_s=5)
        with grown:
            return grown is comm, grown.epoch, grown.all_reduce(1)

    replies = fresh("abc", join_beside)

    assert isinstance(replies[2], Ended)
    assert results(replies, [2]) == [(True, 0, 2)] * 2


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("moment", ["_meet", "_is_made_by_all"])
@pytest.mark.parametrize("victim", [0, 1])
def test_an_old_rank_that_is_killed(fresh, victim, moment):
    def lose_in_grow(seat):
        if seat.rank == 3:
            comm = gpucoll.join(**where(seat), timeout_s=20)
        else:
            comm = begin(seat, 3)
        usual = getattr(growing.Growing, moment)

        def do_and_die(call, *args):
            usual(call, *args)
            die()

        while True:
            try:
                comm.barrier()
                if comm.world_size == 3 and comm.epoch:
                    break
                if seat.rank == victim:
                    with mock.patch.object(growing.Growing, moment, do_and_die):
                        comm.grow(**where(seat), wait_s=15)
                comm = comm.grow(**where(seat), wait_s=15)
            except LOSSES:
                comm = comm.shrink(timeout_s=5)
        with comm:
            return sorted(comm.all_gather_object(seat.rank))

    replies = fresh("aabc", lose_in_grow)

    left = [seat for seat in range(4) if seat != victim]
    assert results(replies, [victim]) == [left] * 3


def test_two_parts_never_go_on_apart(fresh):
    """Until all have arrived, most of the ranks from before are needed, not only most of all."""

    def lose_founders(seat):
        with mock.patch("gpucoll.api.growing.arrive"), mock.patch("gpucoll.api.joining.arrive"):
            comm = join_or_grow(seat, 2)
        assert comm._group.completed == 0
        if comm.rank < 2:
            die()
        try:
            comm.barrier()
        except LOSSES:
            with pytest.raises(ShrinkError) as caught:
                comm.shrink(timeout_s=2)
            return str(caught.value)
        return ""

    for text in results(fresh("abccc", lose_founders), [0, 1]):
        assert "Most of ranks 0 to 1, from which grow began, are not here" in text


def test_who_does_not_know_the_secret_does_not_get_in(fresh):
    def knock(seat):
        if seat.rank == 2:
            with (
                mock.patch("gpucoll.rendezvous.meeting_file.FilePoint.secret", return_value=None),
                mock.patch("gpucoll.rendezvous.door_caller._TURNED_AWAY_S", 0.0),
                mock.patch.dict(os.environ, {config.SECRET: "another secret, as long as it is"}),
                pytest.raises(AuthenticationError),
            ):
                gpucoll.join(**where(seat), timeout_s=20)
            return True, 2
        comm = begin(seat, 2)
        with comm.grow(**where(seat), wait_s=1.0) as grown:
            return grown is comm, grown.all_reduce(1)

    assert results(fresh("abc", knock)) == [(True, 2)] * 3


def test_a_place_that_no_other_host_can_reach(hosts):
    def grow_here(comm):
        with (
            mock.patch.dict(os.environ, {config.JOB: "of this host alone"}),
            pytest.raises(ArgumentError, match="the ranks are on several hosts, and nothing says"),
        ):
            comm.grow()
        return comm.all_reduce(1)

    assert hosts.call("ab", grow_here) == [2, 2]
