"""How the bench reports each collective, one row each; what a collective is, gpucoll knows.

A new collective needs a row here, a case in `rank.inputs.expected`, and a line in the table of each
library in `rank`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpucoll import collectives as gpucoll_collectives
from gpucoll.bench.rank.inputs import storage
from gpucoll.errors import ArgumentTypeError
from gpucoll.types import BUILT_IN, DTYPES, ReduceOp

__all__ = [
    "COLLECTIVES",
    "DTYPES",
    "DTYPE_ALIASES",
    "REDOPS",
    "Collective",
    "allows",
    "item_bytes",
    "whole",
]


@dataclass(frozen=True)
class Collective:
    """How a collective is reported, by nccl-tests' definitions.

    Attributes
    ----------
    bus_factor : callable or None
        Number of ranks -> bus bandwidth over algorithm bandwidth, which makes times comparable with
        the hardware's limits. 1 if nccl-tests defines no factor; None if a bandwidth is meaningless
        here.
    reduces, has_root, has_data : bool
        Whether it takes a reduction, a root, an array.
    in_blocks : bool
        Whether an array consists of a block for each rank; its size is that of all blocks together.
    is_prefix : bool
        Whether ranks reduce different numbers of inputs, so that some averages are not exact.
    planned, listed : bool
        Whether `gpucoll.Communicator` has a plan for it, and takes a list of arrays.
    limited : bool
        Whether the memory limit is meaningful: see `rank.own.streaming`.
    tensors : bool
        Whether it can be measured with PyTorch's tensors on the host in addition.
    parts : tuple of str
        Parts that are also measured alone for every library: see `results.PARTS`.
    checks_itself : bool
        Whether it checks its own results because it takes no arrays.
    own_program : bool
        Whether each sample is a run of a separate program: see `programs`.
    least_ranks : int
        The smallest number of ranks.
    """

    bus_factor: Callable[[int], float] | None
    reduces: bool = False
    has_root: bool = False
    has_data: bool = True
    in_blocks: bool = False
    is_prefix: bool = False
    planned: bool = True
    listed: bool = False
    limited: bool = False
    tensors: bool = True
    parts: tuple[str, ...] = ()
    checks_itself: bool = False
    own_program: bool = False
    least_ranks: int = 1

    def bandwidths(
        self, size_bytes: int, time_us: float, ranks: int
    ) -> tuple[float, float] | tuple[None, None]:
        """Return algorithm and bus bandwidth of one call in GB/s (1e9 bytes)."""
        if self.bus_factor is None:
            return None, None
        algorithm = size_bytes / time_us / 1e3 if time_us > 0 else 0.0
        return algorithm, algorithm * self.bus_factor(ranks)

    def elements(self, size_bytes: int, dtype: str, ranks: int) -> int:
        """Return the number of elements for a size, rounded down: at least one, or one a block."""
        if not self.has_data:
            return 0
        least = ranks if self.in_blocks else 1
        return max(1, size_bytes // item_bytes(dtype) // least) * least

    def combinations(self, dtypes: list[str], redops: list[str]) -> tuple[tuple[str, str], ...]:
        """Return the valid combinations of dtypes and reductions; "none" means no parameter."""
        if not self.has_data:
            return (("none", "none"),)
        if not self.reduces:
            return tuple((dtype, "none") for dtype in dtypes)
        redops = [redop for redop in redops if not (self.is_prefix and redop == "avg")]
        return tuple((d, o) for d in dtypes for o in redops if allows(d, o))


def _known(name: str, **given: Any) -> Collective:
    """Return how one of gpucoll's collectives is reported; `given` is what only the bench knows."""
    known = gpucoll_collectives.Collective[name.upper()]
    return Collective(
        known.bus_factor,
        reduces=known.reduces,
        has_root=known.has_root,
        in_blocks=known.has_blocks,
        is_prefix=known.is_scan,
        **given,
    )


def whole(ranks: int) -> float:
    """Return the bus factor if every byte passes the busiest link."""
    return 1.0


COLLECTIVES = {
    "all_reduce": _known("all_reduce", listed=True, limited=True),
    "reduce": _known("reduce"),
    "broadcast": _known("broadcast", listed=True, limited=True),
    "all_gather": _known("all_gather"),
    "gather": _known("gather"),
    "reduce_scatter": _known("reduce_scatter"),
    "scatter": _known("scatter"),
    "all_to_all": _known("all_to_all", limited=True),
    "scan": _known("scan", limited=True),
    "exclusive_scan": _known("exclusive_scan", limited=True),
    "send_recv": Collective(whole, planned=False, limited=True, least_ranks=2),
    "ping_pong": Collective(whole, planned=False, least_ranks=2),
    "stream": Collective(whole, planned=False, least_ranks=2),
    "barrier": Collective(lambda ranks: 0.0, has_data=False, planned=False),
}

DTYPE_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}
"""nccl-tests' names of dtypes, if they differ."""

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
