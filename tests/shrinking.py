"""What tests of `shrink` have ranks do: lose some, go on with the rest, use what came of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from gpucoll.errors import AbortedError, BackendUnavailableError, DeadlineError, PeerLostError
from tests.ranks import Ended
from tests.waiting import thread_names

LOSSES = (PeerLostError, DeadlineError, AbortedError)


@pytest.fixture
def fresh(rank_server):
    """Call a function on fresh ranks, of which some may end; return the replies."""

    def call(count, function, *args, **options):
        with rank_server.fork(count) as pool:
            pool.start(function, *args, **options)
            return pool.collect()

    return call


@pytest.fixture
def fresh_on_hosts(hosts, rank_server):
    """Call a function on fresh ranks of several hosts, some of which may end; return replies."""

    def call(placed, function, *args, **options):
        with rank_server.fork(len(placed)) as pool:
            hosts.start(pool, placed, function, *args, **options)
            return pool.collect()

    return call


def die():
    """End this process, at once and without a word."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def arrive(comm):
    """Wait for the others, of whom the first to have come may be gone already."""
    with contextlib.suppress(*LOSSES):
        comm.barrier()


def until_lost(comm, **given):
    """Make calls until one raises that a rank is lost, late or has given up; return that error."""
    x = np.ones(8)
    with contextlib.suppress(RuntimeError):
        while True:
            try:
                comm.all_reduce(x, **given)
            except LOSSES as error:
                return error
    raise AssertionError("the communicator is closed")


def use(comm):
    """Use a communicator in many ways; return who is in it, by what each said."""
    size, rank = comm.world_size, comm.rank
    assert comm.all_reduce(rank + 1) == size * (size + 1) // 2
    large = np.full(120_000, rank, np.float64)
    assert (comm.all_reduce(large, "max") == size - 1).all()
    shared = comm.empty(50_000)
    shared[:] = 1
    comm.all_reduce(shared, out=shared)
    assert (shared == size).all()
    assert comm.broadcast(np.full(3, rank), root=size - 1).tolist() == [size - 1] * 3
    assert comm.all_to_all(np.arange(size)).tolist() == [rank] * size
    assert comm.all_reduce(np.ones(3), async_op=True).wait().tolist() == [size] * 3
    if size > 1:
        with contextlib.suppress(BackendUnavailableError):  # between hosts, where it has none
            before, behind = (rank - 1) % size, (rank + 1) % size
            arrived = comm.send_recv(np.full(2, rank), dest=behind, source=before)
            assert arrived.tolist() == [before] * 2
    with comm.split(rank % 2) as part:
        assert part.all_reduce(1) == len(range(rank % 2, size, 2))
        assert part.epoch == comm.epoch
    comm.barrier()
    return comm.all_gather_object((rank, os.getpid()))


def left_over():
    """Return threads, mappings and descriptors of communicators that this rank still has."""
    threads = [name for name in thread_names() if name.startswith("gpucoll-links")]
    mapped = re.findall(r"gpucoll-(?:segment|board)", Path("/proc/self/maps").read_text())
    fds = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    links = [os.readlink(path) for path in fds if os.path.lexists(path)]
    words = ("pidfd", "segment", "board", "eventfd")
    return threads + mapped + [link for link in links if any(word in link for word in words)]


def lose_at_random(comm, seed, victims):
    """Make random calls, in which one rank after another is killed; go on with the rest.

    Each call adds up the numbers of the calls so far, so that what was repeated once too often, or
    too little, shows. Returns what the ranks that are left have come to, and each `epoch`.
    """
    draw = np.random.default_rng(seed)
    deadly = {victim: int(draw.integers(3, 30)) for victim in victims}
    moments = {victim: float(draw.uniform(0, 0.01)) for victim in victims}
    pid, first = os.getpid(), comm.rank
    step, total, epochs, done = 0, 0, [], None
    kept = [(comm.completed, step, total)]
    while step < 40:
        if deadly.get(first) == step:
            threading.Timer(moments[first], os.kill, [pid, signal.SIGKILL]).start()
        try:
            if done is not None:
                assert min(comm.all_gather_object(done)) == comm.resumed_from
                assert len(set(comm.all_gather_object((step, total)))) == 1
                done = None
            if step == 39 and first in victims:
                signal.pause()  # until it is killed
            total += random_call(comm, seed, step)
            step += 1
            kept = [*kept[-20:], (comm.completed, step, total)]
        except LOSSES:
            done, old, comm = comm.completed, comm, comm.shrink()
            assert old.is_closed
            epochs.append(comm.epoch)
            _, step, total = [state for state in kept if state[0] <= comm.resumed_from][-1]
            kept = [(0, step, total)]
    used = use(comm)
    comm.close()
    return total, len(used), epochs, left_over()


def random_call(comm, seed, step):
    """Make a call that gives every rank the number of the step, whoever is in it."""
    draw = np.random.default_rng((seed, step))
    size = int(draw.choice([1, 8, 700, 40_000, 300_000]))
    kind = int(draw.integers(6))
    x = np.full(size, step)
    if kind == 0:
        return int(comm.all_reduce(x, "max")[-1])
    if kind == 1:
        return int(comm.broadcast(x, root=comm.world_size - 1)[-1])
    if kind == 2:
        return int(comm.all_gather(x)[-1])
    if kind == 3:
        return int(comm.all_reduce(x, "min", async_op=True).wait()[-1])
    if kind == 4:
        return int(comm.all_gather_object({"step": step, "x": x})[-1]["step"])
    comm.barrier()
    return step


def results(replies, but=()):
    """Return what ranks returned; those of `but` were killed."""
    failed = [
        f"rank {rank}: {getattr(reply, 'trace', '') or reply}"
        for rank, reply in enumerate(replies)
        if isinstance(reply, Ended) != (rank in but) or getattr(reply, "error", None)
    ]
    assert not failed, "\n".join(failed)
    return [reply.result for rank, reply in enumerate(replies) if rank not in but]


def facts(comm):
    return comm.rank, comm.world_size, comm.epoch, comm.former_ranks
