"""What the tests of messages share: sizes around every threshold, and the ways that data takes."""

from __future__ import annotations

import time

import numpy as np

from gpucoll.transport.shared import layout

WAYS = ("private", "streamed", "shared")
"""Read by the receiver; through the mailbox, because no rank may read another's memory; arena."""


def eager_bytes(comm):
    """Return the largest size that a send does not wait with."""
    return comm._group.members.layout.eager_bytes


def sizes(comm):
    """Return sizes, in bytes, around those at which something changes."""
    eager, post = eager_bytes(comm), comm._group.members.layout.post_bytes
    limits = (eager, post, layout.POSTS * post)
    return [0, 1, 2, *(size + step for size in limits for step in (-1, 0, 1)), 3 * post, 1 << 20]


def choose_way(comm, way):
    """Make `way` hold for arrays of `place`; collective."""
    if way == "streamed":
        comm._group.members.status_words(comm.rank)[layout.STATUS_COPIES // 8] = 0
    comm.barrier()


def place(comm, way, shape, dtype):
    """Return an array where the way wants it."""
    return comm.empty(shape, dtype) if way == "shared" else np.empty(shape, dtype)


def pattern(size_bytes, seed):
    """Return bytes that tell where they belong."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


def until(condition, limit_s=15.0):
    """Poll for what has no event to wait for, with a deadline."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.0005)


def is_broken(comm):
    """Return whether somebody has given the communicator up."""
    return comm._group.is_aborted


def posted(comm, receiver, sender):
    """Return how many posts a rank has written for another."""
    members = comm._group.members
    return members.load(members._mailbox(receiver, sender) + layout.MAILBOX_HEAD)


def sleeps(comm, rank):
    """Return whether a rank sleeps until a message comes."""
    return comm._group.members.bell_words(rank).view(np.int32)[1] > 0
