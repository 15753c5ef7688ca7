"""Some of a job's ranks meet by a name of their own, while others do so or do not."""

from __future__ import annotations

import os

from tests.ranks import Seat

TIMEOUT_S = 20.0


def join(seat, ranks, **options):
    """Join a communicator of these ranks; None on the others."""
    if seat.rank not in ranks:
        return None
    return seat.init(TIMEOUT_S, rank=ranks.index(seat.rank), world_size=len(ranks), **options)


def members_of(comm):
    return None if comm is None else comm.all_gather_object(os.getpid())


def several_groups(seat):
    """Rank 2 calls init less often than the others, and meets them afterwards all the same."""
    found = []
    for ranks, name in [
        ([0, 1], "a"),
        ([0, 1, 2], None),
        ([1, 0], "a"),
        ([1, 2], "b"),
        ([2, 1, 0], "all, turned round"),
        ([0, 1, 2], None),
    ]:
        comm = join(seat, ranks, name=name)
        found.append(members_of(comm))
        if comm is not None:
            comm.close()
    return os.getpid(), found


def test_groups_are_counted_by_name(fresh):
    replies = fresh(3, several_groups)
    a, b, c = (process for process, _ in replies)

    assert [found for _, found in replies] == [
        [[a, b], [a, b, c], [b, a], None, [c, b, a], [a, b, c]],
        [[a, b], [a, b, c], [b, a], [b, c], [c, b, a], [a, b, c]],
        [None, [a, b, c], None, [b, c], [c, b, a], [a, b, c]],
    ]


def two_at_once(seat):
    place = {"rank": seat.rank // 2, "world_size": 2, "name": f"part {seat.rank % 2}"}
    with seat.init(TIMEOUT_S, **place) as comm:
        return comm.all_gather_object(seat.rank)


def test_two_groups_at_the_same_time(fresh):
    assert fresh(4, two_at_once) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def jobs_one_after_another(seat):
    """Each group is a job of its own by GPUCOLL_JOB, as a program that has no names makes them."""
    found = []
    for word, ranks in [("one", [0, 1, 2]), ("two", [0, 1]), ("three", [0, 1, 2]), ("one", [1, 2])]:
        own = Seat(seat.rank, seat.world_size, f"{seat.token}/{word}")
        comm = join(own, ranks)
        found.append(members_of(comm))
        if comm is not None:
            comm.close()
        if word == "three":  # alone: nobody counts that
            with seat.init(rank=0, world_size=1):
                pass
    return os.getpid(), found


def test_jobs_are_counted_one_by_one(fresh):
    replies = fresh(3, jobs_one_after_another)
    a, b, c = (process for process, _ in replies)

    assert [found for _, found in replies] == [
        [[a, b, c], [a, b], [a, b, c], None],
        [[a, b, c], [a, b], [a, b, c], [b, c]],
        [[a, b, c], None, [a, b, c], [b, c]],
    ]
