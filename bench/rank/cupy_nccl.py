"""NCCL through CuPy's own bindings, as a program without gpucoll would use it."""

from __future__ import annotations

import importlib
import os
import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpucoll.bench.rank.arrays import Arrays, CupyArrays
from gpucoll.bench.rank.library import Array, Call, Loop
from gpucoll.bench.rank.loops import ping_pong, repeated, stream, timed

__all__ = ["CupyNccl"]

DATATYPES = {
    "bool": "UINT8", "int8": "INT8", "uint8": "UINT8", "int32": "INT32", "uint32": "UINT32",
    "int64": "INT64", "uint64": "UINT64", "float16": "FLOAT16", "bfloat16": "BFLOAT16",
    "float32": "FLOAT32", "float64": "FLOAT64",
}  # fmt: skip

OPERATIONS = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX", "avg": "AVG"}
SERVED = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
MESSAGES = ("send_recv", "ping_pong", "stream")


class CupyNccl:
    """A communicator of ``cupy.cuda.nccl`` on this rank's GPU; calls use the null stream."""

    def __init__(self, rank: int, world_size: int, store: str, timeout_s: float) -> None:
        self.arrays: Arrays = CupyArrays(rank)
        self.nccl: Any = importlib.import_module("cupy.cuda.nccl")
        self.rank, self.world_size, self.reduce_scatter_block = rank, world_size, rank
        unique_id = self._meet(Path(store), timeout_s)
        self.comm = self.nccl.NcclCommunicator(world_size, unique_id, rank)
        self._one = self.arrays.allocate(1, "float32")

    def _meet(self, store: Path, timeout_s: float) -> Any:
        """Return the communicator's identifier, which rank 0 creates and writes to a file."""
        if self.rank == 0:
            made = self.nccl.get_unique_id()  # a tuple in CuPy 13, bytes in CuPy 14
            store.with_suffix(".new").write_bytes(pickle.dumps(made))
            os.replace(store.with_suffix(".new"), store)
            return made
        deadline_s = time.monotonic() + timeout_s
        while not store.exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"rank 0 has not arrived within {timeout_s:g} s")
            time.sleep(0.01)
        return pickle.loads(store.read_bytes())

    def versions(self) -> dict[str, str]:
        """Return the versions of NCCL and CuPy, and the GPU's name."""
        number = int(self.nccl.get_version())
        found = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        return {"library": f"NCCL {found} through CuPy", **self.arrays.versions()}

    def allocate(self, placement: str, count: int, dtype: str) -> Array:
        """Return an ordinary array, whatever the placement."""
        return self.arrays.allocate(count, dtype)

    def loop(self, call: Call) -> Loop | None:
        """Return the loop around the communicator's method, or None if it has none."""
        if call.variant != "private" or call.collective not in (*SERVED, *MESSAGES):
            return None
        if call.redop != "none" and (call.redop not in OPERATIONS or call.dtype not in DATATYPES):
            return None
        if call.redop != "none" and call.dtype == "bool":
            return None
        if call.collective in MESSAGES:
            return None if call.in_place else self.messages(call)
        return repeated(*[self.method(piece) for piece in call.pieces()], wait=self.arrays.wait)

    def method(self, call: Call) -> partial[Any]:
        """Return the communicator's method with its arguments."""
        source, destination = call.source.data.ptr, call.destination.data.ptr
        count, dtype = self.described(call.source, call)
        received = self.described(call.destination, call)[0]
        redop = getattr(self.nccl, f"NCCL_{OPERATIONS.get(call.redop, 'SUM')}")
        methods: dict[str, tuple[Any, ...]] = {
            "all_reduce": ("allReduce", count, dtype, redop),
            "reduce": ("reduce", count, dtype, redop, call.root),
            "broadcast": ("broadcast", count, dtype, call.root),
            "all_gather": ("allGather", count, dtype),
            "reduce_scatter": ("reduceScatter", received, dtype, redop),
        }
        name, *arguments = methods[call.collective]
        return partial(getattr(self.comm, name), source, destination, *arguments, 0)

    def described(self, array: Array, call: Call) -> tuple[int, int]:
        """Return count and datatype of an array. If there is no such datatype, moves use bytes."""
        if call.dtype in DATATYPES:
            return len(array), getattr(self.nccl, f"NCCL_{DATATYPES[call.dtype]}")
        return array.nbytes, self.nccl.NCCL_UINT8

    def messages(self, call: Call) -> Loop:
        """Return the loop of messages around the ring, or from rank 0 to rank 1."""
        source, destination = call.source, call.destination
        ends = (self.rank, self.mover(self.comm.send, call), self.mover(self.comm.recv, call))
        if call.collective == "ping_pong":
            return ping_pong(*ends, source, destination, self.arrays.wait)
        if call.collective == "stream":
            return stream(*ends, source, destination, destination[:1], self.arrays.wait)
        _, send, receive = ends
        return timed(
            "start()\nsend(source, after)\nreceive(destination, before)\nend()",
            self.arrays.wait,
            start=self.nccl.groupStart,
            end=self.nccl.groupEnd,
            send=send,
            receive=receive,
            source=source,
            destination=destination,
            after=(self.rank + 1) % self.world_size,
            before=(self.rank - 1) % self.world_size,
        )

    def mover(self, method: Any, call: Call) -> Callable[[Array, int], None]:
        """Return a function of an array and the other rank."""

        def move(array: Array, peer: int) -> None:
            method(array.data.ptr, *self.described(array, call), peer, 0)

        return move

    def path(self) -> str:
        """Return the path of the last call, which this library does not report."""
        return ""

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        place = self._one.data.ptr
        self.comm.allReduce(place, place, 1, self.nccl.NCCL_FLOAT32, self.nccl.NCCL_SUM, 0)
        self.arrays.wait()

    def close(self) -> None:
        """Destroy the communicator."""
        self.comm.destroy()
