"""Ranks killed at random moments of random calls: the others shrink, go on, and have the result.

``GPUCOLL_TEST_SEED`` (default 0) draws other moments: each makes 60 jobs, in which 78 ranks die.
"""

from __future__ import annotations

import os
import signal

import pytest
from tests.ranks import Ended, Reply
from tests.shrinking import lose_at_random

FIRST_SEED = 1000 * int(os.environ.get("GPUCOLL_TEST_SEED", "0"))
LIMIT_S = 40.0
TOTAL = sum(range(40))
ONE_HOST = [(3, 1, 10), (4, 1, 10), (5, 1, 8), (5, 2, 12)]
"""Ranks, how many of them die, how many jobs."""
SEVERAL = [("aab", 1, 4), ("aabb", 1, 6), ("abc", 1, 4), ("aabbc", 2, 6)]


def check(name, replies, victims):
    for rank, reply in enumerate(replies):
        if rank in victims:
            assert reply == Ended(-signal.SIGKILL), f"{name}: {reply}"
            continue
        assert isinstance(reply, Reply), f"{name}: rank {rank}: {reply}"
        assert reply.error is None, f"{name}: rank {rank}: {reply.trace}"
        total, count, epochs, left = reply.result
        assert total == TOTAL, name
        assert count == len(replies) - len(victims), name
        assert 1 <= len(epochs) <= len(victims), name
        assert epochs == [*range(1, len(epochs) + 1)], name
        assert left == [], name


def victims_of(count, dying, place):
    """Return who dies: one after the other, so that those who are left are always enough."""
    return [(place + turn * 2) % count for turn in range(dying)]


@pytest.mark.soak
@pytest.mark.parametrize(("count", "dying", "jobs"), ONE_HOST)
def test_on_one_host(rank_server, count, dying, jobs):
    for place in range(jobs):
        seed, victims = FIRST_SEED + place, victims_of(count, dying, place)
        with rank_server.fork(count) as pool:
            pool.start(lose_at_random, seed, victims)
            check(f"{count} ranks, seed {seed}, {victims} die", pool.collect(LIMIT_S), victims)


@pytest.mark.soak
@pytest.mark.parametrize(("placed", "dying", "jobs"), SEVERAL)
def test_on_several_hosts(hosts, rank_server, placed, dying, jobs):
    count = len(placed)
    for place in range(jobs):
        seed, victims = FIRST_SEED + place, victims_of(count, dying, place)
        with rank_server.fork(count) as pool:
            hosts.start(pool, placed, lose_at_random, seed, victims)
            check(f"{placed}, seed {seed}, {victims} die", pool.collect(LIMIT_S), victims)
