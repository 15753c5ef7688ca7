"""Calls on GPU arrays between hosts: told, compared in order, bounded, wrapping; without a GPU."""

from __future__ import annotations

import re

import pytest
from tests.group.host.test_enqueued import FEW, poster
from tests.waiting import until

from gpucoll.errors import DeadlineError, MismatchError, PeerLostError
from gpucoll.group.world.enqueued import Mirror, row_of
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Context, Status

SHAPES = ["ab", "aab", "abb", "abcab", "abcdefgh"]


def begin_at(comm, calls, start):
    """Have all numbers begin elsewhere, on all ranks before anything is posted."""
    group, members = comm._group, comm._group.host.members
    calls._context[Context.enqueued_sequence] = calls._context[Context.enqueued_seen] = start
    if group.links is not None:
        mirror = group._gpu_calls._mirror
        mirror.told = mirror._told_compared = start & 0xFFFFFFFF
        mirror._heard = [start & 0xFFFFFFFF] * group.hosts.count
        for row in range(members.layout.enqueued_rows):
            members.store(members.enqueued_offset(row), start & 0xFFFFFFFF)
    comm.barrier()


def post_many(comm, start):
    calls = comm._group.enqueued_calls()
    assert comm._group.enqueued_calls() is calls
    begin_at(comm, calls, start)
    posts = [poster(comm, calls, count) for count in range(3)]
    full = 0
    for step in range(100):
        while (status := posts[step % 3]()) != Status.OK:
            assert status == Status.MORE
            full += 1
            assert calls.compare() in (Status.OK, Status.MORE)
    until(lambda: calls.compare() == Status.OK)
    assert not calls.has_uncompared
    comm.barrier()
    return (start + 100 - calls.sequence) % 2**32 == 0, full > 0


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(
    ("placed", "start"), [*((placed, 0) for placed in SHAPES), ("abb", 2**31 - 50)]
)
def test_a_ring_bounds_how_far_a_host_runs_ahead(hosts, placed, start):
    for is_there, was_full in hosts.call(placed, post_many, start, environment=FEW):
        assert is_there
        assert was_full


def give_up(comm, code, odd, folder):
    """All call alike but one; whoever notices gives up, as the monitor of a GPU does."""
    calls = comm._group.enqueued_calls()
    same, other = poster(comm, calls, 8), poster(comm, calls, 9)
    assert same() == Status.OK
    until(lambda: calls.compare() == Status.OK)
    if comm.rank != odd or code == Abort.ENQUEUED_MISMATCH:
        post = other if comm.rank == odd else same
        assert post() == Status.OK
    if code == Abort.ENQUEUED_MISMATCH:
        until(lambda: calls.compare() == Status.MISMATCH or comm._group.is_aborted)
        assert calls.compared == 1
    (folder / f"{comm.rank}").touch()
    until(lambda: len(list(folder.iterdir())) == comm.world_size)
    if code == Abort.ENQUEUED_MISMATCH or comm.rank == (odd + 1) % comm.world_size:
        comm._group.abort(code, comm.rank, 2)
    until(lambda: comm._group.is_aborted)
    error = comm._group.abort_error(0.5)
    return type(error), str(error)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("placed", ["aab", "abb", "abc"])
def test_a_mismatch_is_told_in_one_way(hosts, tmp_path, placed, odd):
    code = Abort.ENQUEUED_MISMATCH
    found = hosts.call(placed, give_up, code, odd, tmp_path, environment=FEW)

    others = ", ".join(str(rank) for rank in range(3) if rank != odd)
    for rank, (kind, text) in enumerate(found):
        assert kind is MismatchError
        assert (
            f"(#2): rank {odd} called all_reduce(op=sum, float32, shape (9,)); ranks {others} "
            f"called all_reduce(op=sum, float32, shape (8,)). This is rank {rank} of 3"
        ) in text


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("placed", ["aab", "abb", "abc"])
def test_a_deadline_is_told_in_one_way(hosts, tmp_path, placed, odd):
    code = Abort.ENQUEUED_DEADLINE
    found = hosts.call(placed, give_up, code, odd, tmp_path, environment=FEW)

    gave_up = (odd + 1) % 3
    for rank, (kind, text) in enumerate(found):
        assert kind is DeadlineError
        start = f"rank {rank} of 3: rank {gave_up} gave up waiting in all_reduce("
        if rank == gave_up:
            start = f"rank {rank} of 3 waited 0.5 s in all_reduce("
        assert text.startswith(start), text
        assert f"rank {odd} had not made this call: rank {odd} is in no call" in text


def close_one(comm):
    calls = comm._group.enqueued_calls()
    post = poster(comm, calls, 8)
    assert post() == Status.OK
    until(lambda: calls.compare() == Status.OK)
    if comm.rank == 1:
        return comm.close()
    assert post() == Status.OK
    until(lambda: calls.compare() == Status.MORE and comm._group.has_closed(calls.late_rank))
    late = calls.late_rank
    if comm.rank == 2:  # the other one stays until it has been told
        comm._group.abort(Abort.ENQUEUED_LOST, late, 2)
    until(lambda: comm._group.is_aborted)
    error = comm._group.abort_error()
    return late, type(error), str(error)


@pytest.mark.parametrize("placed", ["aba", "abc", "aab"])
def test_a_rank_that_has_closed_is_who_is_late(hosts, placed):
    first, closed, last = hosts.call(placed, close_one, environment=FEW)

    assert closed is None
    for late, kind, text in (first, last):
        assert (late, kind) == (1, PeerLostError)
        assert re.search(r"lost rank 1 .*in all_reduce\(.*\(#2\): it closed the communicator", text)


def fail_to_connect(comm):
    calls = comm._group.enqueued_calls()
    if comm.rank == comm.world_size - 1:
        calls.say_failed()
    until(lambda: calls.failed_ranks() == [comm.world_size - 1])
    comm.barrier()


@pytest.mark.soak(quick=4)
@pytest.mark.parametrize("placed", SHAPES)
def test_a_rank_that_cannot_connect_is_known_everywhere(hosts, placed):
    hosts.call(placed, fail_to_connect, environment=FEW)


def hear_early(comm):
    """What comes before this host's rings have memory is written when they have."""
    group = comm._group
    members, other = group.host.members, 1 - group.here
    told, done = [], []
    mirror = Mirror(members, group.hosts, group.here, lambda facts, data: told.append(facts))
    fed = Mirror(members, group.hosts, other, lambda facts, data: told.append(facts))
    calls = group.enqueued_calls()
    assert poster(comm, calls, 8)() == Status.OK
    message = []
    fed._tell = lambda facts, data: message.append((facts, data))
    fed.open()
    assert fed.take()
    assert not fed.take(), "nothing is new"
    assert not mirror.take(), "it is not open"
    ((facts, data),) = message
    mirror.after(other, 1, lambda: done.append("early"))
    mirror.hear({**facts, "from": other}, data)
    assert not done
    mirror.open()
    row = row_of(other, group.here, members.world_size)
    assert members.enqueued_header(row, 1) == members.enqueued_header(members.rank, 1)
    mirror.after(other, 1, lambda: done.append("late"))
    mirror.after(other, 2, lambda: done.append("never"))
    comm.barrier()
    return done


def test_what_is_told_early_is_not_lost(hosts):
    assert hosts.call("ab", hear_early, environment=FEW) == [["early", "late"]] * 2
