"""Looking at ranks at any moment, while they start, work, split, grow, shrink and end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.faults import test_growing_at_random, test_shrinking_at_random
from tests.growing import live_at_random
from tests.observe.jobs import healthy, play, ranks_that_answered
from tests.ranks import Pool, RankServer
from tests.shrinking import lose_at_random

from gpucoll.observe import segments
from gpucoll.observe.look import jobs_of, look
from gpucoll.observe.text import lines_of
from gpucoll.observe.verdict import judge


def attach(pids: Sequence[int]) -> bool:
    """Find, look, judge and tell; return whether there was something to look at."""
    found = segments.find(pids)
    try:
        for job in jobs_of(found.parts):
            seen = look(job, 0.0)
            list(lines_of(seen, judge(seen, 0.0), {}, tree=False))
        return bool(found.parts)
    finally:
        found.close()


def attach_while(pool: Pool) -> int:
    """Attach to ranks until each has answered; return how often there was something to look at."""
    pids, attached = [rank.pid for rank in pool.ranks], 0
    until_s = time.monotonic() + 120
    while len(ranks_that_answered(pool)) < len(pids) and time.monotonic() < until_s:
        attached += attach(pids)
    return attached


def lose_ranks(server: RankServer, seed: int, _: Path) -> int:
    """Attach while ranks are killed and the others shrink; check what comes of that."""
    victims = test_shrinking_at_random.victims_of(5, 2, seed)
    pool = server.fork(5)
    with pool:
        pool.start(lose_at_random, seed, victims)
        attached = attach_while(pool)
        test_shrinking_at_random.check(f"seed {seed}", pool.collect(), victims)
    return attached


def win_ranks(server: RankServer, seed: int, _: Path) -> int:
    """Attach while two ranks grow to four, and one leaves; check what comes of that."""
    fates = {3: "leaves"} if seed % 2 else {}
    pool = server.fork(4)
    with pool:
        pool.start(live_at_random, seed, 2, fates, gives="seat")
        attached = attach_while(pool)
        replies = pool.collect()
        test_growing_at_random.check(f"seed {seed}", replies, fates)
    return attached


def make_communicators(server: RankServer, seed: int, folder: Path) -> int:
    """Attach while communicators are made, used and closed; ranks check what their calls return."""
    trial = healthy("churn", seed, 6)
    pool = server.fork(6)
    with pool:
        pool.start(play, trial.scripts, folder / "marks", gives="seat")
        attached = attach_while(pool)
        pool.results()
    return attached


MAKERS: Sequence[Callable[[RankServer, int, Path], int]] = (
    make_communicators,
    lose_ranks,
    win_ranks,
)


def attach_often(server: RankServer, count: int, seed: int, folder: Path) -> Iterator[int]:
    """Attach to jobs that come and go; yield how often it was, after each job."""
    attached = 0
    while attached < count:
        attached += MAKERS[seed % len(MAKERS)](server, seed, folder)
        seed += 1
        yield attached


def left_over() -> tuple[int, int]:
    """Return how many descriptors this process has, and how many mappings of segments."""
    mapped = Path("/proc/self/maps").read_text().count("gpucoll-segment")
    return len(os.listdir("/proc/self/fd")), mapped
