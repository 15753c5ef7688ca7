"""The element that changes nothing: what an exclusive scan gives to the first rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.errors import ArgumentTypeError

_NARROW_FLOATS = {
    "bfloat16": ("uint16", 0x3F80, 0x7F80),
    "float8_e4m3fn": ("uint8", 0x38, 0x7E),
    "float8_e5m2": ("uint8", 0x3C, 0x7C),
}
"""Dtypes that NumPy alone does not have: their storage, and the bits of 1 and of the greatest."""

_ONE = ("prod", "land")


def identity_of(dtype: str, operation: str) -> npt.NDArray[Any]:
    """Return the operation's identity as the bytes of one element.

    For min and max it is the greatest and the least value: infinities where the dtype has them.

    Raises
    ------
    ArgumentTypeError
        The operation has none.
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


def _values(kind: np.dtype[Any]) -> dict[str, Any]:
    if kind.kind == "b":
        return {"zero": False, "one": True, "least": False, "greatest": True}
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return {"zero": 0, "one": 1, "least": limits.min, "greatest": limits.max}
    return {"zero": 0, "one": 1, "least": -np.inf, "greatest": np.inf}
