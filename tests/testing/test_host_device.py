"""What tests can have Host devices do."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from gpucoll.errors import ArgumentError, BackendError
from gpucoll.kernels.gpu.reduce import reduce_arrays
from gpucoll.testing import device_arrays as da
from gpucoll.testing import host_device


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    monkeypatch.delenv("GPUCOLL_CPU_ONLY", raising=False)
    da.synchronize(0)
    before = host_device.counts()
    yield
    host_device.reset()
    gc.collect()
    da.synchronize(0)
    assert host_device.counts() == before


def test_the_nth_copy_fails_once():
    x = da.zeros(4)
    with host_device.failing("copy", at=2):
        x[0] = 1
        with pytest.raises(BackendError, match="as a test has requested"):
            x[1] = 1
        x[2] = 1
    assert x.get().tolist() == [1, 0, 1, 0]
    with host_device.failing("copy", at=100):
        x[1] = 1
    with host_device.failing("allocation"), pytest.raises(BaseException, match="bytes are free"):
        host_device.device().allocate(1)


def test_a_kernel_fails_when_it_runs():
    x = da.zeros(4)
    x.get()
    with host_device.failing("run"):
        reduce_arrays("sum", [x], [x, x])
    with pytest.raises(BackendError, match="a kernel has failed"):
        x.get()
    host_device.reset()
    assert x.get().tolist() == [0] * 4


def test_streams_are_held_and_delayed():
    stream, x = da.Stream(), da.zeros(4)
    x.get()
    with host_device.held(stream):
        with stream:
            x[...] = np.ones(4)
        assert not stream.done
        assert x._where.tolist() == [0] * 4
    assert x.get().tolist() == [1] * 4
    with host_device.delayed("copy", 0.05), stream:
        x[...] = np.zeros(4)
        assert not stream.done
    stream.synchronize()
    assert x.get().tolist() == [0] * 4
    stream.close()


def test_memory_is_filled():
    with host_device.filled(), pytest.raises(MemoryError):
        da.empty(1)
    with host_device.filled(but_bytes=1 << 20):
        x = da.empty(1 << 19, np.uint8)
        with pytest.raises(MemoryError):
            da.empty(1 << 20, np.uint8)
        del x


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: host_device.failing("nothing"),
        lambda: host_device.failing("copy", at=0),
        lambda: host_device.delayed("ipc", 1),
        lambda: host_device.delayed("copy", -1),
    ],
)
def test_what_cannot_be_asked_for(wrong):
    with pytest.raises(ArgumentError, match="kind must be"), wrong():
        pass
