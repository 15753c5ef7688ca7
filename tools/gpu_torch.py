"""Check the backend of torch.distributed on CUDA tensors: its results must follow slow work.

::

    gpucoll-run -n 2 tools/gpu_torch.py --output torch_2.json

tools/gpu_check.py runs this with one rank, and with two ranks on one GPU. Before each call the GPU
is kept busy for a while, so that code that does not wait for the call reads old values. The
gradients of DistributedDataParallel are compared with those that the CPU computes. ``--device cpu``
needs no GPU; its test uses it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gpu_rows import Row, Step, run_on_ranks

import gpucoll
from gpucoll import config

CALL_S = 30.0
LATE_CYCLES = 40_000_000
"""Cycles of the GPU's clock that delay a call: 20 ms and more."""
COUNT = 1 << 20
REFUSED = "captured graph"
"""Text of the direct backend's refusal of a captured graph."""


class Bench:
    """A rank's torch, with a process group of all ranks."""

    def __init__(self, torch: Any, device: str, rank: int, size: int) -> None:
        self.torch, self.dist = torch, importlib.import_module("torch.distributed")
        self.device, self.rank, self.size = device, rank, size

    def late(self) -> None:
        """Keep the current stream busy for a while."""
        if self.device == "cuda":
            self.torch.cuda._sleep(LATE_CYCLES)

    def full(self, value: float, count: int = COUNT) -> Any:
        """Return a tensor whose values are written late."""
        x = self.torch.zeros(count, device=self.device)
        self.late()
        return x.fill_(value)

    @property
    def total(self) -> float:
        """The sum of all ranks' numbers, which start at 1."""
        return self.size * (self.size + 1) / 2

    def stream(self) -> Any:
        """Return a context in which another stream is current, which waits for no other stream."""
        if self.device == "cuda":
            return self.torch.cuda.stream(self.torch.cuda.Stream())
        return self.torch.no_grad()


def expect(x: Any, value: float, what: str) -> None:
    """Raise AssertionError unless all elements have this value."""
    low, high = x.min().item(), x.max().item()
    if not low == high == value:
        raise AssertionError(f"{what}: {low} to {high}, where {value} is right")


# --- works and futures ----------------------------------------------------------------------------


def waits(bench: Bench) -> None:
    """Wait for works on the stream of the call, and on another stream."""
    x = bench.full(bench.rank + 1.0)
    bench.dist.all_reduce(x)
    expect(x, bench.total, "a blocking call")
    x = bench.full(bench.rank + 1.0)
    work = bench.dist.all_reduce(x, async_op=True)
    work.wait()
    expect(x * 1, bench.total, "wait()")
    x = bench.full(bench.rank + 1.0)
    work = bench.dist.all_reduce(x, async_op=True)
    with bench.stream():
        work.wait()
        expect(x * 1, bench.total, "wait() on another stream")


def futures(bench: Bench) -> None:
    """Wait through futures, which are read in callbacks and in callbacks of callbacks."""
    x = bench.full(bench.rank + 1.0)
    bench.dist.all_reduce(x, async_op=True).get_future().wait()
    expect(x * 1, bench.total, "the future's wait()")
    x = bench.full(bench.rank + 1.0)
    future = bench.dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda one: one.value()[0] * 2).then(lambda one: one.value() + 1)
    expect(doubled.wait(), 2 * bench.total + 1, "callbacks")
    with bench.stream():
        x = bench.full(bench.rank + 1.0)
        future = bench.dist.all_reduce(x, async_op=True).get_future()
        copies = future.then(lambda one: one.value()[0].clone())
    expect(copies.wait(), bench.total, "a callback, on another stream")


def filled(bench: Bench) -> None:
    """Write to tensors that are not contiguous, and wait twice."""
    x = bench.full(bench.rank + 1.0, 2 * COUNT).view(COUNT, 2)
    column = x[:, 1]
    work = bench.dist.all_reduce(column, async_op=True)
    with bench.stream():
        work.wait()
    with bench.stream():
        copies = work.get_future().then(lambda one: one.value()[0].clone())
        expect(copies.wait(), bench.total, "what was filled")
    work.wait()
    expect(x[:, 0], bench.rank + 1.0, "what lies beside it")


def movements(bench: Bench) -> None:
    """Gather, scatter and send as sharded training does."""
    dist, torch, size = bench.dist, bench.torch, bench.size
    part, whole = bench.full(bench.rank + 1.0), torch.zeros(size * COUNT, device=bench.device)
    gathered = dist.all_gather_into_tensor(whole, part, async_op=True)
    gathered.wait()
    for rank, piece in enumerate(whole.chunk(size)):
        expect(piece, rank + 1.0, "all_gather_into_tensor")
    summed = torch.zeros(COUNT, device=bench.device)
    bench.late()
    dist.reduce_scatter_tensor(summed, whole, async_op=True).wait()
    expect(summed, size * (bench.rank + 1.0), "reduce_scatter_tensor")
    after, before = (bench.rank + 1) % size, (bench.rank - 1) % size
    received = torch.zeros(COUNT, device=bench.device)
    bench.late()
    pair = [dist.P2POp(dist.isend, part, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    expect(received, before + 1.0, "batch_isend_irecv")
    dist.barrier()


def dropped(bench: Bench) -> None:
    """Drop tensors and works while calls are in progress; other tensors get their memory."""
    works = []
    for step in range(10):
        x = bench.full(step + 1.0)
        works.append(bench.dist.all_reduce(x, async_op=True).get_future())
        del x
        bench.torch.full((COUNT,), -1.0, device=bench.device)
    for step, work in enumerate(works):
        expect(work.wait()[0], (step + 1.0) * bench.size, "a dropped tensor")


# --- training -------------------------------------------------------------------------------------


def model_of(torch: Any) -> Any:
    """Return a model that is the same on every rank."""
    torch.manual_seed(7)
    layers = [torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)]
    return torch.nn.Sequential(*layers)


def batch_of(torch: Any, rank: int) -> Any:
    """Return a rank's samples."""
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))


def right_gradients(bench: Bench) -> list[Any]:
    """Return the mean of all ranks' gradients, as the CPU computes them."""
    model = model_of(bench.torch)
    for rank in range(bench.size):
        (model(batch_of(bench.torch, rank)).square().mean() / bench.size).backward()
    return [parameter.grad for parameter in model.parameters()]


def data_parallel(hook: str, bench: Bench) -> Row:
    """Train one step with DistributedDataParallel and a hook of this kind, after slow work."""
    torch, dist = bench.torch, bench.dist
    parallel = importlib.import_module("torch.nn.parallel").DistributedDataParallel
    model = parallel(model_of(torch).to(bench.device), bucket_cap_mb=0.05)

    def late(gradient: Any) -> Any:
        bench.late()
        return gradient

    def averaged(state: object, bucket: Any) -> Any:
        bench.late()
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda one: one.value()[0] / bench.size)

    averaged.__annotations__.clear()  # PyTorch accepts only its own annotations
    for parameter in model.parameters():
        parameter.register_hook(late)
    if hook == "own":
        model.register_comm_hook(None, averaged)
    elif hook == "half":
        hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
        model.register_comm_hook(None, hooks.fp16_compress_hook)
    for _ in range(2):  # buckets are made anew after the first step
        model.zero_grad()
        model(batch_of(torch, bench.rank).to(bench.device)).square().mean().backward()
    found = [parameter.grad.cpu() for parameter in model.parameters()]
    right = right_gradients(bench)
    worst = max(float((x - y).abs().max()) for x, y in zip(found, right, strict=True))
    largest = max(float(y.abs().max()) for y in right)
    # Sums of 64, 256, 64 and 32 terms and of the ranks, one after the other, in another order: 420
    # roundings of 2**-24, of numbers up to five times as large as the largest gradient. In float16
    # each rank's gradient and their sum are rounded to 11 bits; twice that for both.
    allowed = largest * (2.0**-9 if hook == "half" else 2.0**-13)
    if not worst <= allowed:
        raise AssertionError(f"gradients differ by {worst:g}, where {allowed:g} is allowed")
    return {"worst": worst, "allowed": allowed}


def graph(bench: Bench) -> Row:
    """Capture a call and replay it; the direct backend must refuse it with its error."""
    torch = bench.torch
    if bench.device != "cuda":
        return {"status": "left out", "detail": "there are no graphs"}
    x = torch.ones(COUNT, device="cuda")
    bench.dist.all_reduce(x)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(captured):
            bench.dist.all_reduce(x)
    except Exception as error:
        if REFUSED not in str(error):
            raise
        return {"detail": f"refused: {str(error)[:200]}"}
    for value in (2.0, 3.0):
        x.fill_(value)
        captured.replay()
        expect(x, value * bench.size, "a replay")
    captured.reset()
    return {}


CHECKS: dict[str, Callable[[Bench], Row | None]] = {
    "works": waits,
    "futures": futures,
    "tensors that are filled": filled,
    "movements": movements,
    "dropped tensors": dropped,
    "DistributedDataParallel": partial(data_parallel, ""),
    "DistributedDataParallel, a hook of one's own": partial(data_parallel, "own"),
    "DistributedDataParallel, fp16_compress_hook": partial(data_parallel, "half"),
    "a captured graph": graph,
}


def in_group(check: Callable[[Bench], Row | None], bench: Bench, store: str) -> Row | None:
    """Run a check in its own process group."""
    bench.dist.init_process_group(
        "gpucoll",
        init_method=f"file://{store}",
        rank=bench.rank,
        world_size=bench.size,
        timeout=datetime.timedelta(seconds=CALL_S),
    )
    try:
        return check(bench)
    finally:
        bench.dist.destroy_process_group()


def run(output: Path, device: str, wanted: str = "") -> int:
    """Run all checks with a word in their name; return how many failed. All ranks call this."""
    with gpucoll.init(backend="cpu", timeout_s=4 * CALL_S) as control:
        launched = (config.RANK, config.WORLD_SIZE, config.JOB, config.MEET)
        for name in launched:  # process groups meet through torch's stores
            os.environ.pop(name, None)
        torch = importlib.import_module("torch")
        if device == "cuda":
            torch.cuda.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = False
        importlib.import_module("gpucoll.integrations.torch")
        bench = Bench(torch, device, control.rank, control.world_size)
        folder = control.broadcast_object(str(output.parent.resolve()))

        def steps() -> Iterator[Step]:
            for number, (name, check) in enumerate(CHECKS.items()):
                if wanted in name:
                    store = f"{folder}/store_{os.getppid()}_{number}"
                    store = control.broadcast_object(store)
                    yield name, partial(in_group, check, bench, store)
                    Path(store).unlink(missing_ok=True)

        return run_on_ranks(control, steps(), output)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Check torch.distributed's backend on a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", default="", metavar="WORD", help=("only checks whose name contains WORD")
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    given = parser.parse_args(arguments)
    failed = run(given.output, given.device, given.only)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
