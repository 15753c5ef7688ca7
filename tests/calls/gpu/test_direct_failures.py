"""Calls of the direct backend that fail: what ends them on every rank, and what is left then."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from tests.calls.gpu.failing import gpu_threads, ones
from tests.ranks import Ended, Reply
from tests.waiting import SOON_S, is_broken, until

from gpucoll.backends.direct.pieces import SLOT_BYTES
from gpucoll.errors import AbortedError, DeadlineError, MismatchError, PeerLostError

COUNT = 3 * SLOT_BYTES // 4


def end(rank, way, calls):
    """Have rank 1 make another call, none, or die in the middle; return how rank 0 hears of it."""
    is_late = way in ("is late", "hangs")
    try:
        with rank.init(backend="direct") as comm:
            comm.all_reduce(ones(rank.kit, 8))
            comm.check()
            begun_s = time.monotonic()
            if rank.rank == 1:
                act(comm, rank, way, is_late)
            limit_s = 0.5 if is_late else 20
            try:
                if calls == "message":
                    comm.recv(ones(rank.kit, COUNT), 1, timeout_s=limit_s)
                else:
                    comm.all_reduce(ones(rank.kit, COUNT), timeout_s=limit_s)
                comm.check()
            finally:
                assert time.monotonic() - begun_s < SOON_S
    finally:
        assert not gpu_threads()


def act(comm, rank, way, is_late):
    kit = rank.kit
    if way == "hangs":  # the call is made, and nothing of it runs on the GPU
        with rank.held():
            comm.all_reduce(ones(kit, COUNT))
            until(lambda: is_broken(comm))
    if way == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "dies in a call":
        rank.control.driver_set("delay_us", 20_000)  # before each of its copies and kernels
        comm.all_reduce(ones(kit, COUNT))
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "differs":
        comm.all_reduce(ones(kit, COUNT + 1))
        comm.check()
    if way == "aborts":
        comm.abort()
        comm.check()
    if is_late:
        until(lambda: is_broken(comm))
        comm.check()


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("gpus", ["nccl", "rccl"], indirect=True)
@pytest.mark.parametrize(
    ("way", "error"),
    [
        ("differs", MismatchError),
        ("is late", DeadlineError),
        ("hangs", DeadlineError),
        ("aborts", AbortedError),
        ("dies", PeerLostError),
        ("dies in a call", PeerLostError),
    ],
)
def test_what_ends_a_collective(gpus, way, error):
    first, second = gpus.replies(2, end, way, "collective")
    assert isinstance(first, Reply)
    assert isinstance(first.error, error), first
    assert isinstance(second, Ended if way.startswith("dies") else Reply)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize(
    ("way", "error"),
    [("is late", DeadlineError), ("aborts", AbortedError), ("dies", PeerLostError)],
)
def test_what_ends_a_message(gpus, way, error):
    first, second = gpus.replies(2, end, way, "message")
    assert isinstance(first, Reply)
    assert isinstance(first.error, error), first
    assert isinstance(second, Ended if way.startswith("dies") else Reply)


def beside(comm, kit):
    """Make collectives while a message is pending, which is received after them."""
    x = kit.seen_as(kit.bytes_of(np.ones(8, np.int32).view(np.uint8)), (8,), "int32")
    comm.all_reduce(x)
    comm.check()
    streams = [kit.stream(), kit.stream()]
    if comm.rank == 0:
        comm.send(x, 1, stream=streams[0])
    total = comm.all_reduce(x, stream=streams[1])
    streams[1].synchronize()
    assert kit.read(total).tolist() == [2] * 8
    if comm.rank == 1:
        comm.recv(x, 0, stream=streams[0])
    streams[0].synchronize()
    comm.check()


def test_a_pending_message_holds_up_no_collective(gpus):
    gpus.call(2, beside, backend="direct")


def other_size(rank):
    with rank.init(backend="direct") as comm:
        comm.all_reduce(ones(rank.kit, 8))
        if rank.rank == 0:
            comm.send(ones(rank.kit, 8), 1)
        else:
            comm.recv(ones(rank.kit, 7), 0)
        comm.check()


def test_messages_of_other_sizes(gpus):
    replies = gpus.replies(2, other_size)
    assert isinstance(replies[1].error, MismatchError), replies


def many(comm, kit):
    """Have many messages under way at once, of several sizes, and more than a page has words."""
    comm.all_reduce(ones(kit, 8))
    sizes = [1 + 997 * place for place in range(300)]
    xs = [ones(kit, size) for size in sizes]
    outs = [
        kit.seen_as(kit.bytes_of(np.zeros(4 * size, np.uint8)), (size,), "float32")
        for size in sizes
    ]
    for _ in range(2):
        with comm.group():
            for x, out in zip(xs, outs, strict=True):
                comm.send_recv(x, 1 - comm.rank, 1 - comm.rank, out=out)
        comm.check()
    assert all((kit.read(out) == 1).all() for out in outs)


@pytest.mark.soak
def test_many_messages_at_once(gpus):
    gpus.call(2, many, backend="direct")


def drop(rank):
    comm = rank.init(backend="direct")
    try:
        comm.all_reduce(ones(rank.kit, COUNT))
        comm.check()
        comm.barrier()  # or the other rank's part of that is given up, too
    finally:
        comm._give_up()
    assert not gpu_threads()


def test_giving_up_leaves_no_thread(gpus):
    gpus.call_ranks(2, drop)


def shrink(rank):
    comm = rank.init(backend="direct", timeout_s=10)
    comm.all_reduce(ones(rank.kit, 8))
    comm.check()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):  # noqa: PT012
        comm.all_reduce(ones(rank.kit, COUNT))
        comm.check()
    with comm.shrink() as left:
        assert rank.kit.read(left.all_reduce(ones(rank.kit, 8))).tolist() == [2] * 8
        left.check()


def test_shrink(gpus):
    replies = gpus.replies(3, shrink)
    assert [getattr(reply, "error", "ended") for reply in replies] == [None, "ended", None], replies
