"""Random schedules of processes that join, leave, die and stop: nothing hangs, and all agree.

``GPUCOLL_TEST_SEED`` (default 0) draws other schedules: each makes 37 jobs.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from tests.growing import STEPS, live_at_random
from tests.ranks import Reply

FIRST_SEED = 1000 * int(os.environ.get("GPUCOLL_TEST_SEED", "0"))
LIMIT_S = 60.0
TOTAL = sum(range(STEPS))
FATES = ("", "", "", "dies", "dies", "leaves", "stops", "dies at the door")
JOBS = 6


def drawn(seed, most):
    """Return a schedule: how many processes there are, how many begin, and what becomes of each."""
    draw = np.random.default_rng(seed)
    count = int(draw.integers(2, most + 1))
    n_old = int(draw.integers(1, count))
    fates = {rank: FATES[int(draw.integers(len(FATES)))] for rank in range(count)}
    fates = {rank: fate for rank, fate in fates.items() if rank >= n_old or "door" not in fate}
    return count, n_old, fates


def collected(pool, fates):
    """Return the replies of all but those that are to stop, which end here."""
    going = [rank for rank in range(pool.world_size) if fates.get(rank) != "stops"]
    replies = pool.collect(LIMIT_S, going) if going else []
    pool.kill()
    return replies


def check(name, replies, fates):
    """All that came to the end came to the same end, together."""
    done = []
    for rank, reply in enumerate(replies):
        if isinstance(reply, Reply):
            assert reply.error is None, f"{name}: rank {rank}: {reply.trace}"
            if reply.result[0] == "done":
                done.append(reply.result[1:])
    for total, members, epoch in done:
        assert total == TOTAL, name
        assert (members, epoch) == done[0][1:], f"{name}: two jobs: {done}"
        killed = sum(not isinstance(reply, Reply) for reply in replies)
        killed += sum(fate == "stops" for fate in fates.values())  # perhaps not before the end
        assert len(members) - killed <= len(done) <= len(members), f"{name}: {replies}"


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("block", range(4))
def test_on_one_host(rank_server, block):
    for place in range(JOBS if block else 1):
        seed = FIRST_SEED + 100 * block + place
        count, n_old, fates = drawn(seed, 6)
        with rank_server.fork(count) as pool:
            pool.start(live_at_random, seed, n_old, fates, gives="seat")
            check(f"seed {seed}: {count}, {n_old} begin, {fates}", collected(pool, fates), fates)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(3))
def test_on_several_hosts(hosts, rank_server, block):
    for place in range(JOBS):
        seed = FIRST_SEED + 500 + 100 * block + place
        count, n_old, fates = drawn(seed, 6)
        placed = "".join("abc"[int(k)] for k in np.random.default_rng(seed).integers(3, size=count))
        with rank_server.fork(count) as pool:
            hosts.start(pool, placed, live_at_random, seed, n_old, fates, gives="seat")
            check(f"{placed}, seed {seed}, {n_old} begin, {fates}", collected(pool, fates), fates)
