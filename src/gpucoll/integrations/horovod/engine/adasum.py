"""Adasum: sums of gradients that do not overshoot where they point the same way.

Two gradients a and b become (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b: their sum where they are
orthogonal, their mean where they are parallel. P ranks, a power of 2, combine in log2 P rounds:
in round k rank r does with rank r xor 2^k (Maleki et al., "Scaling distributed training with
adaptive summation", MLSys 2021).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpucoll import ArgumentError

if TYPE_CHECKING:
    from gpucoll import Communicator

__all__ = ["all_reduce", "combined"]


def all_reduce(comm: Communicator, x: Any, out: Any) -> None:
    """Combine host arrays of all ranks; every rank gets the same bits.

    Parameters
    ----------
    x, out : array
        Floating point, on the host; `out` may be x.

    Notes
    -----
    Cost: n log2 P, each way.
    """
    if comm.world_size & (comm.world_size - 1):
        raise ArgumentError(
            f"rank {comm.rank} of {comm.world_size}: Adasum needs a power of 2 of ranks; got "
            f"{comm.world_size}"
        )
    mine, target = np.asarray(x), np.asarray(out)
    if target is not mine:
        target[...] = mine
    theirs = np.empty_like(target)
    step = 1
    while step < comm.world_size:
        partner = comm.rank ^ step
        comm.send_recv(target, partner, out=theirs, source=partner)
        pair = (target, theirs) if comm.rank < partner else (theirs, target)
        target[...] = combined(*pair)
        step *= 2


def combined(a: Any, b: Any) -> Any:
    """Return the adaptive sum of two arrays, computed in float64 for double, else in float32."""
    wide = np.float64 if a.dtype == np.float64 else np.float32
    left, right = a.astype(wide), b.astype(wide)
    one, other = left.ravel().astype(np.float64), right.ravel().astype(np.float64)
    dot, norm, its_norm = one @ other, one @ one, other @ other
    keep = 1.0 if norm == 0 else 1.0 - dot / (2 * norm)
    its_keep = 1.0 if its_norm == 0 else 1.0 - dot / (2 * its_norm)
    return (wide(keep) * left + wide(its_keep) * right).astype(a.dtype)
