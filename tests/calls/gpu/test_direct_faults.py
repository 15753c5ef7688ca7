"""The direct backend under attack: what fails, at every place; ranks that die, stop, fork, give up.

Over Host devices and over the drivers' doubles; through shared GPU memory, and staged.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time

import numpy as np
import pytest
from tests.calls.gpu.conftest import Gpus
from tests.calls.gpu.failing import THREADS, ones
from tests.calls.gpu.host_devices import gpus_of_host_devices
from tests.calls.gpu.host_devices import in_rank as host_devices_in_rank
from tests.waiting import SOON_S, thread_names, until

from gpucoll.errors import AbortedError, BackendError, GpucollError
from gpucoll.testing import device_arrays, host_device

WAYS = ("shared", "staged")


@pytest.fixture(params=["nccl", "rccl", "host"])
def gpus(request, gpu_ranks, doubles):
    """Ranks with GPUs of either kind: doubles of the vendors', or Host devices."""
    if request.param == "host":
        return gpus_of_host_devices(gpu_ranks)
    return Gpus(gpu_ranks, doubles.double(request.param))


@pytest.fixture
def host_devices(gpu_ranks):
    return gpus_of_host_devices(gpu_ranks)


def threads():
    return {*thread_names()} & {*THREADS, "gpucoll-direct-ending"}


def open_files():
    """Return what this process has open; not what its sockets and pipes are called."""
    gc.collect()
    names = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(name.split(":")[0] for name in names if "/proc/" not in name)


def numbers(kit, values):
    return kit.seen_as(kit.bytes_of(values.view(np.uint8)), values.shape, values.dtype)


# --- one thing fails, at every place --------------------------------------------------------------


def make_every_kind_of_call(comm, kit):
    """Make calls, look at their results once they are certain."""
    size, count = comm.world_size, 70_001
    values = (np.arange(count) % 251).astype(np.int32)
    x = numbers(kit, values)
    total = comm.all_reduce(x)
    summed = comm.reduce_scatter(x[: count // size * size])
    whole = comm.all_gather(x[:5])
    first = comm.broadcast(x, root=1)
    got = comm.send_recv(x, (comm.rank + 1) % size, (comm.rank - 1) % size)
    parts = comm.all_reduce([x[:7], x[7:12]])
    comm.check()
    assert (kit.read(total) == values * size).all()
    assert (kit.read(summed) % size == 0).all()
    assert kit.read(whole).reshape(-1).tolist() == values[:5].tolist() * size
    assert (kit.read(first) == values).all()
    assert (kit.read(got) == values).all()
    assert kit.read(parts[1]).tolist() == (values[7:12] * size).tolist()
    comm.barrier()  # who has all of the last call may not know that another one failed in it


def fail_once(rank, way, kind, at):
    """Return an error's kind, or "" where all went well, and its text."""
    number, begun_s = rank.rank, time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            if way == "staged" and rank.rank == 0:  # nothing is exported: all ranks stage
                stack.enter_context(host_device.failing("ipc", number=number))
            if rank.rank == 1:
                stack.enter_context(host_device.failing(kind, at=at, number=number))
            with rank.init(backend="direct") as comm:
                make_every_kind_of_call(comm, rank.kit)
        return "", ""
    except (GpucollError, MemoryError) as error:
        return type(error).__name__, str(error)
    finally:
        host_device.reset(number)
        assert time.monotonic() - begun_s < SOON_S, at
        assert not threads(), at


def fail_everywhere(rank, way, kind, places):
    """Return how each round ended, and what is there before and after."""
    fail_once(rank, "shared", kind, 10**6)  # as at the end: a Host device keeps open what it found
    fail_once(rank, way, kind, 10**6)
    before = open_files(), what_is_left(rank.rank)
    ended = [fail_once(rank, way, kind, at) for at in places]
    fail_once(rank, "shared", kind, 10**6)  # what could not be freed at once is freed now
    return ended, before, (open_files(), what_is_left(rank.rank))


def what_is_left(number):
    """Return how much there is, but for memory of arrays that are gone and are not yet freed."""
    gc.collect()
    with contextlib.suppress(BackendError):  # a device that is broken
        device_arrays.synchronize(number)
        device_arrays.empty(1, np.uint8, device=number)
    gc.collect()
    return host_device.counts(number)


FAILURES = {"copy": 22, "launch": 10, "allocation": 12, "ipc": 4}
"""Kind -> up to which place something fails: rank 1 has as many, and a few more."""
TRIED = {"copy": 6, "launch": 4}
"""Kind -> how many come while the ranks try each other's memory: they stage where one fails."""


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_at_every_place(host_devices, way, kind):
    places = range(1, FAILURES[kind] + 1)
    answers = host_devices.call_ranks(2, fail_everywhere, way, kind, places)

    (others, *_), (own, *_) = answers
    for place, mine, yours in zip(places, own, others, strict=True):
        assert bool(mine[0]) == bool(yours[0]), (place, mine, yours)
    for kind_of_error, text in own:
        assert kind_of_error in ("", "BackendError", "MemoryError", "BackendUnavailableError"), text
    for kind_of_error, text in others:
        told = ("", "AbortedError", "PeerLostError", "BackendUnavailableError")
        assert kind_of_error in told, text
        assert not kind_of_error or "rank 1" in text
    if kind in TRIED and way == "shared":
        assert not any(error for error, _ in own[: TRIED[kind]])
        later = own[TRIED[kind] :]
        assert sum(bool(error) for error, _ in later) > len(later) / 2, "hardly anything failed"
    for _, before, after in answers:
        assert after == before


def break_down(rank, at):
    """A kernel of rank 1 fails on the device, which does nothing from then on."""
    return fail_once(rank, "shared", "run", at), what_is_left(rank.rank)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("at", range(1, 6))
def test_a_device_that_breaks_in_a_call(rank_server, at):
    devices = gpus_of_host_devices(None)
    with rank_server.fork(2) as pool:
        arguments = devices.double, break_down, (at,)
        pool.start(host_devices_in_rank, *arguments, gives="seat", environment=devices.variables)
        replies = pool.collect()
    assert [reply.error for reply in replies] == [None, None], replies
    ((told, text), left), ((own, _), _) = (reply.result for reply in replies)
    assert own == "BackendError"
    assert told in ("", "AbortedError", "PeerLostError"), text  # who was done need not hear of it
    assert left == {**left, "events": 0, "pinned": 0, "registered": 0, "opened": 0}
    assert left["bytes"] < 1 << 20, "the exchange is there, though rank 1's device does nothing"


# --- given up while streams are busy --------------------------------------------------------------


def give_up_with_held_streams(rank):
    """Rank 1's stream goes on before rank 0's, which has more calls; both have given up before."""
    beside = rank.init(backend="cpu")
    comm = rank.init(backend="direct")
    kit, is_first = rank.kit, rank.rank == 0
    x, y = ones(kit, 1000), ones(kit, 8)
    comm.all_reduce(y)
    comm.check()
    begun_s = time.monotonic()
    with rank.held():
        for _ in range(3 if is_first else 1):
            comm.all_reduce(x)
        beside.barrier()  # a rank that comes late would be refused its call
        if is_first:
            comm.abort()
        with pytest.raises(AbortedError):
            comm.check()
        comm.close()
        assert time.monotonic() - begun_s < SOON_S
        beside.barrier()
        if is_first:
            beside.barrier()
    kit.read(y)  # the stream is through: else this waits for ever
    if not is_first:
        beside.barrier()
    until(lambda: not threads())
    beside.close()


@pytest.mark.soak
def test_streams_that_come_to_it_long_after_the_end(rank_server, gpus):
    with rank_server.fork(2) as pool:  # what such streams may use stays as long as the process
        arguments = gpus.double, give_up_with_held_streams, ()
        pool.start(gpus.enter, *arguments, gives="seat", environment=gpus.variables)
        assert [reply.error for reply in pool.collect()] == [None, None]
