"""Calls with ``init(mixed=True)`` that fail, or are refused: on ranks with a GPU, and without."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from tests.calls.gpu.failing import gpu_threads
from tests.calls.gpu.mixed_ranks import MixedRank
from tests.calls.gpu.test_direct_failures import COUNT
from tests.faults.test_ends import errors
from tests.ranks import Ended, Reply
from tests.waiting import SOON_S, is_broken, until

import gpucoll
from gpucoll import config
from gpucoll.config import environment
from gpucoll.errors import (
    AbortedError,
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailableError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    RendezvousError,
)

BOTH_WAYS = pytest.mark.parametrize("kinds", ["nh", "hn"])


def end(rank: MixedRank, way, calls):
    """Have rank 1 make another call, none, or die in the middle; return how rank 0 hears of it."""
    limit_s = 0.5 if way == "is late" else 20
    try:
        with rank.init() as comm:
            comm.all_reduce(rank.array(np.ones(8)))
            comm.check()
            begun_s = time.monotonic()
            if rank.rank == 1:
                act(comm, rank, way)
            x = rank.array(np.ones(COUNT))
            try:
                if calls == "message":
                    comm.recv(x, 1, timeout_s=limit_s)
                elif calls == "broadcast":  # the root's own part is soon over
                    comm.broadcast(x, root=0, timeout_s=limit_s)
                else:
                    comm.all_reduce(x, timeout_s=limit_s)
                comm.check()
            finally:
                assert time.monotonic() - begun_s < SOON_S
    finally:
        assert not gpu_threads()


def act(comm, rank, way):
    if way == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "dies in a call":
        comm.all_reduce(rank.array(np.ones(COUNT)), async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "differs":
        comm.all_reduce(rank.array(np.ones(COUNT + 1)))
        comm.check()
    if way == "passes another dtype":
        comm.all_reduce(rank.array(np.ones(COUNT), "int32"))
        comm.check()
    if way == "aborts":
        comm.abort()
        comm.check()
    until(lambda: is_broken(comm))
    comm.check()


@pytest.mark.soak(quick=3)
@BOTH_WAYS
@pytest.mark.parametrize(
    ("way", "error"),
    [
        ("differs", MismatchError),
        ("passes another dtype", MismatchError),
        ("is late", DeadlineError),
        ("aborts", AbortedError),
        ("dies", PeerLostError),
        ("dies in a call", PeerLostError),
    ],
)
def test_what_ends_a_collective(mixed, kinds, way, error):
    first, second = mixed.replies(kinds, end, way, "collective")
    assert isinstance(first, Reply)
    assert isinstance(first.error, error), first
    if way.startswith("dies"):
        assert isinstance(second, Ended)
    else:
        assert isinstance(second.error, error), second


@pytest.mark.soak(quick=2)
@BOTH_WAYS
@pytest.mark.parametrize(
    ("way", "error"),
    [("is late", DeadlineError), ("aborts", AbortedError), ("dies", PeerLostError)],
)
def test_what_ends_a_message(mixed, kinds, way, error):
    first, second = mixed.replies(kinds, end, way, "message")
    assert isinstance(first, Reply)
    assert isinstance(first.error, error), first
    assert isinstance(second, Ended if way == "dies" else Reply)


def test_a_root_whose_part_is_over_waits_no_longer_than_it_may(mixed):
    first, _ = mixed.replies("hn", end, "is late", "broadcast")
    assert isinstance(first.error, DeadlineError), first
    assert "0.5 s" in str(first.error)


def receive_other_sizes(rank):
    with rank.init() as comm:
        if rank.rank == 0:
            comm.send(rank.array(np.ones(8)), 1)
        else:
            comm.recv(rank.array(np.ones(7)), 0)
        comm.check()


@BOTH_WAYS
def test_messages_of_other_sizes(mixed, kinds):
    replies = mixed.replies(kinds, receive_other_sizes)
    assert isinstance(replies[1].error, MismatchError), replies


def shrink(rank):
    comm = rank.init(timeout_s=10)
    comm.all_reduce(rank.array(np.ones(8)))
    comm.check()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):  # noqa: PT012
        comm.all_reduce(rank.array(np.ones(COUNT)))
        comm.check()
    with comm.shrink() as left:
        total = left.all_reduce(rank.array(np.ones(8)))
        assert rank.read(total).tolist() == [2] * 8
        left.check()
        return dict(left.describe().facts)["mixed"], dict(left.describe().facts)["GPU"]


def test_shrink_keeps_each_ranks_gpu(mixed):
    first, _, last = mixed.replies("hhn", shrink)
    assert first.error is last.error is None, (first, last)
    assert last.result[0] == "yes: host arrays alone on rank 0, cuda on rank 1"
    assert last.result[1].startswith("cuda:2: ")


def leave_pending(rank):
    """Give the communicator up with calls under way; nobody waits for them."""
    comm = rank.init(timeout_s=10)
    try:
        x = rank.array(np.ones(COUNT))
        comm.all_reduce(x)
        comm.check()
        comm.barrier()  # or the other rank's part of that is given up, too
        if rank.rank == 0:
            works = [comm.all_reduce(x, async_op=True), comm.send(x, 1, async_op=True)]
            comm.abort()
            for work in works:
                with pytest.raises(AbortedError):
                    work.synchronize()
        else:
            until(lambda: is_broken(comm))
    finally:
        comm._give_up()
    assert not gpu_threads()


@BOTH_WAYS
def test_calls_that_are_given_up(mixed, kinds):
    mixed.call(kinds, leave_pending)


# --- what is refused ------------------------------------------------------------------------------


def say_otherwise(rank, how):
    with rank.init(**how[rank.rank]):
        pass


def test_ranks_that_say_otherwise(mixed):
    how = [{}, {"mixed": False, "device": None}]
    for error in errors(mixed.replies("hh", say_otherwise, how)):
        assert isinstance(error, RendezvousError)
        assert "mixed is False on rank 1 and True on rank 0" in str(error)


def give_bad_arguments(rank):
    for backend in ("cpu", "nccl", "rccl"):
        with pytest.raises(ArgumentError, match="needs backend='auto' or 'direct', not"):
            rank.init(backend=backend)
    for bad in (1, "yes", None):
        with pytest.raises(ArgumentTypeError, match="mixed must be True or False; got"):
            rank.init(mixed=bad)


def test_bad_arguments(mixed):
    mixed.call("hh", give_bad_arguments)


def refuse(rank):
    with rank.init() as comm:
        x, other = rank.array(np.ones(4)), 1 - comm.rank
        for call in (
            lambda: comm.recv(x, gpucoll.ANY_SOURCE),
            lambda: comm.recv(x, other, gpucoll.ANY_TAG),
            lambda: comm.recv(source=other),
            lambda: comm.recv(x, other, info=True),
            lambda: comm.send(x, other, synchronous=True),
            lambda: comm.send(x, comm.rank),
            lambda: comm.plan_send(x, other),
        ):
            with pytest.raises(ArgumentError, match="mixed=True"):
                call()
        for call in (
            lambda: comm.all_to_all([x, x]),
            lambda: comm.scatter([x, x], out=rank.array(np.ones(4))),
            lambda: comm.plan_all_gather(x, out=[rank.array(np.ones(4)) for _ in range(2)]),
        ):
            with pytest.raises(ArgumentTypeError, match=r"lists of blocks .* with mixed=True"):
                call()
        y = rank.array(np.zeros(4))
        with pytest.raises(ArgumentError, match="share memory"), comm.group():  # noqa: PT012
            comm.all_reduce(x, out=y)
            comm.all_reduce(y)
        with pytest.raises(ArgumentError, match="inside group"), comm.group():
            comm.all_reduce(x, async_op=True)
        with pytest.raises(ArgumentTypeError, match="like this inside group"), comm.group():
            comm.all_reduce(x[::2])
        with pytest.raises(ArgumentTypeError, match="band"):
            comm.all_reduce(x, "band")
        if rank.kind == "h":
            with pytest.raises(BackendUnavailableError, match="has no GPU"):
                comm.empty(3, like="cuda")
            assert comm.empty(3, like=x).shape == (3,)
        # All of that was refused before anything moved: these go well.
        assert rank.read(comm.all_reduce(x)).tolist() == [2] * 4
        comm.send_object("an object", other)
        assert comm.recv_object(other) == "an object"
        assert rank.read(comm.send_recv(x, other, other)).tolist() == [1] * 4
        comm.check()


@pytest.mark.parametrize("kinds", ["nh", "Nh"])
def test_what_is_refused(mixed, kinds):
    mixed.call(kinds, refuse)


def pass_gpu_arrays_without_a_gpu(rank):
    """Have a rank that is kept to the CPU pass an array of a Host device, which plays a GPU."""
    from gpucoll.testing import device_arrays

    with rank.init() as comm:
        if rank.rank == 1:
            with environment({config.CPU_ONLY: "0", config.DEVICE: "host"}):
                x = device_arrays.asarray(np.ones(3, np.float32))
            with pytest.raises(BackendUnavailableError, match="this rank saw no GPU when it met"):
                comm.all_reduce(x)
        assert rank.read(comm.all_reduce(rank.array(np.ones(3)))).tolist() == [2] * 3
        comm.check()


def test_gpu_arrays_on_a_rank_without_a_gpu(mixed):
    mixed.call("dh", pass_gpu_arrays_without_a_gpu)


def compress_host_arrays(rank):
    with rank.init() as comm:
        with pytest.raises(ArgumentError, match="x lies in host memory, and this rank has cuda:0"):
            comm.all_reduce(np.ones(300, np.float32), compression="int8_block")
        assert comm.all_reduce(2.0) == 2.0


def test_compressed_host_arrays_on_a_rank_with_a_gpu(mixed):
    mixed.call("N", compress_host_arrays)
