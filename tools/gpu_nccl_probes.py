"""Probe NCCL itself: messages to oneself, non-blocking communicators, torch in the same process.

::

    python tools/gpu_nccl_probes.py --output nccl.json
    gpucoll-run -n 2 tools/gpu_nccl_probes.py --output nccl_2.json    # NCCL 2.30, one GPU

A collective of one rank takes a shorter path than others, but a group of a send and a receive to
oneself takes the usual one. With two ranks on one GPU (NCCL 2.30 and newer,
NCCL_MULTI_RANK_GPU_ENABLE=1) the figures are those of an ordinary communicator. The figures of
"blocking 0" (a call, then polling until it is enqueued) include what gpucoll does between two calls
(docs/decisions/0027).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gpu_rows import Row, Step, run_on_ranks

import gpucoll
from gpucoll.backends.discovery import look_for_gpus
from gpucoll.backends.nccl.library import IN_PROGRESS, Library, load
from gpucoll.backends.nccl.prototypes import (
    configuration,
    ncclDataType_t,
    ncclRedOp_t,
    ncclUniqueId,
)
from gpucoll.devices import open_device
from gpucoll.errors import BackendUnavailableError

LIMIT_S = 60.0
SIZES_BYTES = (4, 4096, 1 << 20, 64 << 20)
CALLS = 50
BATCHES = 20
FLOAT32, SUM = int(ncclDataType_t.ncclFloat32), int(ncclRedOp_t.ncclSum)


class Raw:
    """A communicator of NCCL's own without gpucoll's machinery, and memory on GPU 0."""

    def __init__(self, library: Library, device: Any, control: Any, is_blocking: bool) -> None:
        self._library, self.device, self._is_blocking = library, device, is_blocking
        self.rank, self.size = control.rank, control.world_size
        made = library.unique_id() if self.rank == 0 else b""
        unique = ncclUniqueId.from_buffer_copy(control.broadcast_object(made))
        handle = ctypes.c_void_p()
        settings = ctypes.byref(configuration(is_blocking=is_blocking))
        join = library.functions.ncclCommInitRankConfig
        code = join(ctypes.byref(handle), self.size, unique, self.rank, settings)
        self.handle = handle.value or 0
        self.settle(code, "ncclCommInitRankConfig")
        self.stream = device.create_stream()
        self._x, self._y = (device.allocate(4096) for _ in range(2))

    def settle(self, code: int, what: str) -> None:
        """Poll until a call is enqueued, as gpucoll does; raise its error."""
        due_s = time.monotonic() + LIMIT_S
        while code == IN_PROGRESS:
            os.sched_yield()
            code = self._library.async_error(self.handle)
            if time.monotonic() > due_s:
                raise AssertionError(f"{what} is in progress for {LIMIT_S:g} s")
        if code:
            raise self._library.error(code, what, self.handle)

    def all_reduce(self) -> None:
        """Enqueue an all_reduce of 1024 floats."""
        given = self._x, self._y, 1024, FLOAT32, SUM, self.handle, self.stream
        self.settle(self._library.functions.ncclAllReduce(*given), "ncclAllReduce")

    def pass_on(self) -> None:
        """Enqueue a send to the next rank and a receive from the previous one, as one group."""
        functions, here = self._library.functions, (self.handle, self.stream)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        codes = [
            functions.ncclGroupStart(),
            functions.ncclSend(self._x, 1024, FLOAT32, after, *here),
            functions.ncclRecv(self._y, 1024, FLOAT32, before, *here),
            functions.ncclGroupEnd(),
        ]
        self.settle(next((code for code in codes if code), 0), "a group")

    def close(self) -> None:
        """Wait for enqueued work, and release everything."""
        functions = self._library.functions
        self.settle(functions.ncclCommFinalize(self.handle), "ncclCommFinalize")
        functions.ncclCommDestroy(self.handle)
        self.device.destroy_stream(self.stream)
        for address in (self._x, self._y):
            self.device.free(address)


def microseconds(call: Callable[[], None], wait: Callable[[], None]) -> list[float]:
    """Return the cost of a call for its caller in each batch after the first, in microseconds."""
    found = []
    for _ in range(BATCHES + 1):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
        wait()
    return found[1:]


def cost(library: Library, device: Any, control: Any, is_blocking: bool) -> Row:
    """Return the cost of calls on a raw communicator for their caller."""
    raw = Raw(library, device, control, is_blocking)
    wait = partial(device.synchronize_stream, raw.stream)
    row: Row = {}
    for name, call in (("all_reduce", raw.all_reduce), ("send_recv", raw.pass_on)):
        call()
        wait()
        control.barrier()
        found = microseconds(call, wait)
        row |= {f"{name}_us": statistics.median(found), f"{name}_all_us": found}
    raw.close()
    told = f"all_reduce {row['all_reduce_us']:.1f} us, a group {row['send_recv_us']:.1f} us"
    return {**row, "detail": told}


def passes_on(comm: Any, cupy: Any, size_bytes: int) -> Row:
    """Send to the next rank through gpucoll; a single rank sends to itself."""
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    x = cupy.asarray(_numbers(comm.rank, size_bytes))
    out = cupy.asarray(_numbers(-1, size_bytes))
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        comm.send_recv(x, after, before, out=out)
        comm.check()
        times.append(time.perf_counter() - begin)
    if bytes(out.get()) != bytes(_numbers(before, size_bytes)):
        raise AssertionError("other bytes have come than were sent")
    return {"size_bytes": size_bytes, "time_s": statistics.median(times), "times": times}


def _numbers(rank: int, size_bytes: int) -> Any:
    numpy = importlib.import_module("numpy")
    return ((numpy.arange(size_bytes) + rank) % 251).astype(numpy.uint8)


def beside_torch(cupy: Any) -> Row:
    """Use communicators made before and after torch's own NCCL group, in turns."""
    torch, dist = (importlib.import_module(name) for name in ("torch", "torch.distributed"))
    numpy = importlib.import_module("numpy")
    x = cupy.asarray(numpy.full(1000, 3, numpy.float32))

    def reduced(comm: Any) -> None:
        found = comm.all_reduce(x)
        comm.check()
        if not (found.get() == 3).all():
            raise AssertionError("a sum of one rank is not its input")

    def alone() -> Any:
        return gpucoll.init(rank=0, world_size=1, backend="nccl", device=0)

    before = alone()
    reduced(before)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    y = torch.full((1000,), 5.0, device="cuda")
    after = alone()
    for _ in range(3):
        for comm in (before, after):
            reduced(comm)
        dist.all_reduce(y)
        if not (y == 5).all().item():
            raise AssertionError("torch's own sum is wrong")
    copies = load("nccl").others
    dist.destroy_process_group()
    for comm in (before, after):
        reduced(comm)
        comm.close()
    return {"detail": f"other copies of NCCL in the process: {', '.join(copies) or 'none'}"}


def steps_of(control: Any, has_torch: bool) -> Iterator[Step]:
    """Yield all probes."""
    library, device = load("nccl"), open_device("cuda", 0)
    cupy = importlib.import_module("cupy")
    cupy.cuda.Device(0).use()
    yield "the library", lambda: {"detail": str(library), "version": list(library.version)}
    for is_blocking in (True, False):
        name = f"a call with blocking {int(is_blocking)}"
        yield name, partial(cost, library, device, control, is_blocking)
    comm = gpucoll.init(backend="nccl", device=0, timeout_s=LIMIT_S, on_async_error="raise")
    for size_bytes in SIZES_BYTES:
        yield f"send_recv of {size_bytes} bytes", partial(passes_on, comm, cupy, size_bytes)
    comm.close()
    if control.world_size == 1 and has_torch:
        yield "before and after torch's own group", partial(beside_torch, cupy)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Probe NCCL itself.")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--without-torch", action="store_true")
    given = parser.parse_args(arguments)
    if look_for_gpus().kind != "cuda":
        print("no NVIDIA GPU is seen here")
        return 2
    with gpucoll.init(backend="cpu", timeout_s=2 * LIMIT_S) as control, open_device("cuda", 0):
        steps = steps_of(control, not given.without_torch)
        failed = run_on_ranks(control, steps, given.output, (BackendUnavailableError,))
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # what NCCL has left ends with the process, whatever hangs there
