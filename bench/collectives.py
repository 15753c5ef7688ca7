"""What the bench knows of each collective: one row each; dtypes and reductions are gpucoll's.

A further collective is one more row here and one more line in `loop` of each library in `rank`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gpucoll.bench.rank.inputs import storage
from gpucoll.errors import ArgumentTypeError
from gpucoll.types import BUILT_IN, DTYPES, ReduceOp

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

DTYPE_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}
"""nccl-tests' names, where they are others."""

REDOPS = tuple(BUILT_IN)


def allows(dtype: str, redop: str) -> bool:
    """Return whether a reduction is defined on a dtype."""
    try:
        ReduceOp.parse(redop).check_dtype(dtype)
    except ArgumentTypeError:
        return False
    return True


def item_bytes(dtype: str) -> int:
    """Return the size of one element."""
    return int(np.dtype(storage(dtype)).itemsize)
