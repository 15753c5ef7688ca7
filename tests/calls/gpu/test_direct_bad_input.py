"""What the direct backend cannot take is refused before anything moves; and what calls leave."""

from __future__ import annotations

import os

import numpy as np
import pytest
from tests.calls.gpu.failing import ones
from tests.calls.gpu.host_devices import gpus_of_host_devices
from tests.calls.gpu.kits import Guarded
from tests.waiting import collect, thread_names

from gpucoll.errors import GpucollError
from gpucoll.testing import device_arrays, host_device


@pytest.fixture
def gpus(gpu_ranks):
    return gpus_of_host_devices(gpu_ranks)


def refused(comm, kit):
    """Every rank is refused the same; the next call works, in step with the others."""
    x, out = ones(kit), ones(kit)
    elsewhere = device_arrays.asarray(np.ones(8, np.float32), device=5)
    its_stream = device_arrays.Stream(5)
    texts = []
    for call in (
        lambda: comm.all_reduce(elsewhere),
        lambda: comm.all_reduce(x, out=elsewhere),
        lambda: comm.send(elsewhere, 1 - comm.rank),
        lambda: comm.all_reduce(x, out=np.ones(8, np.float32)),
        lambda: comm.all_reduce([x, np.ones(8, np.float32)]),
        lambda: comm.all_reduce(x, stream=its_stream),
        lambda: comm.all_reduce(x[:6], out=x[1:7]),
    ):
        with pytest.raises((GpucollError, TypeError, ValueError)) as caught:
            call()
        texts.append(str(caught.value))
    assert kit.read(comm.all_reduce(x, out=out)).tolist() == [comm.world_size] * 8
    comm.check()
    its_stream.close()
    return texts


def test_what_is_of_elsewhere_is_refused(gpus):
    first, second = gpus.call(2, refused, backend="direct")
    for texts in (first, second):
        for place in (0, 1, 2):
            assert "host:5" in texts[place], texts[place]
        assert "belongs to another GPU" in texts[5]
        assert "overlap" in texts[6]


def unaligned(comm, kit):
    """Views that begin anywhere; the bytes beside them stay."""
    for offset in (1, 2, 3, 5, 7):
        for dtype, count in (("float32", 1003), ("float64", 37), ("uint8", 70_001)):
            made = [Guarded(kit, (count,), np.dtype(dtype), offset) for _ in range(2)]
            values = (np.arange(count) % 50).astype(dtype)
            kit.write(made[0].array, values)
            comm.all_reduce(made[0].array, out=made[1].array)
            comm.check()
            expected = (values * comm.world_size).astype(dtype)
            assert (kit.read(made[1].array) == expected).all(), (offset, dtype)
            for each in made:
                each.check((offset, dtype))


def test_unaligned_views(gpus):
    gpus.call(3, unaligned, backend="direct")


def level(number):
    collect()
    device_arrays.synchronize(number)
    device_arrays.empty(1, np.uint8, device=number)
    return thread_names(), len(os.listdir("/proc/self/fd")), host_device.counts(number)


def many_communicators(rank, count):
    levels = []
    for place in range(count):
        with rank.init(backend="direct") as comm:
            x = ones(rank.kit)
            comm.all_reduce(x)
            comm.send_recv(x, 1 - comm.rank, 1 - comm.rank)
        del comm, x
        if place in (4, count - 1):
            levels.append(level(rank.rank))
    return levels


@pytest.mark.soak
def test_200_communicators_leave_nothing(gpus):
    for before, after in gpus.call_ranks(2, many_communicators, 200):
        assert after == before


def many_calls(comm, kit):
    levels, x = [], ones(kit, 1000)
    for place in range(5000):
        comm.all_reduce(x) if place % 10 else comm.send_recv(x, 1 - comm.rank, 1 - comm.rank)
        if place in (500, 4999):
            comm.check()
            names, files, counts = level(comm.rank)
            # Slots of messages and events are kept: for as many calls as were under way at once.
            assert counts.pop("registered") < 200
            counts["events"] -= len(comm._gpu._connected.issuer.streams.events)
            levels.append((names, files, counts))
    return levels


@pytest.mark.soak
def test_5000_calls_leave_nothing(gpus):
    for before, after in gpus.call(2, many_calls, backend="direct"):
        assert after == before
