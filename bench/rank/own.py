"""gpucoll itself: ordinary arrays, those of `Communicator.empty`, plans, the memory limit."""

from __future__ import annotations

import ctypes
import importlib
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from gpucoll.bench.rank.arrays import Arrays, HostArrays, open_arrays
from gpucoll.bench.rank.device_copy import Copies
from gpucoll.bench.rank.inputs import is_pattern
from gpucoll.bench.rank.library import Array, Call, Loop
from gpucoll.bench.rank.loops import idle, ping_pong, repeated, stream
from gpucoll.bench.rank.own_patterns import pattern

__all__ = ["Own", "joined"]

OUT_OF_PLACE = ("send_recv", "ping_pong", "stream")


class Own:
    """gpucoll, in the communicator that `gpucoll.init` returns.

    Parameters
    ----------
    comm : Communicator
        The measured communicator, which is closed at the end.
    arrays : Arrays
        The kind of arrays that it is measured with.
    """

    def __init__(self, comm: Any, arrays: Arrays | None = None) -> None:
        self.comm = comm
        self.arrays = arrays or HostArrays()
        self.wait = self.arrays.wait if self.arrays.on_gpu else None
        self.copies = Copies()
        self.rank: int = comm.rank
        self.world_size: int = comm.world_size
        self.reduce_scatter_block = self.rank

    def versions(self) -> dict[str, str]:
        """Return the versions of gpucoll and of the libraries below it."""
        found = {"library": f"gpucoll {gpucoll_version()}"}
        if self.arrays.on_gpu:
            facts = self.comm.describe().facts  # the direct backend uses no library
            library = facts.get("GPU library") or facts["GPU arrays"].partition(":")[0]
            over = library.partition(" (")[0]
            return {"library": f"{found['library']} over {over}", **self.arrays.versions()}
        for package in ("numpy", "numba", "llvmlite"):
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                continue
        return found

    def allocate(self, placement: str, count: int, dtype: str) -> Array:
        """Return an ordinary array, or one in memory that the ranks share."""
        if placement != "symmetric":
            return self.arrays.allocate(count, dtype)
        if self.arrays.on_gpu:
            like = self.arrays.allocate(1, dtype)
            return self.comm.empty(count, self.arrays.kept_as(dtype), like=like, symmetric=True)
        return self.comm.empty(count, self.arrays.kept_as(dtype))

    def loop(self, call: Call) -> Loop | None:
        """Return the loop around the method, the plan, or (as memory limit) the kernel alone."""
        if call.in_place and call.collective in OUT_OF_PLACE:
            return None
        if call.variant == "limit":
            return streaming(call)
        if call.variant == "copy":
            return self.copies.loop(call, self.arrays) if self.rank == 0 else idle
        if call.collective == "barrier":
            return repeated(partial(self.comm.barrier))
        if call.source is not None:
            call = self.typed(call)
        if is_pattern(call.collective):
            return pattern(self.comm, call, self.method)
        if self.arrays.on_gpu and not self.is_served(call):
            return None
        if call.collective in ("ping_pong", "stream"):
            return self.messages(call)
        if call.variant == "plan":
            return repeated(partial(self.method(call, "plan_")()), wait=self.wait)
        calls = [self.method(piece) for piece in call.pieces()]
        if call.variant == "fused":
            arrays, outs = [one.args[0] for one in calls], [one.keywords["out"] for one in calls]
            fused = partial(calls[0].func, arrays, *calls[0].args[1:], out=outs)
            return repeated(fused, wait=self.wait)
        return repeated(*calls, wait=self.wait)

    def typed(self, call: Call) -> Call:
        """Return the call with arrays of its own dtype, or with tensors over their memory."""

        def typed(array: Array) -> Array:
            if call.variant == "torch":
                return tensor(array, call.dtype)
            return self.arrays.typed(array, call.dtype)

        source = typed(call.source)
        same = call.source is call.destination
        return replace(call, source=source, destination=source if same else typed(call.destination))

    def is_served(self, call: Call) -> bool:
        """Return whether the GPU vendor's library supports this reduction and dtype."""
        from gpucoll.errors import ArgumentTypeError

        if call.redop == "none":
            return True
        try:
            self.method(call, "plan_")()
        except ArgumentTypeError:
            return False
        return True

    def method(self, call: Call, prefix: str = "") -> partial[Any]:
        """Return the communicator's method for a collective or its plan, with its arguments.

        Off the root of a rooted call, arguments that are not needed there are omitted.
        """
        x, out = call.source, call.destination
        redop = sys.intern(call.redop)  # the same object as a literal in a program
        root, at_root = call.root, call.root == self.rank
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        calls: dict[str, tuple[Any, ...]] = {
            "all_reduce": (out, x, redop),
            "reduce": (out if at_root else None, x, redop, root),
            "broadcast": (out, x, root),
            "all_gather": (out, x),
            "gather": (out if at_root else None, x, root),
            "reduce_scatter": (out, x, redop),
            "scatter": (out, x if at_root else None, root),
            "all_to_all": (out, x),
            "scan": (out, x, redop),
            "exclusive_scan": (out, x, redop),
            "send_recv": (out, x, after, before),
        }
        out, *positional = calls[call.collective]
        return partial(getattr(self.comm, prefix + call.collective), *positional, out=out)

    def messages(self, call: Call) -> Loop:
        """Return the loop of messages from rank 0 to rank 1."""
        ends = (self.rank, self.comm.send, self.comm.recv, call.source, call.destination)
        if call.collective == "ping_pong":
            return ping_pong(*ends, self.wait)
        return stream(*ends, call.destination[:1], self.wait)

    def path(self) -> str:
        """Return the path of the last call, which `describe` reports for ranks of one host."""
        if self.arrays.on_gpu or not hasattr(self.comm, "describe"):
            return ""
        return str(self.comm.describe().facts.get("last call on this rank", ""))

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.comm.barrier()

    def close(self) -> None:
        """Close the communicator."""
        self.comm.close()


def joined(library: str, local_rank: int, timeout_s: float, backend: str = "auto") -> Own:
    """Join the other ranks, to be measured with a library's arrays (on this rank's GPU)."""
    import gpucoll

    arrays = open_arrays(library, local_rank)
    return Own(gpucoll.init(timeout_s=timeout_s, device=arrays.number, backend=backend), arrays)


def tensor(array: Array, dtype: str) -> Array:
    """Return a PyTorch tensor over an array's memory."""
    torch = importlib.import_module("torch")
    return torch.from_numpy(array.view(np.uint8)).view(getattr(torch, dtype))


def gpucoll_version() -> str:
    """Return the version of the gpucoll that is measured."""
    from gpucoll.version import __version__

    return __version__


PREFETCH_BYTES = 1024
"""Cache lines are prefetched for writing this far ahead; otherwise a copy of 64 MiB takes a fifth
longer."""


def streaming(call: Call) -> Loop:
    """Return a loop that moves only the bytes which every such call must move.

    A rank must read its whole input and write its whole output. In place this is ``x = x + x``, out
    of place a copy, always as float32 or bytes, because it measures the memory's limit. The limit
    applies only if both sizes are the same on every rank. What only a root must move does not limit
    the other ranks, and neither does a block that makes up one of a rank's arrays.
    """
    from gpucoll.kernels.cpu.addresses import REDUCE_ARGUMENTS, reduce_kernel

    source, destination = call.source, call.destination
    narrow = np.dtype(np.float32 if source.nbytes % 4 == 0 else np.uint8)
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * REDUCE_ARGUMENTS)(
        reduce_kernel(narrow.name, "sum")
    )
    sources = np.array([source.ctypes.data] * (2 if call.in_place else 1), np.int64)
    destinations = np.array([destination.ctypes.data], np.int64)
    addresses = (destinations.ctypes.data, 1, sources.ctypes.data, len(sources))
    count = source.nbytes // narrow.itemsize

    def move(_held: object = (destinations, sources)) -> None:
        kernel(*addresses, count, 0, PREFETCH_BYTES)

    return repeated(partial(move))
