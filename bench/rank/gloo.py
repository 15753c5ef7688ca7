"""Gloo, through torch.distributed."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np

from gpucoll.bench.rank.inputs import storage
from gpucoll.bench.rank.library import Array, Call, Loop
from gpucoll.bench.rank.loops import ping_pong, repeated, stream, timed

__all__ = ["Gloo"]

OPERATIONS = {
    "sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX",
    "band": "BAND", "bor": "BOR", "bxor": "BXOR",
}  # fmt: skip

# What torch's Gloo reduces; the others it moves as bytes.
REDUCED = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")

IN_PLACE = ("all_reduce", "reduce", "broadcast")
OUT_OF_PLACE = ("all_to_all", "send_recv", "ping_pong", "stream")
ABSENT = ("scan", "exclusive_scan")


class Gloo:
    """A process group of torch's Gloo over this host's loopback interface."""

    def __init__(self, rank: int, world_size: int, store: str, timeout_s: float) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no name to be looked up
        self.torch: Any = importlib.import_module("torch")
        self.torch.set_num_threads(1)
        self.distributed: Any = importlib.import_module("torch.distributed")
        self.rank, self.world_size, self.reduce_scatter_block = rank, world_size, rank
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
        """Return the loop around torch.distributed's function, where it has it."""
        if call.variant != "private" or call.collective in ABSENT:
            return None
        if call.collective == "barrier":
            return repeated(partial(self.distributed.barrier))
        if call.collective in (OUT_OF_PLACE if call.in_place else IN_PLACE):
            return None
        if call.redop != "none" and (call.redop not in OPERATIONS or call.dtype not in REDUCED):
            return None
        if call.collective in ("send_recv", "ping_pong", "stream"):
            return self.messages(call)
        return repeated(*[self.function(piece) for piece in call.pieces()])

    def function(self, call: Call) -> partial[Any]:
        """Return the function with its arguments."""
        gloo, root, at_root = self.distributed, call.root, call.root == self.rank
        source, destination = self.tensor(call.source, call), self.tensor(call.destination, call)
        redop = getattr(gloo.ReduceOp, OPERATIONS.get(call.redop, "SUM"))
        sent = list(source.chunk(self.world_size)) if at_root else None
        received = list(destination.chunk(self.world_size)) if at_root else None
        functions: dict[str, tuple[Any, ...]] = {
            "all_reduce": (gloo.all_reduce, source, redop),
            "reduce": (gloo.reduce, source, root, redop),
            "broadcast": (gloo.broadcast, source, root),
            "all_gather": (self.renamed("all_gather"), destination, source),
            "gather": (gloo.gather, source, received, root),
            "reduce_scatter": (self.renamed("reduce_scatter"), destination, source, redop),
            "scatter": (gloo.scatter, destination, sent, root),
            "all_to_all": (gloo.all_to_all_single, destination, source),
        }
        function, *arguments = functions[call.collective]
        return partial(function, *arguments)

    def renamed(self, name: str) -> Any:
        """Return a function on whole tensors by its name of today, or by what it was before."""
        before = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
        found = getattr(self.distributed, f"{name}_single", None)
        return found or getattr(self.distributed, before[name])

    def messages(self, call: Call) -> Loop:
        """Return the loop of messages around the ring, or from rank 0 to rank 1."""
        source, destination = self.tensor(call.source, call), self.tensor(call.destination, call)
        send, receive = self.distributed.send, self.distributed.recv
        if call.collective == "ping_pong":
            return ping_pong(self.rank, send, receive, source, destination)
        if call.collective == "stream":
            return stream(self.rank, send, receive, source, destination, destination[:1])
        return timed(
            "sending = send(source, after)\nreceive(destination, before)\nsending.wait()",
            send=self.distributed.isend,
            receive=receive,
            source=source,
            destination=destination,
            after=(self.rank + 1) % self.world_size,
            before=(self.rank - 1) % self.world_size,
        )

    def tensor(self, array: Array, call: Call) -> Any:
        """Return an array as a tensor of the call's dtype, or of bytes where that is only moved."""
        bytes_ = self.torch.from_numpy(array.view(np.uint8))
        return bytes_.view(getattr(self.torch, call.dtype)) if call.dtype in REDUCED else bytes_

    def path(self) -> str:
        """Return which way the last call took, which this library does not say."""
        return ""

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.distributed.barrier()

    def close(self) -> None:
        """Leave the process group."""
        self.distributed.destroy_process_group()
