"""Streams: what waits for what, what stays alive, what is refused; graphs."""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import numpy as np
import pytest
from tests.calls.gpu.conftest import EVERYWHERE, REPLAYED
from tests.waiting import until

from gpucoll import devices
from gpucoll.backends.gpu.issuer import MOST_IN_FLIGHT
from gpucoll.errors import ArgumentError, ArgumentTypeError, BackendUnavailableError, DeadlineError


def full(kit, value, count=1000):
    values = np.full(count, value, np.float32)
    return kit.seen_as(kit.bytes_of(values.view(np.uint8)), (count,), "float32")


def issuer_of(comm):
    return comm._gpu._connected.issuer


# --- a call only enqueues -------------------------------------------------------------------------


def return_before_it_is_done(rank):
    with rank.init() as comm:
        kit = rank.kit
        first, second, y, z = (full(kit, value) for value in (1, 2, 0, 0))
        for async_op in (False, True):  # a GPU may be waited for as a whole at the first call
            comm.all_reduce(first, out=y, async_op=async_op)
        comm.check()
        with rank.held():
            comm.all_reduce(first, out=y)
            work = comm.all_reduce(second, out=z, async_op=True)
            assert work.wait() is z
            states = [work.done(), work.exception(), issuer_of(comm).is_busy]
            with pytest.raises(DeadlineError, match="has not even begun"):
                work.synchronize(timeout_s=0.05)
        work.synchronize()
        states += [work.done(), repr(work)]
        return states, kit.read(y)[0], kit.read(z)[0]


@pytest.mark.soak(quick=1)
@REPLAYED
def test_a_call_returns_before_it_is_done(gpus):
    size = gpus.world(2)
    states = [False, None, True, True, "<Work all_reduce on the GPU: done>"]
    expected = states, 1.0 * size, 2.0 * size
    assert gpus.call_ranks(2, return_before_it_is_done) == [expected] * size


def order_on_one_stream(comm, kit):
    """Change the input before the call, and use its result after it, all on one stream."""
    results = []
    for stream in (None, kit.stream()):
        x, y, out, later = (full(kit, value) for value in (1, 5, 0, 0))
        if stream is not None:
            stream.__enter__()
        try:
            kit.copy(x, y)
            comm.all_reduce(x, out=out)
            kit.copy(later, out)
            kit.copy(x, later)
            results.append(kit.read(x)[-1])
        finally:
            if stream is not None:
                stream.__exit__(None, None, None)
    return results


@pytest.mark.soak(quick=1)
@EVERYWHERE
def test_the_current_stream_orders_everything(gpus):
    size = gpus.world(3)
    assert gpus.call(3, order_on_one_stream) == [[5.0 * size] * 2] * size


def keep_legacy_order(rank, backend):
    """The legacy stream and one that is in order with it, in turns, with no wait between them."""
    with rank.init(backend=backend) as comm:
        kit, results = rank.kit, []
        comm.all_reduce(full(kit, 0))
        blocking = kit.stream(non_blocking=False)
        rank.control.driver_set("delay_us", 2000)
        for async_op in (False, True):
            x, y, out, later = (full(kit, value) for value in (1, 5, 0, 0))
            with blocking:
                kit.copy(x, y)
            work = comm.all_reduce(x, out=out, async_op=async_op)  # on the legacy stream
            if async_op:
                work.wait()
            with blocking:
                kit.copy(later, out)
                comm.all_reduce(later, out=x)
            kit.copy(y, x)
            results.append(kit.read(y)[-1])
        rank.control.driver_set("delay_us", 0)
        return results


@pytest.mark.parametrize("backend", ["nccl", "direct"])
def test_the_legacy_streams_order(gpus, backend):
    assert gpus.call_ranks(2, keep_legacy_order, backend) == [[20.0, 20.0]] * 2


def overlap(rank):
    """An asynchronous call comes after what was on the stream, and nothing waits for it."""
    with rank.init() as comm:
        kit = rank.kit
        x, y, out, later = (full(kit, value) for value in (1, 5, 0, 0))
        comm.all_reduce(x)
        kit.copy(x, y)
        with rank.control.library_set(delay_us=100_000):
            work = comm.all_reduce(x, out=out, async_op=True)
            with kit.stream():
                kit.read(y)  # another stream is not held up
                was_done = work.done()
            result = work.wait()
            kit.copy(later, out)
        assert result is out
        assert work.wait() is out
        return was_done, kit.read(later)[0]


def test_async_runs_beside_the_stream_and_wait_orders_it(gpus):
    assert gpus.call_ranks(2, overlap) == [(False, 10.0)] * 2


def many_works(comm, kit):
    works = [comm.all_reduce(full(kit, place), async_op=True) for place in range(20)]
    return [kit.read(work.wait())[0] for work in reversed(works)]


@REPLAYED
def test_many_works_waited_for_in_any_order(gpus):
    size = gpus.world(2)
    expected = [float(size * place) for place in reversed(range(20))]
    assert gpus.call(2, many_works) == [expected] * size


# --- what stays alive -----------------------------------------------------------------------------


def let_go(rank):
    with rank.init() as comm:
        kit = rank.kit
        comm.all_reduce(full(kit, 1))
        comm.check()
        gc.collect()  # what other tests have left would wait for what is held
        with rank.control.held():
            x = full(kit, 3)
            alive = weakref.ref(x._memory)
            work = comm.all_reduce(x, async_op=True)
            del x
            gc.collect()
            first = alive() is not None
        work.synchronize()
        until(lambda: alive() is None)
        return first, kit.read(work.wait())[0]


def test_arrays_stay_alive_until_their_work_is_done_and_no_longer(gpus):
    assert gpus.call_ranks(2, let_go) == [(True, 6.0)] * 2


def leave_works(rank):
    full(rank.kit, 1)  # the first array makes the double's default streams
    before = [rank.control.count(what) for what in ("events", "streams")]
    with rank.init() as comm:
        kit = rank.kit
        for _ in range(3000):
            comm.all_reduce(full(kit, 1, 8), async_op=True)
        backlog = issuer_of(comm).in_flight.count
        comm.check()
        left = issuer_of(comm).in_flight.count
    after = [rank.control.count(what) for what in ("events", "streams")]
    return backlog <= MOST_IN_FLIGHT, left, before == after


@pytest.mark.soak
def test_a_backlog_is_bounded_and_nothing_is_left(gpus):
    assert gpus.call_ranks(2, leave_works) == [(True, 0, True)] * 2


def read_at_once(rank):
    """Arrays of a library that knows no streams are complete when the call returns."""
    library: Any = importlib.import_module("gpucoll.arrays.cupy_arrays")

    with rank.init() as comm:
        kit = rank.kit
        library.IS_STREAM_ORDERED = False
        try:
            comm.all_reduce(full(kit, 1))
            with rank.control.library_set(delay_us=50_000):
                plain = comm.all_reduce(full(kit, 1)).host[-1]
                work = comm.all_reduce(full(kit, 1), async_op=True)
                waited = work.wait().host[-1]
                with comm.group():
                    grouped = comm.all_reduce(full(kit, 1))
                planned = comm.plan_all_reduce(full(kit, 1))().host[-1]
            return [plain, waited, grouped.host[-1], planned]
        finally:
            del library.IS_STREAM_ORDERED


def test_arrays_without_streams_are_complete_at_once(gpus):
    assert gpus.call_ranks(2, read_at_once) == [[2.0] * 4] * 2


# --- stream= --------------------------------------------------------------------------------------


def on_a_given_stream(comm, kit):
    stream = kit.stream()
    results = []
    for given in (stream, kit.handle(stream)):
        out = full(kit, 0)
        assert comm.all_reduce(full(kit, 2), out=out, stream=given) is out
        stream.synchronize()
        results.append(kit.read(out)[0])
        # What is made or filled for the call is used on the current stream.
        results.append(kit.read(comm.all_reduce(full(kit, 2), stream=given))[0])
        matrix = kit.seen_as(
            kit.bytes_of(np.ones(24, np.float32).view(np.uint8)), (4, 6), "float32"
        )
        results.append(kit.read(comm.all_reduce(matrix.T, out=matrix.T, stream=given))[0, 0])
        results.append(
            kit.read(comm.all_reduce(full(kit, 2), stream=given, async_op=True).wait())[0]
        )
    with pytest.raises(ArgumentTypeError, match="stream must be a stream of CuPy"):
        comm.all_reduce(full(kit, 1), stream="mine")
    return results


@EVERYWHERE
def test_a_given_stream(gpus):
    size = gpus.world(2)
    expected = [2.0 * size, 2.0 * size, 1.0 * size, 2.0 * size] * 2
    assert gpus.call(2, on_a_given_stream) == [expected] * size


def on_the_per_thread_stream(comm, kit):
    comm.all_reduce(full(kit, 1))
    for call in (
        lambda: comm.all_reduce(full(kit, 1), stream=devices.PER_THREAD_STREAM),
        lambda: comm.broadcast([full(kit, 1)], stream=devices.PER_THREAD_STREAM),
    ):
        with pytest.raises(ArgumentError, match="per-thread default stream cannot be used"):
            call()
    work = comm.all_reduce(full(kit, 2), stream=devices.PER_THREAD_STREAM, async_op=True)
    return kit.read(work.wait())[0]


@EVERYWHERE
def test_the_per_thread_default_stream_is_refused(gpus):
    """The library launches in another thread, whose stream it would be."""
    size = gpus.world(2)
    assert gpus.call(2, on_the_per_thread_stream) == [2.0 * size] * size


def use_another_gpus_stream(rank):
    with rank.init() as comm:
        kit = rank.kit
        comm.all_reduce(full(kit, 1))
        with kit.cupy.cuda.Device(5):
            stream = kit.stream()
            elsewhere = full(kit, 1)
        for async_op in (False, True):
            with pytest.raises(ArgumentError, match=r"another GPU; this .* is cuda:\d\. Give"):
                comm.all_reduce(full(kit, 1), stream=stream, async_op=async_op)
        with pytest.raises(
            ArgumentError, match=r"lies on cuda:5, but .* is cuda:\d: one .* make a"
        ):
            comm.all_reduce(elsewhere)
        with pytest.raises(ArgumentError, match=r"lie on different devices"):
            comm.all_reduce([full(kit, 1), elsewhere])
        return kit.read(comm.all_reduce(full(kit, 1)))[0]


def test_streams_and_arrays_of_another_gpu(gpus):
    assert gpus.call_ranks(2, use_another_gpus_stream) == [2.0] * 2


class Foreign:
    """An array that only says where it lies, as Numba's do: without a pool."""

    def __init__(self, address, count):
        self.address, self.count = address, count

    @property
    def __cuda_array_interface__(self):
        data = {"data": (self.address, False), "version": 3}
        return {"shape": (self.count,), "typestr": "<f4", **data}


class Rocm(Foreign):
    """One that says that it lies on an AMD GPU."""

    def __dlpack_device__(self):
        return 10, 0


def use_another_vendors_array(rank):
    with rank.init() as comm:
        x = full(rank.kit, 2)
        for _ in range(2):
            comm.all_reduce(x)
            with pytest.raises(
                BackendUnavailableError, match=r"x lies on rocm:0, .* is nccl, .* h"
            ):
                comm.all_reduce(Rocm(x.data.ptr, 1000), out=Rocm(x.data.ptr, 1000))
        return rank.kit.read(comm.all_reduce(x))[0]


def test_arrays_of_another_vendor(gpus):
    assert gpus.call_ranks(2, use_another_vendors_array) == [4.0] * 2


def use_foreign_arrays(rank):
    with rank.init() as comm, devices.open_device("cuda", rank.rank):
        x, out = full(rank.kit, 2), full(rank.kit, 0)
        comm.all_reduce(Foreign(x.data.ptr, 1000), out=Foreign(out.data.ptr, 1000))
        device = issuer_of(comm).device
        freed = device.allocate(4000)
        device.free(freed)
        with pytest.raises(ArgumentError, match="is not memory of a GPU of this process: was the"):
            comm.all_reduce(Foreign(freed, 1000), out=Foreign(out.data.ptr, 1000))
        with pytest.raises(ArgumentError, match="has no memory: was it freed"):
            comm.all_reduce(Foreign(0, 1000), out=Foreign(out.data.ptr, 1000))
        with pytest.raises(ArgumentError, match="give out="):
            comm.all_reduce(Foreign(x.data.ptr, 1000))
        return rank.kit.read(out)[0]


def test_foreign_and_freed_arrays(gpus):
    assert gpus.call_ranks(2, use_foreign_arrays) == [4.0] * 2


# --- graphs ---------------------------------------------------------------------------------------


def capture(rank):
    with rank.init() as comm:
        kit = rank.kit
        x, out, gathered, beside = (full(kit, v) for v in (1, 0, 0, 0))
        gathered = full(kit, 0, 1000 * comm.world_size)
        comm.all_reduce(x, out=out)
        comm.check()
        stream = kit.stream()
        comm.all_reduce(x, out=out, async_op=True).wait()  # makes the own stream
        comm.check()
        with stream, rank.captured(stream) as graph:
            comm.all_reduce(x, out=out)
            comm.all_gather(out, out=gathered)
            with comm.group():
                comm.broadcast(out, out=out)
            comm.all_reduce(x, "max", out=beside, async_op=True).wait()
            for refused in (
                lambda: comm.all_reduce(x),
                lambda: comm.all_reduce([x]),
                lambda: comm.all_reduce(x, async_op=True),
            ):
                with pytest.raises(ArgumentError, match="captured graph"):
                    refused()
        assert graph.code == 0
        kit.write(out, np.zeros(1000, np.float32))
        results = []
        for value in (3, 4):
            kit.write(x, np.full(1000, value, np.float32))
            graph.launch(stream)
            stream.synchronize()
            results.append([kit.read(array)[-1] for array in (out, gathered, beside)])
        graph.close()
        comm.check()
        results.append(kit.read(comm.all_reduce(x))[0])
        return results


@REPLAYED
def test_a_captured_graph_can_be_replayed(gpus):
    size = gpus.world(2)
    expected = [[3.0 * size, 3.0 * size, 3.0], [4.0 * size, 4.0 * size, 4.0], 4.0 * size]
    assert gpus.call_ranks(2, capture) == [expected] * size


def capture_what_is_put_together(rank):
    """Captured calls have scratch memory of their own; others use theirs in between."""
    with rank.init() as comm:
        kit, size = rank.kit, comm.world_size
        memory = {name: kit.bytes_of(np.zeros(2000, np.uint8)) for name in ("x", "out", "largest")}
        x, out, largest = (kit.seen_as(each, (1000,), "int16") for each in memory.values())
        y, scanned = full(kit, 1), full(kit, 0)
        plan = comm.plan_all_reduce(x, "max", out=largest)
        comm.all_reduce(x, out=out)
        comm.check()
        stream = kit.stream()
        with stream, rank.captured(stream) as graph:
            comm.all_reduce(x, out=out)
            comm.scan(y, out=scanned)
            plan()
            plan()
        assert graph.code == 0
        results = []
        for value in (3, 4):
            kit.write(x, np.full(1000, value + comm.rank, np.int16))
            kit.write(y, np.full(1000, value, np.float32))
            graph.launch(stream)
            with stream:
                between = comm.reduce_scatter(kit.seen_as(x, (1000 // size, size), "int16"))
            stream.synchronize()
            found = [kit.read(each)[-1] for each in (out, largest, scanned)]
            results.append([*map(int, found), int(kit.read(between).reshape(-1)[0])])
        graph.close()
        comm.check()
        return results


@REPLAYED
def test_calls_that_are_put_together_can_be_captured(gpus):
    size = gpus.world(2)
    for rank, got in enumerate(gpus.call_ranks(2, capture_what_is_put_together)):
        for value, found in zip((3, 4), got, strict=True):
            total = value * size + size * (size - 1) // 2
            assert found == [total, value + size - 1, value * (rank + 1), total]


def look_while_capturing(rank):
    """Who captures asks how an earlier call is going: that concerns no graph."""
    with rank.init() as comm:
        x, y = (full(rank.kit, 1) for _ in range(2))
        for async_op in (False, True):  # a GPU may be waited for as a whole at the first call
            comm.all_reduce(x, out=x, async_op=async_op)
        comm.check()
        stream = rank.kit.stream()
        with rank.held():
            work = comm.all_reduce(x, out=x, async_op=True)
            with stream, rank.captured(stream) as graph:
                comm.all_reduce(y, out=y)
                assert not work.done()
        code = graph.code
        graph.launch(stream)
        stream.synchronize()
        graph.close()
        comm.check()
        return code, rank.kit.read(y)[0]


@REPLAYED
def test_looking_does_not_disturb_a_capture(gpus):
    size = gpus.world(2)
    assert gpus.call_ranks(2, look_while_capturing) == [(0, float(size))] * size
