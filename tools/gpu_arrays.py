"""Check the arrays of all libraries, and all kinds of memory, through the direct backend.

::

    gpucoll-run -n 2 tools/gpu_arrays.py --kinds numba jax --output arrays.json

tools/gpu_check.py runs this with two ranks on one GPU. It tests Numba's and JAX's arrays, which
have no pool or no streams. It also tests memory that cuMemAlloc has not allocated and that other
processes cannot open: PyTorch's expandable segments, CuPy's asynchronous pool, NCCL's own memory.
The arrays are used as input, as output and in place. ``--kinds host-device`` needs no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gpu_rows import Row, Step, run_on_ranks

import gpucoll
from gpucoll import config

CALL_S = 30.0
COUNT = 1_000_003
"""Four MB, and not a multiple of anything."""
Make = Callable[[Any], Any]
"""Copies a NumPy array to the GPU."""
Read = Callable[[Any], Any]


def numba() -> tuple[Make, Read]:
    """Return the functions that make and read Numba's arrays."""
    cuda = importlib.import_module("numba.cuda")
    cuda.select_device(0)
    return cuda.to_device, lambda x: x.copy_to_host()


def jax() -> tuple[Make, Read]:
    """Return the functions that make and read JAX's arrays, which cannot be written."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    module = importlib.import_module("jax.numpy")
    return module.asarray, np.asarray


def expandable() -> tuple[Make, Read]:
    """Return the same functions for PyTorch's tensors in expandable segments of virtual memory."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        os.environ[name] = "expandable_segments:True"
    torch = importlib.import_module("torch")
    return lambda x: torch.from_numpy(x).to("cuda:0"), lambda x: x.cpu().numpy()


def asynchronous() -> tuple[Make, Read]:
    """Return the same functions for CuPy's arrays from the driver's own pool."""
    cupy = importlib.import_module("cupy")
    cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    return cupy.asarray, lambda x: x.get()


def of_nccl() -> tuple[Make, Read]:
    """Return the same functions for CuPy's arrays over memory of ncclMemAlloc."""
    cupy = importlib.import_module("cupy")
    alone = gpucoll.init(rank=0, world_size=1, backend="nccl", device=0)
    kept.append(alone)

    def make(x: Any) -> Any:
        made = alone.empty(x.shape, x.dtype.name, like=cupy.empty(1, x.dtype))
        made.set(x)
        return made

    return make, lambda x: x.get()


def host_device() -> tuple[Make, Read]:
    """Return the same functions for arrays on Host devices, for machines without a GPU."""
    os.environ.update({config.DEVICE: "host", config.CPU_ONLY: "0"})
    arrays = importlib.import_module("gpucoll.testing.device_arrays")
    arrays.use(0)
    return arrays.asarray, lambda x: x.get()


kept: list[Any] = []
"""Communicators whose memory is in use."""
KINDS: dict[str, Callable[[], tuple[Make, Read]]] = {
    "numba": numba,
    "jax": jax,
    "torch-expandable": expandable,
    "cupy-async": asynchronous,
    "nccl-memory": of_nccl,
    "host-device": host_device,
}


def values(rank: int, count: int = COUNT) -> Any:
    """Return a rank's numbers, whose sums are exact."""
    return (np.arange(count) % 1000 + rank).astype(np.float32)


def total(size: int, count: int = COUNT) -> Any:
    """Return the sum over all ranks."""
    return np.sum([values(rank, count) for rank in range(size)], axis=0, dtype=np.float32)


def same(found: Any, expected: Any, what: str) -> None:
    """Raise AssertionError unless two arrays have the same bits."""
    different = int(np.count_nonzero(np.asarray(found) != expected))
    if different:
        raise AssertionError(f"{what}: {different} of {expected.size} elements are wrong")


def reads(comm: Any, make: Make, read: Read) -> Row:
    """Reduce into new arrays: several times at once, and again later."""
    expected = total(comm.world_size)
    for way in ("a first call", "the same again"):
        x = make(values(comm.rank))
        same(read(comm.all_reduce(x)), expected, way)
        same(read(comm.all_reduce(x, async_op=True).wait()), expected, f"{way}, asynchronous")
    comm.check()
    return {"detail": comm.describe().facts["GPU path through shared GPU memory"][:200]}


def writes(comm: Any, make: Make, read: Read) -> None:
    """Reduce into given arrays, and in place."""
    expected = total(comm.world_size)
    x, out = make(values(comm.rank)), make(np.zeros(COUNT, np.float32))
    for way in ("out", "out again"):
        comm.all_reduce(x, out=out)
        same(read(out), expected, way)
    comm.all_reduce(x, out=x)
    same(read(x), expected, "in place")
    comm.check()


def moves(comm: Any, make: Make, read: Read) -> None:
    """Gather, broadcast, and send around the ring."""
    size, x = comm.world_size, make(values(comm.rank))
    gathered = np.concatenate([values(rank) for rank in range(size)])
    same(np.asarray(read(comm.all_gather(x))).reshape(-1), gathered, "all_gather")
    same(read(comm.broadcast(x, root=size - 1)), values(size - 1), "broadcast")
    after, before = (comm.rank + 1) % size, (comm.rank - 1) % size
    same(read(comm.send_recv(x, after, before)), values(before), "send_recv")
    comm.check()


CHECKS: dict[str, Callable[[Any, Make, Read], Row | None]] = {
    "new outputs": reads,
    "given outputs": writes,
    "movements": moves,
}


def steps_of(kind: str) -> Iterator[Step]:
    """Yield the checks of a kind, on a communicator of its own."""
    comms: list[Any] = []
    how: list[tuple[Make, Read]] = []

    def begin() -> Row:
        how.append(KINDS[kind]())
        comms.append(
            gpucoll.init(backend="direct", device=0, timeout_s=CALL_S, on_async_error="raise")
        )
        return {}

    def check(function: Callable[[Any, Make, Read], Row | None]) -> Row | None:
        if kind == "jax" and function is writes:
            return {"status": "left out", "detail": "JAX's arrays are never written"}
        return function(comms[0], *how[0])

    yield f"{kind}: the library, and connecting", begin
    if comms:
        for name, function in CHECKS.items():
            yield f"{kind}: {name}", partial(check, function)
        comms[0].abort() if comms[0]._group.is_aborted else comms[0].close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Check arrays of every library through direct.")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), required=True)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    given = parser.parse_args(arguments)
    with gpucoll.init(backend="cpu", timeout_s=4 * CALL_S) as control:
        steps = (step for kind in given.kinds for step in steps_of(kind))
        failed = run_on_ranks(control, steps, given.output)
        for comm in kept:
            comm.close()
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
