"""Works and futures of torch.distributed's backend, of tensors on a GPU: what waits for what."""

from __future__ import annotations

import importlib
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from tests.calls.gpu.torch_double import Torch
from tests.waiting import SOON_S

CALL_US, COPY_US = 100_000, 20_000
"""How long the library takes for a call here, and the driver for a copy where it is slow: who does
not wait for them reads what was there before."""


@pytest.fixture
def gpus(gpus):
    """The double's, without PyTorch for CUDA beside it: each would take the other's libnccl."""
    if pytest.importorskip("torch", reason="PyTorch is not installed").version.cuda:
        pytest.skip("PyTorch for CUDA and the double would take each other's libnccl for their own")
    return gpus


class Bench:
    """A communicator, and arrays that PyTorch and the double's library both see."""

    def __init__(self, rank: Any, comm: Any) -> None:
        self.comm, self._kit = comm, rank.kit
        self._torch: Any = importlib.import_module("torch")
        self._work: Any = importlib.import_module("gpucoll.integrations.torch.works").Work

    def full(self, value: float) -> Any:
        values = np.full(1000, value, np.float32)
        return self._kit.seen_as(self._kit.bytes_of(values.view(np.uint8)), (1000,), "float32")

    def tensor(self, x: Any) -> Any:
        return self._torch.from_numpy(x.host)

    def copied(self, x: Any) -> Any:
        """Return a copy that the current stream makes."""
        copy = self.full(-1)
        self._kit.copy(copy, x)
        return copy

    def reduce(self, value: float, out: Any, is_filled: bool = False) -> Any:
        """Start a call, and return torch's work of it; one that fills `out` copies five times."""
        written = self.full(0) if is_filled else out

        def fill() -> None:
            for _ in range(5):
                self._kit.copy(out, written)

        started = self.comm.all_reduce(self.full(value), out=written, async_op=True)
        return self._work((started,), [self.tensor(out)], fill if is_filled else None)

    def read(self, x: Any) -> float:
        return float(self._kit.read(x)[-1])

    def stream(self) -> Any:
        return self._kit.stream()


@contextmanager
def bench_of(rank):
    torch = importlib.import_module("torch")
    with pytest.MonkeyPatch.context() as patch, rank.init() as comm:
        Torch(rank.control.double.kind, rank.rank).install(patch, torch)
        bench = Bench(rank, comm)
        comm.all_reduce(bench.full(0))  # connects
        comm.check()
        with rank.control.library_set(delay_us=CALL_US):
            yield bench


def read_by_futures(rank):
    with bench_of(rank) as bench:
        outs, found = [bench.full(0) for _ in range(3)], []

        def callback(future):
            (tensor,) = future.value()
            assert tensor.data_ptr() == outs[1].data.ptr
            found.append(bench.copied(outs[1]))
            return bench.tensor(found[-1])

        def callback_of_callback(future):
            found.append(bench.copied(found[1]))
            return bench.tensor(found[-1])

        bench.reduce(1, outs[0]).get_future().wait()
        found.append(bench.copied(outs[0]))
        bench.reduce(2, outs[1]).get_future().then(callback).then(callback_of_callback).wait()
        found.append(bench.copied(found[2]))
        with bench.stream():
            bench.reduce(3, outs[2]).get_future().then(lambda future: future.value()).wait()
            found.append(bench.copied(outs[2]))
            bench.read(found[-1])
        return [bench.read(x) for x in found]


def test_callbacks_and_waits_come_after_the_call(gpus):
    assert gpus.call_ranks(2, read_by_futures) == [[2.0, 4.0, 4.0, 4.0, 6.0]] * 2


def read_what_was_filled(rank, by_future):
    with bench_of(rank) as bench:
        out, found = bench.full(0), []
        work = bench.reduce(1, out, is_filled=True)
        rank.control.driver_set("delay_us", COPY_US)
        with bench.stream():
            work.wait()
        with bench.stream():
            if by_future:
                work.get_future().then(lambda _: found.append(bench.copied(out)))
            else:
                work.wait()
                found.append(bench.copied(out))
        rank.kit.cupy.cuda.runtime.deviceSynchronize()
        rank.control.driver_set("delay_us", 0)
        return bench.read(found[0])


@pytest.mark.parametrize("by_future", [False, True])
def test_a_second_wait_comes_after_what_the_first_one_filled(gpus, by_future):
    assert gpus.call_ranks(2, read_what_was_filled, by_future) == [2.0, 2.0]


def meet_with_a_stream_that_stands_still(rank):
    dist, c10d = (importlib.import_module(f"torch.{name}") for name in ("distributed", "_C"))
    made = importlib.import_module("gpucoll.integrations.torch.process_group").ProcessGroup
    options = importlib.import_module("gpucoll.integrations.torch.options").Options()
    with bench_of(rank) as bench:
        group = made(bench.comm, None, options)
        given = c10d._distributed_c10d.BarrierOptions()
        given.device = importlib.import_module("torch").device("cuda", 0)
        for _ in range(2):
            group.barrier(given).wait()
        given.timeout = timedelta(seconds=0.3 if rank.rank else 20)
        begun_s = time.monotonic()
        with rank.control.held() if rank.rank else nullcontext():
            bench.copied(bench.full(0))
            try:
                group.barrier(given).wait()
            except dist.DistBackendError as error:
                return type(error).__name__, str(error), time.monotonic() - begun_s
    return None


def test_a_barrier_gives_up_a_stream_that_stands_still(gpus):
    other, late = gpus.call_ranks(2, meet_with_a_stream_that_stands_still)

    assert late[0] == "DeadlineError"
    assert "rank 1 of 2 waited 0.3 s in barrier for what is on its current stream" in late[1]
    assert other[0] == "AbortedError", other
    assert other[2] < SOON_S
