"""Gloo, through torch.distributed."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta
from typing import Any

import numpy as np

from gpucoll.bench.rank.inputs import storage
from gpucoll.bench.rank.library import Array, Call, Loop, repeated

__all__ = ["Gloo"]

OPERATIONS = {
    "sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX",
    "band": "BAND", "bor": "BOR", "bxor": "BXOR",
}  # fmt: skip

# What torch's Gloo reduces; the others it may only move.
REDUCED = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")


class Gloo:
    """A process group of torch's Gloo over this host's loopback interface."""

    def __init__(self, rank: int, world_size: int, store: str, timeout_s: float) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no name to be looked up
        self.torch: Any = importlib.import_module("torch")
        self.torch.set_num_threads(1)
        self.distributed: Any = importlib.import_module("torch.distributed")
        self.rank, self.world_size = rank, world_size
        self.distributed.init_process_group(
            "gloo",
            store=self.distributed.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )

    def versions(self) -> dict[str, str]:
        """Return torch's version: Gloo has none that can be asked for."""
        return {"library": f"Gloo in torch {self.torch.__version__}"}

    def allocate(self, placement: str, count: int, dtype: str) -> Array:
        """Return an ordinary NumPy array; the tensors are views of it."""
        return np.empty(count, storage(dtype))

    def loop(self, call: Call) -> Loop | None:
        """Return the loop around torch.distributed's function. Gloo works in place only."""
        if call.variant != "private" or not call.in_place:
            return None
        if call.collective == "barrier":
            return repeated(self.distributed.barrier)
        if not hasattr(self.torch, call.dtype):
            return None
        tensor = self.torch.from_numpy(call.source).view(getattr(self.torch, call.dtype))
        if call.collective == "broadcast":
            return repeated(self.distributed.broadcast, tensor, call.root)
        if call.redop not in OPERATIONS or call.dtype not in REDUCED:
            return None
        operation = getattr(self.distributed.ReduceOp, OPERATIONS[call.redop])
        return repeated(self.distributed.all_reduce, tensor, operation)

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.distributed.barrier()

    def close(self) -> None:
        """Leave the process group."""
        self.distributed.destroy_process_group()
