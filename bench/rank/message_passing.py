"""MPI through mpi4py: MPICH, Open MPI and Intel MPI alike."""

from __future__ import annotations

import importlib
import re
from typing import Any

import numpy as np

from gpucoll.bench.rank.inputs import storage
from gpucoll.bench.rank.library import Array, Call, Loop, repeated

__all__ = ["MessagePassing"]

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

BOOL_OPERATIONS = ("land", "lor", "lxor")  # the others are not defined on MPI_C_BOOL


class MessagePassing:
    """The MPI of this environment, in MPI_COMM_WORLD."""

    def __init__(self) -> None:
        # Initialises MPI as every user of mpi4py gets it; MPI4PY_RC_THREAD_LEVEL changes that.
        self.mpi: Any = importlib.import_module("mpi4py.MPI")
        self.comm = self.mpi.COMM_WORLD
        self.rank: int = self.comm.Get_rank()
        self.world_size: int = self.comm.Get_size()

    def versions(self) -> dict[str, str]:
        """Return the versions of the MPI and of mpi4py, and the level of thread support."""
        levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
        level = {getattr(self.mpi, f"THREAD_{name}"): name.lower() for name in levels}
        text = " ".join(self.mpi.Get_library_version().split())
        known = re.match(r"MPICH Version: \S+|Open MPI v[^,\s]+|Intel\(R\) MPI Library \S+", text)
        return {
            "library": known[0] if known else text.rstrip("\0")[:60],
            "mpi4py": importlib.import_module("mpi4py").__version__,
            "threads": level[self.mpi.Query_thread()],
        }

    def allocate(self, placement: str, count: int, dtype: str) -> Array:
        """Return an ordinary NumPy array, whatever the placement."""
        return np.empty(count, storage(dtype))

    def loop(self, call: Call) -> Loop | None:
        """Return the loop around the upper-case method, with the buffers described beforehand."""
        if call.variant != "private":
            return None
        if call.collective == "barrier":
            return repeated(self.comm.Barrier)
        if call.dtype not in DATATYPES:
            return None
        source = self.described(call.source, call)
        destination = self.described(call.destination, call)
        if call.collective == "broadcast":
            return repeated(self.comm.Bcast, source, call.root) if call.in_place else None
        if call.redop not in OPERATIONS:
            return None
        if call.dtype == "bool" and call.redop not in BOOL_OPERATIONS:
            return None
        operation = getattr(self.mpi, OPERATIONS[call.redop])
        if call.in_place:
            source = self.mpi.IN_PLACE
        return repeated(self.comm.Allreduce, source, destination, operation)

    def described(self, array: Array, call: Call) -> list[Any]:
        """Return the quickest of mpi4py's buffer descriptions: it need not ask NumPy again."""
        wrap = getattr(self.mpi, "buffer", None) or self.mpi.memory  # the name before mpi4py 4
        return [wrap(array), getattr(self.mpi, DATATYPES[call.dtype])]

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.comm.Barrier()

    def close(self) -> None:
        """Finalize, together with the other ranks."""
        self.mpi.Finalize()
