"""Calls on GPU arrays have spans, from when they are enqueued until they are seen to be over."""

from __future__ import annotations

import os

import numpy as np
from tests.calls.gpu.conftest import REPLAYED
from tests.waiting import until

from gpucoll.collectives import Collective
from gpucoll.observe.segments import find
from gpucoll.observe.watch import Watch
from gpucoll.transport.shared.spans import SpanKind


def see_on_gpu(comm, kit):
    x = kit.seen_as(kit.bytes_of(np.ones(8, np.float32).view(np.uint8)), (8,), "float32")
    comm.all_reduce(x)
    comm.check()
    found = find([os.getpid()])
    with Watch(found.segments) as seen:
        comm.all_reduce(x)
        kept = []

        def is_seen():
            comm.check()
            calls = seen.read()[0].calls
            kept.extend(calls[calls["kind"] == SpanKind.GPU])
            return any(each["rank"] == comm.rank for each in kept)

        until(is_seen)
    found.close()
    mine = [each for each in kept if each["rank"] == comm.rank]
    return [(int(each["collective"]), int(each["size_bytes"])) for each in mine]


@REPLAYED
def test_calls_on_gpu_arrays_are_seen(gpus):
    size = gpus.world(2)
    assert gpus.call(2, see_on_gpu) == [[(Collective.ALL_REDUCE, 32)]] * size
