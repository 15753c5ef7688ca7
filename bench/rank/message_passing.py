"""MPI through mpi4py: MPICH, Open MPI and Intel MPI."""

from __future__ import annotations

import importlib
import re
from functools import partial
from typing import Any

from gpucoll.bench.rank.arrays import Arrays, HostArrays
from gpucoll.bench.rank.inputs import is_pattern
from gpucoll.bench.rank.library import Array, Call, Loop
from gpucoll.bench.rank.loops import ping_pong, repeated, stream
from gpucoll.bench.rank.mpi_patterns import pattern

__all__ = ["MessagePassing", "mpi_version"]

DATATYPES = {
    "bool": "C_BOOL", "int8": "INT8_T", "int16": "INT16_T", "int32": "INT32_T", "int64": "INT64_T",
    "uint8": "UINT8_T", "uint16": "UINT16_T", "uint32": "UINT32_T", "uint64": "UINT64_T",
    "float32": "FLOAT", "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX", "complex128": "C_DOUBLE_COMPLEX",
}  # fmt: skip

OPERATIONS = {
    "sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX",
    "band": "BAND", "bor": "BOR", "bxor": "BXOR", "land": "LAND", "lor": "LOR", "lxor": "LXOR",
}  # fmt: skip

# defined on integers and MPI_C_BOOL; other types have no logical reductions
LOGICAL = ("land", "lor", "lxor")


OUT_OF_PLACE = ("send_recv", "ping_pong", "stream")


class MessagePassing:
    """The MPI of this environment, in MPI_COMM_WORLD."""

    reduce_scatter_block = 0
    arrays: Arrays = HostArrays()

    def __init__(self) -> None:
        # Initialise MPI as for every user of mpi4py; MPI4PY_RC_THREAD_LEVEL changes it.
        self.mpi: Any = importlib.import_module("mpi4py.MPI")
        self.comm = self.mpi.COMM_WORLD
        self.rank: int = self.comm.Get_rank()
        self.world_size: int = self.comm.Get_size()

    def versions(self) -> dict[str, str]:
        """Return the versions of the MPI and of mpi4py, and the level of thread support."""
        levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
        level = {getattr(self.mpi, f"THREAD_{name}"): name.lower() for name in levels}
        return {
            "library": mpi_version(self.mpi.Get_library_version()),
            "mpi4py": importlib.import_module("mpi4py").__version__,
            "threads": level[self.mpi.Query_thread()],
        }

    def allocate(self, placement: str, count: int, dtype: str) -> Array:
        """Return an ordinary NumPy array, whatever the placement."""
        return self.arrays.allocate(count, dtype)

    def loop(self, call: Call) -> Loop | None:
        """Return the loop around the upper-case method, with prepared buffer descriptions."""
        if call.variant not in ("private", "blocking", "work"):
            return None
        if call.collective == "barrier":
            return repeated(partial(self.comm.Barrier))
        if call.dtype not in DATATYPES and call.source is not None:
            return None
        if is_pattern(call.collective):
            return pattern(self.mpi, call, self.served, partial(self.described, call=call))
        if not defined(call):
            return None
        if call.collective in ("ping_pong", "stream"):
            return self.messages(call)
        return repeated(*[self.method(piece) for piece in call.pieces()])

    def served(self, call: Call) -> partial[Any] | None:
        """Return the method with its arguments; None if MPI has no such call."""
        return self.method(call) if defined(call) else None

    def method(self, call: Call) -> partial[Any]:
        """Return the communicator's method with its arguments."""
        comm, root, in_place = self.comm, call.root, self.mpi.IN_PLACE
        source = self.described(call.source, call)
        destination = self.described(call.destination, call)
        sent, reduced = (in_place, source) if call.in_place else (source, destination)
        to_root: tuple[Any, Any] = (source, None)
        from_root: tuple[Any, Any] = (None, destination)
        if self.rank == root:
            to_root = (sent, destination)
            from_root = (source, in_place if call.in_place else destination)
        redop = getattr(self.mpi, OPERATIONS.get(call.redop, "OP_NULL"))
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        methods: dict[str, tuple[Any, ...]] = {
            "all_reduce": (comm.Allreduce, sent, destination, redop),
            "reduce": (comm.Reduce, *to_root, redop, root),
            "broadcast": (comm.Bcast, source, root),
            "all_gather": (comm.Allgather, sent, destination),
            "gather": (comm.Gather, *to_root, root),
            "reduce_scatter": (comm.Reduce_scatter_block, sent, reduced, redop),
            "scatter": (comm.Scatter, *from_root, root),
            "all_to_all": (comm.Alltoall, sent, destination),
            "scan": (comm.Scan, sent, destination, redop),
            "exclusive_scan": (comm.Exscan, sent, destination, redop),
            "send_recv": (comm.Sendrecv, source, after, 0, destination, before),
        }
        method, *arguments = methods[call.collective]
        return partial(method, *arguments)

    def messages(self, call: Call) -> Loop:
        """Return the loop of messages from rank 0 to rank 1."""
        arrays = (call.source, call.destination, call.destination[:1])
        source, destination, reply = (self.described(array, call) for array in arrays)
        ends = (self.rank, self.comm.Send, self.comm.Recv, source, destination)
        if call.collective == "ping_pong":
            return ping_pong(*ends)
        return stream(*ends, reply)

    def described(self, array: Array, call: Call) -> list[Any]:
        """Return mpi4py's fastest buffer description, which needs no further query of NumPy."""
        # memory is the name before mpi4py 4
        wrap = getattr(self.mpi, "buffer", None) or self.mpi.memory
        return [wrap(array), getattr(self.mpi, DATATYPES[call.dtype])]

    def path(self) -> str:
        """Return the path of the last call, which this library does not report."""
        return ""

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.comm.Barrier()

    def close(self) -> None:
        """Finalize, together with the other ranks."""
        self.mpi.Finalize()


def mpi_version(text: str) -> str:
    """Return the short form of an MPI's version text."""
    text = " ".join(text.split())
    known = re.match(r"MPICH Version: \S+|Open MPI v[^,\s]+|Intel\(R\) MPI Library \S+", text)
    return known[0] if known else text.rstrip("\0")[:60]


def defined(call: Call) -> bool:
    """Return whether MPI has the call on this side, with this reduction and datatype."""
    if call.in_place and call.collective in OUT_OF_PLACE:
        return False
    if not call.in_place and call.collective == "broadcast":
        return False
    if call.redop == "none":
        return True
    logical = call.redop in LOGICAL
    if call.dtype == "bool":
        return logical
    return call.redop in OPERATIONS and not (logical and call.dtype.startswith(("f", "c")))
