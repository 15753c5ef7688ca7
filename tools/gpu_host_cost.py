"""Measure the cost of a call on GPU arrays for its caller: host time until it is enqueued.

::

    python tools/gpu_host_cost.py              # on this machine's GPU, with CuPy (and PyTorch)
    python tools/gpu_host_cost.py --double     # without a GPU: doubles of NCCL and of the driver
    gpucoll-run -n 2 tools/gpu_host_cost.py --double    # every rank prints its own
    gpucoll-run -n 2 tools/gpu_host_cost.py --backend direct    # without a vendor's library

Calls are made in batches that fit a GPU's queue; the wait for their end is not measured. Each
figure is the mean of the fastest batch in microseconds per call: once in elapsed time, and once in
the calling thread's CPU time, which a busy machine disturbs less. "raw" is the unavoidable cost:
the vendor library's function between two events, called through ctypes with prepared arguments. The
difference between a row of gpucoll's and "raw" is the cost of gpucoll itself, whether the function
belongs to a library or to a double. The direct backend uses no library and has no raw row: its
figures are those of the whole call.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_rows import write_rows

import gpucoll
from gpucoll import config, devices
from gpucoll.backends.nccl.library import IN_PROGRESS
from gpucoll.backends.nccl.prototypes import ncclDataType_t, ncclRedOp_t
from gpucoll.calls.preparation import Arguments, prepare
from gpucoll.collectives import Collective
from gpucoll.types import ReduceOp

CALLS = 100
"""Calls in a batch: fewer than may be in flight (`gpucoll.backends.gpu.issuer.MOST_IN_FLIGHT`)."""
COUNT = 256
"""Elements of float32: few, so that the work itself does not matter."""

RAW = "raw: event, ncclAllReduce, event"
PLAN = "plan_all_reduce(x, out=x)()"
CALL = "all_reduce(x, out=x)"
CUPY = "CuPy's nccl: allReduce"
TORCH = "torch.distributed's NCCL: all_reduce(x)"

Call = Callable[[], Any]
Rows = Iterator[tuple[str, Call]]


@dataclass
class Cost:
    """The cost of one call for its caller, in microseconds."""

    name: str
    wall_us: float
    cpu_us: float


def measure(name: str, call: Call, wait: Call, n_batches: int) -> Cost:
    """Make calls in batches; return the cost of one call in the fastest batch."""
    walls_s, cpus_s = [], []
    for _ in range(n_batches):
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        for _ in range(CALLS):
            call()
        cpus_s.append(time.thread_time() - begun_cpu_s)
        walls_s.append(time.perf_counter() - begun_s)
        wait()
    return Cost(name, min(walls_s) / CALLS * 1e6, min(cpus_s) / CALLS * 1e6)


def calls_of_gpucoll(comm: Any, cupy: Any) -> Rows:
    """Yield the unavoidable part, then gpucoll's ways to make an all_reduce."""
    x, y = cupy.empty(COUNT, "float32"), cupy.empty(COUNT, "float32")
    comm.all_reduce(x, out=x)
    connected = comm._gpu._connected
    if hasattr(connected.backend, "library"):
        yield RAW, _raw(connected, x.data.ptr)
    arguments = Arguments(op=ReduceOp.parse("sum"), out=x)
    made = prepare(Collective.ALL_REDUCE, x, arguments, comm.rank, comm.world_size)
    yield "posting the signature, alone", _posting(connected, made.request)
    yield PLAN, comm.plan_all_reduce(x, out=x)
    yield CALL, lambda: comm.all_reduce(x, out=x)
    yield "all_reduce(x, out=y)", lambda: comm.all_reduce(x, out=y)
    yield "the library's empty(), alone", lambda: cupy.empty((COUNT,), "float32")
    yield "all_reduce(x)", lambda: comm.all_reduce(x)
    yield "all_reduce(x, out=y, async_op=True)", lambda: comm.all_reduce(x, out=y, async_op=True)


def _posting(connected: Any, request: Any) -> Call:
    post, look = connected.signatures([request])[0].post, connected.issuer.look

    def call() -> None:
        while post():  # the ring is full because another rank has not read it yet
            look()

    return call


def _raw(connected: Any, address: int) -> Call:
    device, backend = connected.device, connected.backend
    function, handle = backend.library.functions.ncclAllReduce, backend.connection.handle
    record, before, after = device.record_event, device.create_event(), device.create_event()
    kind, operation = int(ncclDataType_t.ncclFloat32), int(ncclRedOp_t.ncclSum)
    poll = backend.library.async_error

    def call() -> None:
        started = record(before, 0)
        code = function(address, address, COUNT, kind, operation, handle, 0)
        while code == IN_PROGRESS:  # usual with several ranks
            os.sched_yield()
            code = poll(handle)
        if started | code | record(after, 0):
            raise AssertionError("the library or the driver refused it")

    return call


def calls_of_cupy(cupy: Any) -> Rows:
    """Yield the call through CuPy's own bindings."""
    nccl = importlib.import_module("cupy.cuda.nccl")
    own = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    x = cupy.empty(COUNT, "float32")
    given = x.data.ptr, x.data.ptr, COUNT, nccl.NCCL_FLOAT32, nccl.NCCL_SUM
    yield (
        "CuPy's nccl: allReduce",
        lambda: own.allReduce(*given, cupy.cuda.get_current_stream().ptr),
    )


def calls_of_torch() -> Rows:
    """Yield torch.distributed's call."""
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    x = torch.zeros(COUNT, device="cuda")
    yield TORCH, lambda: distributed.all_reduce(x)
    distributed.destroy_process_group()


def double_of_cupy(folder: Path) -> Any:
    """Return a stand-in for CuPy over doubles of NCCL and of CUDA's driver."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    doubles, cupy_double = map(
        importlib.import_module, ("tests.doubles", "tests.calls.gpu.cupy_double")
    )
    double = doubles.Builder(folder).double()
    os.environ.update({**double.variables, config.GPU_KIND: double.kind})
    double.load()
    return cupy_double.install(double.kind)


def measure_all(
    cupy: Any,
    n_batches: int,
    peers: list[Callable[[], Rows]],
    backend: str = "auto",
    output: Path | None = None,
) -> list[Cost]:
    """Measure, print and write every row; for a missing peer print the reason."""
    costs: list[Cost] = []

    def run(rows: Rows, wait: Call) -> None:
        for name, call in rows:
            call()
            wait()
            cost = measure(name, call, wait, n_batches)
            if backend == "direct":
                cost.name = f"direct, {comm.world_size} ranks: {cost.name}"
            costs.append(cost)
            if output is not None:
                write_rows([asdict(cost) for cost in costs], output)
            print(f"{name:42} {cost.wall_us:7.2f} us {cost.cpu_us:7.2f} us CPU", flush=True)

    number = cupy.cuda.runtime.getDevice()
    with gpucoll.init(backend=backend, device=number) as comm:
        device = devices.open_device("rocm" if cupy.cuda.runtime.is_hip else "cuda", number)

        def wait() -> None:
            device.synchronize()
            comm.check()

        with device:  # as after calls of an array library
            run(calls_of_gpucoll(comm, cupy), wait)
            for peer in peers if comm.world_size == 1 else ():
                try:
                    run(peer(), device.synchronize)
                except Exception as error:
                    print(f"{peer.__name__}: not measured: {type(error).__name__}: {error}")
    return costs


def summary(costs: list[Cost]) -> str:
    """Return a one-line comparison of a call with its peers, or its cost."""
    found = {cost.name: cost.wall_us for cost in costs}
    if PLAN not in found:  # the direct backend
        parts = [f"{one.wall_us:.1f} us" for one in costs if one.name.endswith((PLAN, CALL))]
        return "a plan's call and a plain one: " + ", ".join(parts)
    others = {"raw": RAW, "CuPy's nccl": CUPY, "torch.distributed": TORCH}
    parts = [
        f"{found[PLAN] - found[row]:+.1f} and {found[CALL] - found[row]:+.1f} us to {name}"
        for name, row in others.items()
        if row in found
    ]
    return "a plan's call and a plain one: " + ", ".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Measure what a call on GPU arrays costs the host."
    )
    parser.add_argument("--double", action="store_true", help="use doubles instead of a GPU")
    parser.add_argument(
        "--batches", type=int, default=50, metavar="N", help=("number of batches for each row")
    )
    parser.add_argument("--backend", choices=("auto", "direct"), default="auto")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        cupy = double_of_cupy(Path(folder)) if options.double else importlib.import_module("cupy")
        is_alone = options.double or options.backend == "direct"
        peers = [] if is_alone else [lambda: calls_of_cupy(cupy), calls_of_torch]
        n_gpus = cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(int(os.environ.get(config.LOCAL_RANK, 0)) % n_gpus).use()
        output = None if int(os.environ.get(config.RANK, 0)) else options.output
        costs = measure_all(cupy, options.batches, peers, options.backend, output)
    print(summary(costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
