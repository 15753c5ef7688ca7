"""What tests of `shrink` have ranks do: lose some, go on with the rest, use what came of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np

from gpucoll.errors import AbortedError, DeadlineError, PeerLostError

LOSSES = (PeerLostError, DeadlineError, AbortedError)


def die():
    """End this process, at once and without a word."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


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
        arrived = comm.send_recv(np.full(2, rank), dest=(rank + 1) % size, source=(rank - 1) % size)
        assert arrived.tolist() == [(rank - 1) % size] * 2
    with comm.split(rank % 2) as part:
        assert part.all_reduce(1) == len(range(rank % 2, size, 2))
        assert part.epoch == comm.epoch
    comm.barrier()
    return comm.all_gather_object((rank, os.getpid()))


def left_over():
    """Return threads, mappings and descriptors of communicators that this rank still has."""
    threads = [t.name for t in threading.enumerate() if t.name.startswith("gpucoll-links")]
    mapped = re.findall(r"gpucoll-(?:segment|board)", Path("/proc/self/maps").read_text())
    fds = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    links = [os.readlink(path) for path in fds if os.path.lexists(path)]
    words = ("pidfd", "segment", "board", "eventfd")
    return threads + mapped + [link for link in links if any(word in link for word in words)]


def until(condition, limit_s=15.0):
    """Poll for what has no event to wait for, with a deadline."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)
