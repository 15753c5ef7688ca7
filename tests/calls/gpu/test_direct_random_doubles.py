"""The same over doubles of a vendor's driver: see `tests.calls.gpu.test_direct_random_moments`.

Each round has fresh ranks; the victim's moment comes from a short random timer in the one who
kills: it synchronises nothing, any moment will do.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.calls.gpu.conftest import in_rank
from tests.ranks import Ended, Reply
from tests.waiting import thread_names

from gpucoll.errors import DeadlineError, GpucollError, PeerLostError

LONGEST_MOMENT_S = 0.1
NOTICED_S = 15.0
"""Far above what noticing takes, and far below the ranks' deadline where that is not it."""
WAYS = ("shared", "staged")

joined: dict[str, Any] = {}
"""In a rank: its communicator, between two requests."""


def join(rank, way, timeout_s):
    from gpucoll.backends.direct import connected

    shares = _stay_staged if way == "staged" else connected.share_memory
    with mock.patch.object(connected, "share_memory", shares):
        joined["rank"] = rank
        comm = joined["comm"] = rank.init(
            timeout_s=timeout_s, meet_s=20, backend="direct", device=rank.rank
        )
    said = comm.describe().facts["GPU path through shared GPU memory"]
    assert said.startswith("collectives") == (way != "staged"), said
    comm.barrier(timeout_s=20)


def _stay_staged(backend, *_):
    backend.why_staged = "none: a test"


def filled(kit, count):
    return kit.seen_as(kit.bytes_of(np.ones(4 * count, np.uint8)), (count,), "int32")


def work_until_it_fails(_, seed):
    """Make calls for ever; return the error that ends it and what is left after closing."""
    comm, rank = joined.pop("comm"), joined.pop("rank")
    kit, random = rank.kit, Random(seed)
    small, large = filled(kit, 8), filled(kit, 400_000)
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    steps = [
        lambda: comm.all_reduce(small, out=small),
        lambda: comm.all_reduce(large, "max", out=large),
        lambda: comm.broadcast(large, 1, out=large),
        lambda: comm.all_gather(large),
        lambda: comm.send_recv(large, after, before),
        lambda: comm.send_recv(small, after, before, async_op=True).wait(),
        lambda: comm.all_reduce(small, async_op=True).synchronize(),
        comm.check,
    ]
    try:
        while True:
            random.choice(steps)()
    except GpucollError as error:
        ended = error
    try:  # a Work whose call has not begun breaks nothing; what does is told then
        comm.close()
    except GpucollError as error:
        ended = error
    return type(ended), str(ended), left_over()


def left_over():
    """Return threads, segments and process descriptors that this rank still has."""
    threads = [name for name in thread_names() if "gpucoll-" in name]
    mapped = re.findall(r"gpucoll-segment", Path("/proc/self/maps").read_text())
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    links = [os.readlink(path) for path in paths if os.path.lexists(path)]
    return threads + mapped + [link for link in links if "pidfd" in link or "segment" in link]


class Round:
    """One job, of which one rank will not go on."""

    def __init__(self, rank_server, double, way, seed, timeout_s):
        self.random = Random(f"{way} {seed}")
        self.world_size = 2 + seed % 2
        self.pool = rank_server.fork(self.world_size)
        self.victim = self.random.randrange(self.world_size)
        self.name = f"{way}, {self.world_size} ranks, round {seed}, victim {self.victim}"
        options = {"gives": "seat", "environment": double.variables}
        self.pool.call(in_rank, double, join, (way, timeout_s), **options)
        self.pool.start(in_rank, double, work_until_it_fails, (seed,), **options)

    @property
    def survivors(self):
        return [rank for rank in range(self.world_size) if rank != self.victim]

    def hit(self, number):
        time.sleep(self.random.uniform(0, LONGEST_MOMENT_S))  # the random moment
        self.pool.ranks[self.victim].send(number)

    def check(self, reply, error_type):
        assert isinstance(reply, Reply), f"{self.name}: {reply}"
        assert reply.error is None, f"{self.name}: {reply.trace}"
        kind, message, left = reply.result
        assert kind is error_type, f"{self.name}: {kind} {message}"
        assert not left, f"{self.name}: left over {left}"


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_killed(rank_server, gpus, way):
    for seed in range(5):
        this = Round(rank_server, gpus.double, way, seed, timeout_s=60)
        with this.pool:
            this.hit(signal.SIGKILL)
            replies = this.pool.collect(NOTICED_S)
            assert replies[this.victim] == Ended(-signal.SIGKILL)
            for rank in this.survivors:
                this.check(replies[rank], PeerLostError)


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_stopped(rank_server, gpus, way):
    for seed in range(3):
        this = Round(rank_server, gpus.double, way, seed, timeout_s=1.0)
        with this.pool:
            this.hit(signal.SIGSTOP)
            try:
                replies = this.pool.collect(NOTICED_S, only=this.survivors)
            finally:
                this.pool.ranks[this.victim].send(signal.SIGCONT)
            late = this.pool.collect(NOTICED_S, only=[this.victim])
            for reply in [*replies, *late]:
                this.check(reply, DeadlineError)
