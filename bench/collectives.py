"""What the bench knows of each collective, dtype and reduction: one row each.

A further collective is one more row here and one more line in `loop` of each library in `rank`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gpucoll.bench.rank.inputs import storage

__all__ = ["COLLECTIVES", "DTYPES", "DTYPE_ALIASES", "REDOPS", "Collective", "allows", "item_bytes"]


@dataclass(frozen=True)
class Collective:
    """How a collective is reported, by nccl-tests' definitions.

    Attributes
    ----------
    reduces, has_root, has_data : bool
        Whether it takes a reduction, a root, an array.
    planned : bool
        Whether `gpucoll.Communicator` has a plan for it.
    bus_factor : callable
        Ranks -> bus over algorithm bandwidth: what makes a time comparable with the hardware.
    """

    reduces: bool
    has_root: bool
    has_data: bool
    planned: bool
    bus_factor: Callable[[int], float]

    def bandwidths(self, size_bytes: int, time_us: float, ranks: int) -> tuple[float, float]:
        """Return algorithm and bus bandwidth in GB/s (1e9 bytes) of one call."""
        algorithm = size_bytes / time_us / 1e3 if time_us > 0 else 0.0
        return algorithm, algorithm * self.bus_factor(ranks)


COLLECTIVES = {
    "all_reduce": Collective(True, False, True, True, lambda ranks: 2 * (ranks - 1) / ranks),
    "broadcast": Collective(False, True, True, False, lambda ranks: 1.0),
    "barrier": Collective(False, False, False, False, lambda ranks: 0.0),
}

DTYPES = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip

DTYPE_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}
"""nccl-tests' names, where they are others."""

REDOPS = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor")


def allows(dtype: str, redop: str) -> bool:
    """Return whether a reduction is defined on a dtype."""
    if redop in ("band", "bor", "bxor"):
        return "int" in dtype or dtype == "bool"
    if dtype.startswith("complex"):
        return redop not in ("min", "max")
    return not (dtype == "bool" and redop == "avg")


def item_bytes(dtype: str) -> int:
    """Return the size of one element."""
    return int(np.dtype(storage(dtype)).itemsize)
