"""NCCL's types and ops for our dtypes and ops, and the reductions that NCCL lacks.

Calls that only move data send bytes, so that every dtype can be moved. For a sum, a complex number
is a pair of floats. bool is uint8 with the values 0 and 1, on which max and min are or and and.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpucoll.backends.nccl.prototypes import ncclDataType_t, ncclRedOp_t
from gpucoll.errors import ArgumentTypeError
from gpucoll.kernels.cpu.convert import cast_array
from gpucoll.types import ReduceOp

BYTES = int(ncclDataType_t.ncclUint8)
"""The type for data that is only moved; counts are then in bytes."""

_TYPES = {
    "bool": ncclDataType_t.ncclUint8,
    "int8": ncclDataType_t.ncclInt8,
    "uint8": ncclDataType_t.ncclUint8,
    "int32": ncclDataType_t.ncclInt32,
    "uint32": ncclDataType_t.ncclUint32,
    "int64": ncclDataType_t.ncclInt64,
    "uint64": ncclDataType_t.ncclUint64,
    "float16": ncclDataType_t.ncclFloat16,
    "bfloat16": ncclDataType_t.ncclBfloat16,
    "float8_e4m3fn": ncclDataType_t.ncclFloat8e4m3,
    "float8_e5m2": ncclDataType_t.ncclFloat8e5m2,
    "float32": ncclDataType_t.ncclFloat32,
    "float64": ncclDataType_t.ncclFloat64,
    "complex64": ncclDataType_t.ncclFloat32,
    "complex128": ncclDataType_t.ncclFloat64,
}
_OPERATIONS = {
    "sum": ncclRedOp_t.ncclSum,
    "prod": ncclRedOp_t.ncclProd,
    "max": ncclRedOp_t.ncclMax,
    "min": ncclRedOp_t.ncclMin,
    "avg": ncclRedOp_t.ncclAvg,
    "scaled_sum": ncclRedOp_t.ncclSum,
}
_OPERATIONS_OF_BOOL = {
    "sum": ncclRedOp_t.ncclMax,
    "prod": ncclRedOp_t.ncclMin,
    "max": ncclRedOp_t.ncclMax,
    "min": ncclRedOp_t.ncclMin,
    "bor": ncclRedOp_t.ncclMax,
    "band": ncclRedOp_t.ncclMin,
    "lor": ncclRedOp_t.ncclMax,
    "land": ncclRedOp_t.ncclMin,
}
_LINEAR = ("sum", "avg", "scaled_sum")
"""Ops that reduce the two parts of a complex number independently."""
FLOAT8_VERSION = (2, 24, 0)
_HAVE_FLOAT8 = ("NCCL", "RCCL")


OPERATION = -1
"""Stands in the arguments for an op that the communicator must create first."""


class Reduction(NamedTuple):
    """A reduction in NCCL's terms."""

    type: int
    operation: int
    parts: int
    """How many NCCL elements make up one of ours."""
    factor: bytes | None = None
    """For a premultiplied sum: the factor as one element of `type`. The op is made for it."""

    @property
    def arguments(self) -> tuple[int, int]:
        """NCCL's type and op, as the arguments of a call."""
        return self.type, self.operation if self.factor is None else OPERATION


def reduction(
    op: ReduceOp, dtype: str, name: str, version: tuple[int, ...], world_size: int
) -> Reduction:
    """Return the library's reduction for this dtype and op.

    Parameters
    ----------
    op : ReduceOp
    dtype : str
        One of `gpucoll.types.DTYPES`.
    name : str
        The library's name.
    version : tuple of int
        The library's version.
    world_size : int
        Number of ranks. The average of a single rank is its sum: for one rank alone, NCCL has no
        kernel that multiplies float8 (``ncclLaunchOneRank``), and its error would break the
        communicator.

    Raises
    ------
    ArgumentTypeError
        The library cannot do it; the text gives the reason and a remedy.
    """
    op.check_dtype(dtype)
    if reason := lack(op, dtype, name, version, world_size):
        raise ArgumentTypeError(f"{name} cannot reduce {dtype} with {op}: {reason}")
    operations = _OPERATIONS_OF_BOOL if dtype == "bool" else _OPERATIONS
    operation = operations["sum" if op.name == "avg" and world_size == 1 else op.name]
    factor = None
    if op.name == "scaled_sum":
        factor = _factor(op.factor or 0.0, dtype).tobytes()
    parts = 2 if dtype.startswith("complex") else 1
    return Reduction(int(_TYPES[dtype]), int(operation), parts, factor)


def lack(op: ReduceOp, dtype: str, name: str, version: tuple[int, ...], world_size: int) -> str:
    """Return why the library lacks this reduction; empty if it has it. See `reduction`."""
    if dtype.startswith("float8") and name not in _HAVE_FLOAT8:
        return "it has no such type; convert to float16 first"
    return _refusal(op, dtype, version, is_alone=world_size == 1 and name == "NCCL")


def _refusal(op: ReduceOp, dtype: str, version: tuple[int, ...], *, is_alone: bool) -> str:
    """Return why the library lacks this reduction, and what to do; empty if it has it."""
    to_host = "or copy to the host, where it works"
    if op.function is not None:
        return f"its operations are fixed; use a built-in one, {to_host}"
    if dtype not in _TYPES:
        wider = {"int16": "int32", "uint16": "uint32"}[dtype]
        return f"it has no such type; convert to {wider} first (x.astype, or x.to)"
    if dtype.startswith("float8") and version < FLOAT8_VERSION:
        least = ".".join(map(str, FLOAT8_VERSION))
        return f"float8 came with version {least}; convert to float16 first"
    if dtype.startswith("float8") and op.name == "scaled_sum" and is_alone:
        return "it has no such kernel for one rank alone; multiply it before you convert to float8"
    if dtype == "bool":
        if op.name in _OPERATIONS_OF_BOOL:
            return ""
        return f"it has no exclusive or; sum int32, {to_host}"
    if dtype.startswith("complex") and op.name not in _LINEAR:
        return f"it sees pairs of floats, which only sums keep; {to_host.removeprefix('or ')}"
    if op.name not in _OPERATIONS:
        return (
            "it has no bitwise or logical operations; max and min of bool are or and and, "
            + to_host
        )
    return ""


def _factor(factor: float, dtype: str) -> npt.NDArray[Any]:
    """Return a factor as one element of NCCL's type for the dtype."""
    if dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        return cast_array(np.array([factor], np.float32), dtype, narrows=True)
    kind = np.dtype({"complex64": "float32", "complex128": "float64"}.get(dtype, dtype))
    return np.array([int(factor) if kind.kind in "iu" else factor], kind)
