"""What the blocks of each rank hold before a schedule begins, as symbolic contents."""

from __future__ import annotations

from typing import Final

from gpucoll.algorithms.contents import EMPTY, Contents
from gpucoll.algorithms.table import Algorithm
from gpucoll.types import Collective

_ALL_BLOCKS: Final = (
    Collective.ALL_REDUCE,
    Collective.REDUCE,
    Collective.REDUCE_SCATTER,
    Collective.SCAN,
)
_FIRST_BLOCK: Final = (Collective.EXCLUSIVE_SCAN, Collective.BARRIER)
_OWN_BLOCK: Final = (Collective.ALL_GATHER, Collective.GATHER)


def initial_blocks(
    algorithm: Algorithm, size: int, contents: Contents, root: int = 0
) -> list[list[int]]:
    """Return, of each rank, what its blocks hold before the first step.

    A contribution is (rank, block), or (rank, receiver) where each block has one (all_to_all).

    Parameters
    ----------
    algorithm : Algorithm
        Whose blocks they are.
    size : int
        How many ranks there are.
    contents : Contents
        Where the values are kept.
    root : int
        Who gives, where one does.
    """
    count = algorithm.blocks(size)
    held = [[EMPTY] * count for _ in range(size)]
    for rank in range(size):
        if algorithm.numbering is not None:
            for peer in range(size):
                block = algorithm.numbering.outgoing(rank, size, peer)
                held[rank][block] = contents.leaf((rank, peer))
        else:
            for block in _brought(algorithm.collective, rank, root, count):
                held[rank][block] = contents.leaf((rank, block))
    return held


def _brought(collective: Collective, rank: int, root: int, count: int) -> range:
    """Return the blocks that a rank has something in."""
    if collective in _ALL_BLOCKS:
        return range(count)
    if collective in _FIRST_BLOCK:
        return range(1)
    if collective in _OWN_BLOCK:
        return range(rank, rank + 1)
    return range(count if rank == root else 0)
