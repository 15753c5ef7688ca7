"""torch.distributed: Gloo for arrays on the host, NCCL for those on GPUs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import numpy as np

from gpucoll.bench.rank.arrays import Arrays, HostArrays, TorchArrays
from gpucoll.bench.rank.inputs import is_pattern
from gpucoll.bench.rank.library import Array, Call, Loop
from gpucoll.bench.rank.loops import ping_pong, repeated, stream, timed
from gpucoll.bench.rank.torch_patterns import pattern

__all__ = ["Gloo", "TorchNccl"]

REDUCED = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
"""dtypes that both backends reduce; others are moved as bytes."""

IN_PLACE = ("all_reduce", "reduce", "broadcast")
OUT_OF_PLACE = ("all_to_all", "send_recv", "ping_pong", "stream")
ABSENT = ("scan", "exclusive_scan")


class Distributed:
    """A process group of torch.distributed, with a subclass for each backend."""

    backend: str
    operations: ClassVar[dict[str, str]]
    """Reduction -> its name in torch.distributed."""
    arrays: Arrays
    wait: Callable[[], None] | None = None
    """Waits for the calls, if they only enqueue."""

    def __init__(self, rank: int, world_size: int, store: str, timeout_s: float) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.torch.set_num_threads(1)
        self.distributed: Any = importlib.import_module("torch.distributed")
        self.rank, self.world_size, self.reduce_scatter_block = rank, world_size, rank
        self.distributed.init_process_group(
            self.backend,
            store=self.distributed.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )

    def versions(self) -> dict[str, str]:
        """Return the versions of the backend, if it has one, and of torch."""
        raise NotImplementedError

    def allocate(self, placement: str, count: int, dtype: str) -> Array:
        """Return an ordinary array, whatever the placement."""
        return self.arrays.allocate(count, dtype)

    def loop(self, call: Call) -> Loop | None:
        """Return the loop around torch.distributed's function, or None if there is none."""
        if call.variant not in ("private", "blocking", "work"):
            return None
        if call.collective == "barrier":
            return repeated(partial(self.distributed.barrier), wait=self.wait)
        if is_pattern(call.collective):
            tensor = partial(self.tensor, call=call)
            return pattern(self.distributed, call, self.served, tensor)
        if not self.has(call):
            return None
        if call.collective in ("send_recv", "ping_pong", "stream"):
            return self.messages(call)
        return repeated(*[self.function(piece) for piece in call.pieces()], wait=self.wait)

    def has(self, call: Call) -> bool:
        """Return whether the call exists on this side, with this reduction and dtype."""
        if call.collective in (*ABSENT, *(OUT_OF_PLACE if call.in_place else IN_PLACE)):
            return False
        return call.redop == "none" or (call.redop in self.operations and call.dtype in REDUCED)

    def served(self, call: Call) -> partial[Any] | None:
        """Return the function with its arguments; None if there is no such call."""
        return self.function(call) if self.has(call) else None

    def function(self, call: Call) -> partial[Any]:
        """Return the function with its arguments."""
        torch, root, at_root = self.distributed, call.root, call.root == self.rank
        source, destination = self.tensor(call.source, call), self.tensor(call.destination, call)
        redop = getattr(torch.ReduceOp, self.operations.get(call.redop, "SUM"))
        sent = list(source.chunk(self.world_size)) if at_root else None
        received = list(destination.chunk(self.world_size)) if at_root else None
        functions: dict[str, tuple[Any, ...]] = {
            "all_reduce": (torch.all_reduce, source, redop),
            "reduce": (torch.reduce, source, root, redop),
            "broadcast": (torch.broadcast, source, root),
            "all_gather": (self.renamed("all_gather"), destination, source),
            "gather": (torch.gather, source, received, root),
            "reduce_scatter": (self.renamed("reduce_scatter"), destination, source, redop),
            "scatter": (torch.scatter, destination, sent, root),
            "all_to_all": (torch.all_to_all_single, destination, source),
        }
        function, *arguments = functions[call.collective]
        return partial(function, *arguments)

    def renamed(self, name: str) -> Any:
        """Return a function on whole tensors by its current name, or by its former one."""
        before = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
        found = getattr(self.distributed, f"{name}_single", None)
        return found or getattr(self.distributed, before[name])

    def messages(self, call: Call) -> Loop:
        """Return the loop of messages around the ring, or from rank 0 to rank 1."""
        source, destination = self.tensor(call.source, call), self.tensor(call.destination, call)
        send, receive = self.distributed.send, self.distributed.recv
        ends = (self.rank, send, receive, source, destination)
        if call.collective == "ping_pong":
            return ping_pong(*ends, self.wait)
        if call.collective == "stream":
            return stream(*ends, destination[:1], self.wait)
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        return self.ring(source, after, destination, before)

    def ring(self, source: Any, after: int, destination: Any, before: int) -> Loop:
        """Return the loop that sends to one rank while receiving from another."""
        raise NotImplementedError

    def tensor(self, array: Array, call: Call) -> Any:
        """Return an array as a tensor of the call's dtype, or of bytes if it is only moved."""
        raise NotImplementedError

    def path(self) -> str:
        """Return the path of the last call, which this library does not report."""
        return ""

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.distributed.barrier()

    def close(self) -> None:
        """Leave the process group."""
        self.distributed.destroy_process_group()


class Gloo(Distributed):
    """torch's Gloo over this host's loopback interface; tensors are views of NumPy arrays."""

    backend = "gloo"
    operations: ClassVar = {
        "sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX",
        "band": "BAND", "bor": "BOR", "bxor": "BXOR",
    }  # fmt: skip
    arrays: Arrays = HostArrays()

    def __init__(self, rank: int, world_size: int, store: str, timeout_s: float) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: avoid a name lookup
        super().__init__(rank, world_size, store, timeout_s)

    def versions(self) -> dict[str, str]:
        """Return torch's version; Gloo does not report one."""
        return {"library": f"Gloo in torch {self.torch.__version__}"}

    def ring(self, source: Any, after: int, destination: Any, before: int) -> Loop:
        """Start the send, receive, then wait for the send."""
        return timed(
            "sending = send(source, after)\nreceive(destination, before)\nsending.wait()",
            send=self.distributed.isend,
            receive=self.distributed.recv,
            source=source,
            destination=destination,
            after=after,
            before=before,
        )

    def tensor(self, array: Array, call: Call) -> Any:
        """Return a view of an array."""
        bytes_ = self.torch.from_numpy(array.view(np.uint8))
        return bytes_.view(getattr(self.torch, call.dtype)) if call.dtype in REDUCED else bytes_


class TorchNccl(Distributed):
    """torch's NCCL, on the GPU of this rank."""

    backend = "nccl"
    operations: ClassVar = {
        "sum": "SUM",
        "prod": "PRODUCT",
        "min": "MIN",
        "max": "MAX",
        "avg": "AVG",
    }

    def __init__(self, rank: int, world_size: int, store: str, timeout_s: float) -> None:
        self.arrays = TorchArrays(rank)
        self.wait = self.arrays.wait
        super().__init__(rank, world_size, store, timeout_s)

    def versions(self) -> dict[str, str]:
        """Return the versions of NCCL and torch, and the GPU's name."""
        found = ".".join(map(str, self.torch.cuda.nccl.version()))
        return {"library": f"NCCL {found} in torch.distributed", **self.arrays.versions()}

    def ring(self, source: Any, after: int, destination: Any, before: int) -> Loop:
        """Put both into one group of NCCL's, since separately they would wait for each other."""
        distributed = self.distributed
        operations = [
            distributed.P2POp(distributed.isend, source, after),
            distributed.P2POp(distributed.irecv, destination, before),
        ]
        return timed(
            "for work in batch(operations):\n    work.wait()",
            self.wait,
            batch=distributed.batch_isend_irecv,
            operations=operations,
        )

    def tensor(self, array: Array, call: Call) -> Any:
        """Return the tensor, or a view of its bytes if it is only moved."""
        return array if call.dtype in REDUCED else array.view(self.torch.uint8)
