"""Arrays on Host devices: what they are, the order of what is done to them, their memory."""

from __future__ import annotations

import gc
import threading

import ml_dtypes  # noqa: F401  (makes np.dtype("bfloat16") known)
import numpy as np
import pytest
from tests.dtypes import any_values, assert_same, dtype_of

from gpucoll.arrays import libraries
from gpucoll.arrays.host_device_arrays import NAME
from gpucoll.arrays.operands import destination_of, prepare, source_of, template_like, template_of
from gpucoll.arrays.streams import address_of, current_stream
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.testing import device_arrays as da
from gpucoll.types import DTYPES


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    monkeypatch.delenv("GPUCOLL_CPU_ONLY", raising=False)
    da.use(0)
    da.synchronize(0)
    before = da.device_of(0).counts()
    yield
    gc.collect()
    da.synchronize(0)
    assert da.device_of(0).counts() == before
    assert da.current_device() == 0


@pytest.fixture
def stream():
    stream = da.Stream()
    yield stream
    stream.close()


@pytest.mark.soak(quick=9)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_there_and_back(dtype):
    values = any_values(dtype, 60, 1).reshape(3, 4, 5)
    x = da.asarray(values)

    assert (x.shape, x.dtype, x.ndim, x.size, x.nbytes) == (
        (3, 4, 5), dtype_of(dtype), 3, 60, values.nbytes,
    )  # fmt: skip
    assert_same(x.get(), values, dtype)
    assert_same(x[1:, ::2, 3].copy().get(), values[1:, ::2, 3], dtype)
    assert_same(x.T.copy().get(), values.T, dtype)
    assert_same(x.reshape(5, 12)[:, -1].numpy(), values.reshape(5, 12)[:, -1], dtype)
    assert x.device == 0
    assert f"{dtype}[3, 4, 5] on host:0" in repr(x)
    view = source_of(x).buffer
    assert (view.device, view.dtype, view.shape) == ("host:0", dtype, (3, 4, 5))
    assert view.address == x.address


def test_writing_comes_onto_the_current_stream(stream):
    device, x = da.device_of(0), da.zeros(8, np.int32)
    x.get()
    gate = device.allocate_pinned(4)
    with stream:
        assert da.current_stream() == stream.ptr
        assert device.stream_wait_value(stream.ptr, gate, 1) == 0
        given = np.arange(4, dtype=np.int32)
        x[::2] = given
        given[:] = 99  # too late
        x[1] = 7
        y = x.copy()
        x[...] = da.zeros(8, np.int32)
        assert not stream.done
    assert da.current_stream() == 0
    assert x.get().tolist() == [0] * 8  # on the default stream: nothing has run yet
    device.stream_write_value(0, gate, 1)
    stream.synchronize()
    assert y.get().tolist() == [0, 7, 1, 0, 2, 0, 3, 0]
    assert x.get().tolist() == [0] * 8
    device.free_pinned(gate)


def test_threads_have_their_own_current_device_and_stream(stream):
    seen: list[tuple[int, ...]] = []

    def look():
        seen.append((da.current_device(), da.current_stream(0)))
        da.use(1)
        seen.append((da.current_device(), da.empty(1).device, da.asarray([1], device=0).device))

    with stream:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert da.current_stream() == stream.ptr
        assert da.current_stream(1) == 0
    assert seen == [(0, 0), (1, 1, 0)]
    gc.collect()
    da.synchronize(1)


def test_memory_comes_back_when_what_uses_it_is_done(stream):
    device = da.device_of(0)
    gate = device.allocate_pinned(4)
    before = device.counts()["bytes"]
    x, y = da.zeros(1000, np.uint8), da.zeros(1000, np.uint8)
    with stream:
        device.stream_wait_value(stream.ptr, gate, 1)
        y[...] = x
    part = x[5:]
    del x
    z = da.zeros(1, np.uint8)  # collects
    used = device.counts()["bytes"]
    del part
    gc.collect()
    z = da.zeros(1, np.uint8)
    assert device.counts()["bytes"] >= used  # the copy may still read it
    device.stream_write_value(0, gate, 1)
    da.synchronize()
    assert y.get().tolist() == [0] * 1000
    del y, z
    gc.collect()
    da.synchronize()
    assert device.counts()["bytes"] == before
    device.free_pinned(gate)


def test_what_is_gone_is_waited_for_where_memory_runs_out():
    free, _ = da.device_of(0).memory_bytes()
    x = da.empty(free // 2 + 4096, np.uint8)
    x[0] = 1
    del x
    gc.collect()
    x = da.empty(free // 2 + 4096, np.uint8)
    with pytest.raises(MemoryError):
        da.empty(free // 2, np.uint8)
    assert x.size > free // 2


def test_misuse():
    x = da.zeros((3, 4))
    for wrong in ([0, 1], np.array([True] * 3), 1.0, "a"):
        with pytest.raises(ArgumentTypeError, match="slices and ints"):
            x[wrong]
    with pytest.raises(ArgumentError, match="without a copy"):
        x.T.reshape(12)
    with pytest.raises(ArgumentTypeError, match="cast it first"):
        x[...] = da.zeros((3, 4), np.float32)
    with pytest.raises(IndexError):
        x[5]
    assert len(x) == 3


# --- as gpucoll sees them -------------------------------------------------------------------------


def test_the_library():
    x = da.asarray(np.arange(6.0).reshape(2, 3))
    library = libraries.library_of(x, "x")

    assert library.NAME == NAME
    assert libraries.is_array(x)
    assert source_of(x).is_packed is False
    packed = source_of(x.T)
    assert packed.is_packed
    assert packed.buffer.owner.get().tolist() == x.get().T.tolist()
    made = destination_of(template_of(x), (4,))
    assert made.finish().shape == (4,)
    assert made.buffer.device == "host:0"
    small = template_like(dtype=np.dtype("int8"), like=x)
    assert (small.dtype, small.device, small.library) == ("int8", "host:0", library)


def test_outputs_that_are_not_contiguous(stream):
    x, out = da.asarray(np.arange(6.0)), da.zeros((6, 2))
    da.synchronize()  # they were made on another stream
    with stream:
        operands = prepare(x, out[:, 1])
        assert current_stream(operands.template) == address_of(stream) == stream.ptr
        assert operands.source.stream == stream.ptr
        operands.destination.owner[...] = x
        result = operands.finish()
    stream.synchronize()
    assert result.get().tolist() == list(range(6))
    assert out.get()[:, 0].tolist() == [0] * 6
