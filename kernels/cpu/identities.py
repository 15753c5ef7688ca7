"""The identities of operations: what an exclusive scan gives to the first rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpucoll.errors import ArgumentTypeError
from gpucoll.kernels.cpu.addresses import HALF_TYPES

if TYPE_CHECKING:
    from gpucoll.types import AnyScalar

_NARROW_FLOATS = {
    "bfloat16": ("uint16", 0x3F80, 0x7F80),
    "float8_e4m3fn": ("uint8", 0x38, 0x7E),
    "float8_e5m2": ("uint8", 0x3C, 0x7C),
}
"""Dtypes that NumPy itself lacks: their storage, and the bits of 1 and of the greatest value."""

_ONE = ("prod", "land")


def identity_of(dtype: str, operation: str) -> npt.NDArray[np.generic]:
    """Return the operation's identity as the bytes of one element.

    For min it is the greatest value, for max the least: infinities if the dtype has them.

    Raises
    ------
    ArgumentTypeError
        The operation has no identity.
    """
    if operation == "avg":
        raise ArgumentTypeError(
            "exclusive_scan: avg has no identity, and rank 0 has nothing to average; use scan, or "
            "sum and divide"
        )
    if dtype in _NARROW_FLOATS:
        storage, one, greatest = _NARROW_FLOATS[dtype]
        sign = 1 << (8 * np.dtype(storage).itemsize - 1)
        bits = {"one": one, "greatest": greatest, "least": greatest | sign, "zero": 0}
        return np.array([bits[_value_of(operation)]], storage)
    kind = np.dtype(dtype)
    if operation == "band":
        return np.array([~kind.type(0)], kind)
    return np.array([_values(kind)[_value_of(operation)]], kind)


def _value_of(operation: str) -> str:
    if operation in ("min", "max"):
        return "greatest" if operation == "min" else "least"
    return "one" if operation in _ONE else "zero"


def _values(kind: np.dtype[np.generic]) -> dict[str, AnyScalar]:
    if kind.kind == "b":
        return {"zero": False, "one": True, "least": False, "greatest": True}
    if kind.kind in "iu":
        limits = np.iinfo(kind.str)
        return {"zero": 0, "one": 1, "least": limits.min, "greatest": limits.max}
    return {"zero": 0, "one": 1, "least": -np.inf, "greatest": np.inf}


def exact_identity(value: AnyScalar, dtype: str, name: str) -> npt.NDArray[np.generic]:
    """Return the identity that a user gave with an operation, as the bytes of one element.

    Raises
    ------
    ArgumentTypeError
        There is none, or the dtype cannot represent it exactly.
    """
    if value is None:
        raise ArgumentTypeError(
            f"exclusive_scan with {name}: rank 0 gets the operation's identity, and it has none; "
            "give it: ReduceOp.custom(function, identity=...)"
        )
    try:
        made, back = _made_and_back(value, dtype)
        is_exact = back == value or (back != back and value != value)
    except (TypeError, ValueError, OverflowError):
        is_exact = False
    if not is_exact:
        raise ArgumentTypeError(
            f"exclusive_scan with {name}: its identity {value!r} is not exactly a value of {dtype}"
        )
    return made


def _made_and_back(value: AnyScalar, dtype: str) -> tuple[npt.NDArray[np.generic], AnyScalar]:
    """Return a number as the bytes of one element, and the number that these represent."""
    with np.errstate(over="ignore"):
        if dtype in HALF_TYPES:
            from gpucoll.kernels.cpu.convert import cast_array  # imports LLVM

            bits = cast_array(np.array([float(value)], np.float32), dtype, narrows=True)
            return bits, float(cast_array(bits, dtype, narrows=False)[0])
        kind = np.dtype(dtype)
        convert = {"b": bool, "i": int, "u": int, "f": float, "c": complex}[kind.kind]
        made = np.array([convert(value)]).astype(kind)  # wraps; NumPy 1 warns if done directly
        return made, convert(made[0])
