"""What leaders hear from each other, by whoever takes it: the caller, or the links' thread."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from tests.ranks import Ended, Reply

from gpucoll.errors import DeadlineError
from gpucoll.group.world.hosts import further_hosts, neighbours

LIMIT_S = 20.0


def hear_of_a_loss(comm, victim):
    """After a burst of calls, in which callers take what comes, this rank makes none."""
    for _ in range(50):
        comm.all_reduce(np.ones(3))
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while not comm._group.is_aborted and time.monotonic() < deadline:
        os.sched_yield()
    return comm._group.is_aborted and str(comm._group.abort_error())


def test_a_loss_is_heard_of_without_a_call(hosts):
    replies = hosts.replies("aabc", hear_of_a_loss, 2)

    assert isinstance(replies[2], Ended)
    for rank in (0, 1, 3):
        reply = replies[rank]
        assert isinstance(reply, Reply)
        assert reply.error is None, reply.trace
        assert "lost rank 2" in reply.result


def objects(comm):
    parts = comm.all_gather_object(b"x" * (comm.rank + 1) * (2 << 20))
    return [len(part) for part in parts]


@pytest.mark.soak
def test_parts_that_fill_the_connections(hosts):
    for placed in ("ab", "abc", "aabb"):
        sizes = [(rank + 1) * (2 << 20) for rank in range(len(placed))]

        assert hosts.call(placed, objects) == [sizes] * len(placed)


def come_late(comm, count):
    for _ in range(3):
        comm.all_reduce(np.ones(count))
    if comm.rank == 1:
        comm._group.links.wait(lambda: comm._group.is_aborted, LIMIT_S)
    else:
        comm._group.timeout_s = 0.3
    with pytest.raises(DeadlineError) as caught:
        comm.all_reduce(np.ones(count))
    return str(caught.value)


@pytest.mark.parametrize("count", [3, 100_000])
def test_where_the_only_rank_of_a_host_is(hosts, count):
    first, second = hosts.call("ab", come_late, count)

    last = f"the last collective: all_reduce(op=sum, float64, shape ({count},)) (#3)"
    assert f"rank 1 had not arrived: rank 1 is in no call of this communicator; {last}" in first
    assert second.startswith("rank 1 of 2: rank 0 waited 0.3 s in all_reduce")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 12, 64, 100])
def test_what_is_handed_on_reaches_every_host_once_over_links(count):
    for origin in range(0, count, 3):
        reached, new = {origin}, [origin]
        while new:
            here = new.pop()
            for host in further_hosts(origin, here, count):
                assert host in neighbours(here, count)
                assert host not in reached
                reached.add(host)
                new.append(host)
        assert reached == set(range(count))
