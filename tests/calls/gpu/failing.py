"""Calls on GPU arrays that fail: what tests of them share."""

from __future__ import annotations

import numpy as np
from tests.calls.gpu.conftest import left_on_gpu
from tests.waiting import thread_names

THREADS = {"gpucoll-gpu", "gpucoll-direct", "gpucoll-direct-messages"}
"""Those of calls on GPU arrays, which end with their communicator."""


def gpu_threads():
    """Return which of these threads this rank has."""
    return {*thread_names()} & THREADS


def ones(kit, count=8, dtype="float32"):
    return kit.seen_as(kit.bytes_of(np.ones(count, dtype).view(np.uint8)), (count,), dtype)


def counted(rank, function, *args, gives_back=True, **options):
    """Call ``function(comm, kit, *args)``; nothing of the library may be left, however it ends.

    On the GPU neither, where that still takes orders (`gives_back`).
    """
    ones(rank.kit)  # the first array makes the double's default streams
    before = left_on_gpu(rank)
    try:
        with rank.init(meet_s=20, **options) as comm:
            return function(comm, rank.kit, *args)
    finally:
        if rank.control is not None:
            assert rank.control.communicators == 0
            assert not gives_back or left_on_gpu(rank) == before
        assert "gpucoll-gpu" not in thread_names()


def certainly(comm, call, *args, **options):
    """Make a call, and wait until it has succeeded; where it is held up it finds out by itself."""
    call(*args, **options)
    comm.check()
