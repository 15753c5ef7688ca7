"""Calls on GPU arrays that fail: what tests of them share."""

from __future__ import annotations

import threading

import numpy as np
from tests.calls.gpu.conftest import left_on_gpu


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
        names = [thread.name for thread in threading.enumerate()]
        assert "gpucoll-gpu" not in names


def certainly(comm, call, *args, **options):
    """Make a call, and wait until it has succeeded; where it is held up it finds out by itself."""
    call(*args, **options)
    comm.check()
