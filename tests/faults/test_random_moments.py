"""Ranks killed and stopped at random moments, inside kernels too: the others say so, nothing hangs.

Each round has fresh ranks, forked from the warm server. The victim's moment comes from a short
random timer in the one who kills: it synchronises nothing, any moment will do.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ranks import Ended, Reply
from tests.waiting import thread_names

from gpucoll.errors import DeadlineError, GpucollError, PeerLostError

ROUNDS = {2: 34, 3: 33, 4: 33}
AT_ONCE = 9  # of those with a rank that is stopped: the others wait for their deadlines
LONGEST_MOMENT_S = 0.03
NOTICED_S = 10.0
"""Far above what noticing takes (tens of milliseconds), and far below the ranks' deadline."""

joined: dict[str, Any] = {}
"""In a rank: its communicator, between two requests."""


def join(seat, timeout_s):
    joined["comm"] = seat.init(timeout_s=timeout_s, meet_s=20)
    joined["comm"].barrier(timeout_s=20)


KINDS = ("small", "staged", "symmetric", "broadcast", "asynchronous", "objects", "mixed")


def work_until_it_fails(seat, kind):
    """Make calls for ever; return the error that ends it and what is left after closing."""
    comm = joined.pop("comm")
    small, large = np.ones(8, np.float32), np.ones(300_000, np.float32)
    shared = comm.empty(300_000)
    shared[:] = 1
    steps = {
        "small": lambda: comm.all_reduce(small),
        "staged": lambda: comm.all_reduce(large),
        "symmetric": lambda: comm.all_reduce(shared, "max", out=shared),
        "broadcast": lambda: comm.broadcast(large, out=large),
        "asynchronous": lambda: comm.all_reduce(large, async_op=True).wait(),
        "objects": lambda: comm.all_gather_object("x" * 30_000),
    }
    chosen = list(steps.values()) if kind == "mixed" else [steps[kind]]
    try:
        while True:
            for step in chosen:
                step()
    except GpucollError as error:
        comm.close()
        return type(error), str(error), left_over()


def left_over():
    """Return threads, segments and process descriptors that this rank still has."""
    threads = [name for name in thread_names() if name == "gpucoll"]
    mapped = re.findall(r"gpucoll-segment", Path("/proc/self/maps").read_text())
    links = [os.readlink(path) for path in open_links() if os.path.lexists(path)]
    return threads + mapped + [link for link in links if "pidfd" in link or "segment" in link]


def open_links():
    return [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]


class Round:
    """One job, of which one rank will not go on."""

    def __init__(self, rank_server, world_size, place, timeout_s):
        self.random = random.Random(1000 * world_size + place)
        self.pool = rank_server.fork(world_size)
        self.victim = self.random.randrange(world_size)
        self.survivors = [rank for rank in range(world_size) if rank != self.victim]
        self.kind = KINDS[place % len(KINDS)]
        self.name = f"{world_size} ranks, round {place} ({self.kind}), victim {self.victim}"
        self.timeout_s = timeout_s

    def begin(self):
        self.pool.call(join, self.timeout_s, gives="seat")
        self.pool.start(work_until_it_fails, self.kind, gives="seat")
        time.sleep(self.random.uniform(0, LONGEST_MOMENT_S))  # the random moment

    def hit(self, number):
        self.pool.ranks[self.victim].send(number)

    def check(self, reply, error_type, text):
        assert isinstance(reply, Reply), f"{self.name}: {reply}"
        assert reply.error is None, f"{self.name}: {reply.trace}"
        kind, message, left = reply.result
        assert kind is error_type, f"{self.name}: {kind} {message}"
        assert text in message, f"{self.name}: {message}"
        assert not left, f"{self.name}: left over {left}"


def own_state():
    """Return what must be the same before and after."""
    named = sorted(Path("/dev/shm").glob("gpucoll*"))  # other programs may come and go there
    return named, len(os.listdir("/proc/self/fd")), thread_names()


@pytest.mark.soak
@pytest.mark.parametrize("world_size", ROUNDS)
def test_killed(rank_server, world_size):
    before = own_state()
    for place in range(ROUNDS[world_size]):
        this = Round(rank_server, world_size, place, timeout_s=60)
        with this.pool:
            this.begin()
            this.hit(signal.SIGKILL)
            start = time.monotonic()
            replies = this.pool.collect(NOTICED_S)
            assert time.monotonic() - start < NOTICED_S
            assert replies[this.victim] == Ended(-signal.SIGKILL)
            for rank in this.survivors:
                this.check(replies[rank], PeerLostError, f"lost rank {this.victim} ")
    assert own_state() == before


@pytest.mark.soak
@pytest.mark.parametrize("world_size", ROUNDS)
def test_stopped(rank_server, world_size):
    before = own_state()
    places = range(ROUNDS[world_size])
    for start in places[::AT_ONCE]:
        batch = [
            Round(rank_server, world_size, place, timeout_s=2)
            for place in places[start : start + AT_ONCE]
        ]
        for this in batch:
            this.begin()
            this.hit(signal.SIGSTOP)
        for this in batch:
            with this.pool:
                survivors = this.pool.collect(NOTICED_S, only=this.survivors)
                this.hit(signal.SIGCONT)
                late = this.pool.collect(NOTICED_S, only=[this.victim])
            text = "ranks? (\\d+, )*" + str(this.victim)
            for reply in survivors:
                this.check(reply, DeadlineError, "")
                assert re.search(text, reply.result[1]), f"{this.name}: {reply.result[1]}"
            this.check(late[0], DeadlineError, "")
    assert own_state() == before
