"""comm.empty(symmetric=True): memory of all ranks together."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
from tests.calls.gpu.conftest import in_rank

from gpucoll.backends.gpu import abandoned
from gpucoll.errors import BackendError, GpucollError, MismatchError

COUNT = 1000


def ones(kit):
    return kit.seen_as(kit.bytes_of(np.ones(COUNT, np.float32).view(np.uint8)), (COUNT,), "float32")


def use_windows(rank, polls):
    with rank.control.library_set(polls=polls), rank.init(device=rank.rank) as comm:
        like = ones(rank.kit)
        before = rank.control.count("memory")
        x = comm.empty(COUNT, like=like, symmetric=True)
        out = comm.empty((COUNT,), like=x, symmetric=True)
        windows = rank.control.registrations
        rank.kit.write(x, np.full(COUNT, rank.rank + 1, np.float32))
        comm.all_reduce(x, out=out)
        comm.check()
        results = set(rank.kit.read(out).tolist())
        assert comm.empty(3, symmetric=True).shape == (3,)  # on the host
        kept = x
        del x, out
    windows_after = rank.control.registrations
    del kept
    gc.collect()
    abandoned.end_all()
    assert rank.control.count("memory") <= before
    return windows, results, windows_after


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("gpus", ["nccl", "rccl"], indirect=True)
@pytest.mark.parametrize("polls", [0, 2])
def test_windows(gpus, polls):
    assert gpus.call_ranks(3, use_windows, polls) == [(2, {6.0}, 0)] * 3


def let_go_at_different_times(rank):
    """A rank's arrays die when its garbage collection pleases; the next window fits."""
    with rank.init(device=rank.rank) as comm:

        def make():
            return comm.empty(8, "int8", like="cuda", symmetric=True)

        first, second = make(), make()
        if rank.rank:
            del first
        comm.empty(8, "int8", like="cuda")  # gives memory back, but no window
        third = make()
        counts = [rank.control.registrations]
        if not rank.rank:
            del first
        fourth = make()  # where the first one was
        counts.append(rank.control.registrations)
        comm.broadcast(fourth, out=fourth)
        comm.check()
        del second, third
    return counts


def test_windows_end_on_all_ranks_together(gpus):
    # The dead array that is no window may go at once, or with the next one.
    for three, again in gpus.call_ranks(2, let_go_at_different_times):
        assert three == 3
        assert again == 3


def ask_differently(rank):
    with rank.init(device=rank.rank) as comm:
        with pytest.raises(MismatchError, match="same number of bytes on every rank; got rank 0 8"):
            comm.empty(8 + rank.rank, "int8", like="cuda", symmetric=True)
        x = comm.empty(8, "int8", like="cuda", symmetric=True)  # all is well otherwise
        comm.broadcast(x, out=x)
        comm.check()


def test_different_sizes(gpus):
    gpus.call_ranks(2, ask_differently)


def ask_for_too_much(rank):
    with rank.init(device=rank.rank) as comm:
        if rank.rank:
            rank.control.driver_set("memory", rank.control.count("memory") + (1 << 20))
        try:
            with pytest.raises(MemoryError, match=r"rank 1: .*bytes are free"):
                comm.empty(2 << 20, "int8", like="cuda", symmetric=True)
        finally:
            rank.control.driver_set("memory", 1 << 32)
        x = comm.empty(8, "int8", like="cuda", symmetric=True)
        comm.broadcast(x, out=x)
        comm.check()


def test_no_memory_on_one_rank(gpus):
    gpus.call_ranks(2, ask_for_too_much)


def fail_to_register(rank):
    begun = time.monotonic()
    if rank.rank:
        rank.control.fail_at(1, 3, "ncclCommWindowRegister")
    try:
        with pytest.raises(GpucollError) as caught, rank.init(device=rank.rank) as comm:
            comm.empty(8, "int8", like="cuda", symmetric=True)
    finally:
        rank.control.fail_at(0, 0)
    assert rank.control.communicators == 0
    return type(caught.value), time.monotonic() - begun


def test_the_library_fails_at_it_on_one_rank(gpus):
    (_, first_s), (failed, second_s) = gpus.call_ranks(2, fail_to_register)
    assert failed is BackendError
    assert max(first_s, second_s) < 10


def without_windows(rank):
    with rank.init(device=rank.rank) as comm:
        x = comm.empty(8, "int8", like="cuda", symmetric=True)
        comm.broadcast(x, out=x)
        comm.check()
        return rank.control.registrations


def test_an_older_library(rank_server, doubles, gpus):
    double = doubles.double(without=("ncclCommWindowRegister",))
    with rank_server.fork(2) as pool:
        arguments = double, without_windows, ()
        options = {"gives": "seat", "environment": {**gpus.variables, **double.variables}}
        assert pool.call(in_rank, *arguments, **options) == [1, 1]
