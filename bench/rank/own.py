"""gpucoll itself: ordinary arrays, arrays from `Communicator.empty`, plans, the memory limit."""

from __future__ import annotations

import ctypes
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from itertools import repeat
from typing import Any

import numpy as np

from gpucoll.bench.rank.inputs import STORAGE, storage
from gpucoll.bench.rank.library import Array, Call, Loop, repeated

__all__ = ["Own"]


class Own:
    """gpucoll, in the communicator that `gpucoll.init` returns.

    Parameters
    ----------
    comm : Communicator
        Measured, and closed at the end.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.world_size: int = comm.world_size

    def versions(self) -> dict[str, str]:
        """Return the versions of gpucoll and of what its kernels come from."""
        found = {"library": f"gpucoll {gpucoll_version()}"}
        for package in ("numpy", "numba", "llvmlite"):
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                continue
        return found

    def allocate(self, placement: str, count: int, dtype: str) -> Array:
        """Return an ordinary array, or one in the memory that the ranks share."""
        if placement == "symmetric":
            return self.comm.empty(count, storage(dtype))
        return np.empty(count, storage(dtype))

    def loop(self, call: Call) -> Loop | None:
        """Return the loop around the method, the plan, or the kernel alone (the memory limit)."""
        if call.variant == "limit":
            return streaming(call)
        if call.collective == "barrier":
            return repeated(self.comm.barrier)
        source = typed(call.source, call.dtype)
        destination = source if call.in_place else typed(call.destination, call.dtype)
        redop = sys.intern(call.redop)  # the very object that a literal in a program is
        if call.variant == "plan":
            return repeated(self.comm.plan_all_reduce(source, redop, out=destination))
        if call.collective == "broadcast":
            return into(self.comm.broadcast, source, call.root, destination)
        return into(self.comm.all_reduce, source, redop, destination)

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.comm.barrier()

    def close(self) -> None:
        """Close the communicator."""
        self.comm.close()


def gpucoll_version() -> str:
    """Return the version of the gpucoll that is being measured."""
    from gpucoll.version import __version__

    return __version__


def typed(array: Array, dtype: str) -> Array:
    """Return the array under its own dtype instead of the bench's storage of it."""
    if dtype not in STORAGE:
        return array
    import ml_dtypes

    return array.view(getattr(ml_dtypes, dtype))


def into(method: Any, source: Array, second: str | int, destination: Array) -> Loop:
    """Return the loop that calls ``method(source, second, out=destination)``."""
    now = time.perf_counter

    def run(reps: int) -> float:
        started = now()
        for _ in repeat(None, reps):
            method(source, second, out=destination)
        return now() - started

    return run


PREFETCH_BYTES = 1024
"""Lines are taken for writing this far ahead: without it a copy of 64 MiB takes a fifth longer."""


def streaming(call: Call) -> Loop:
    """Return the loop that moves the bytes which no all_reduce can do without, and nothing else.

    A rank must read as many bytes as its input has and write as many as its output has: in place
    ``x = x + x``, out of place a copy; in float32 or bytes whatever the dtype, for it is the
    memory's limit.
    """
    from gpucoll.kernels.cpu.reduce import KERNEL_ARGUMENTS, reduce_kernel

    source, destination = call.source, call.destination
    narrow = np.dtype(np.float32 if source.nbytes % 4 == 0 else np.uint8)
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(KERNEL_ARGUMENTS))(
        reduce_kernel(narrow.name, "sum")
    )
    sources = np.array([source.ctypes.data] * (2 if call.in_place else 1), np.int64)
    destinations = np.array([destination.ctypes.data], np.int64)
    addresses = (destinations.ctypes.data, 1, sources.ctypes.data, len(sources))
    count = source.nbytes // narrow.itemsize

    def stream(_held: object = (destinations, sources)) -> None:
        kernel(*addresses, count, 0, PREFETCH_BYTES)

    return repeated(stream)
