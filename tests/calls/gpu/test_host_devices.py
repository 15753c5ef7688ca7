"""Calls on arrays of Host devices, in ranks: from what the user writes to the backend."""

from __future__ import annotations

import numpy as np
import pytest
from tests.calls.gpu.cases import run_cases
from tests.calls.gpu.host_devices import gpus_of_host_devices
from tests.calls.gpu.kits import Guarded
from tests.calls.gpu.test_collectives import cases_of
from tests.collective_cases import MOVEMENTS, REDUCTIONS

from gpucoll.types import DTYPES


@pytest.fixture
def gpus(gpu_ranks):
    return gpus_of_host_devices(gpu_ranks)


@pytest.fixture
def one_device(gpu_ranks):
    return gpus_of_host_devices(gpu_ranks, 0, 0, 0, 0)


def use_the_kit(rank):
    kit = rank.kit
    assert kit.arrays.current_device() == rank.rank
    for dtype in DTYPES:
        native = np.dtype(dtype)
        guarded = Guarded(kit, (3, 5), native, 7)
        values = np.arange(15).reshape(3, 5).astype(native)
        kit.write(guarded.array, values)
        assert kit.read(guarded.array).tobytes() == values.tobytes()
        guarded.check()
    stream = kit.stream()
    x = kit.bytes_of(np.full(4, 1, np.uint8))
    y = kit.bytes_of(np.zeros(4, np.uint8))
    with stream:
        assert kit.handle(stream) == kit.current() != 0
        with rank.held():
            kit.copy(y, x)
            assert not stream.done
        assert kit.read(y).tolist() == [1] * 4
    stream.close()


def test_the_kit_of_these_tests(gpus):
    gpus.call_ranks(2, use_the_kit)


def call_by_auto(comm, kit):
    x = kit.seen_as(kit.bytes_of(np.full(16, comm.rank, np.uint8)), (4,), np.int32)
    kit.write(x, np.full(4, comm.rank))
    assert kit.read(comm.all_reduce(x)).tolist() == [sum(range(comm.world_size))] * 4
    assert comm.all_reduce(np.ones(2)).tolist() == [comm.world_size] * 2
    assert "direct" in comm.describe().facts["GPU arrays"]


def test_auto_takes_direct(gpus):
    gpus.call(2, call_by_auto)


def drawn(world_size, n_cases):
    names = (*REDUCTIONS, *MOVEMENTS)
    return [case for name in names for case in cases_of(name, world_size, 5, n_cases)]


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_cases(gpus, world_size):
    cases = drawn(world_size, 12)
    assert gpus.call(world_size, run_cases, cases, backend="direct") == [len(cases)] * world_size


def test_ranks_that_share_a_device(one_device):
    cases = drawn(2, 6)  # in one process each has its own memory of the device
    assert one_device.call(2, run_cases, cases, backend="direct", device=0) == [len(cases)] * 2
