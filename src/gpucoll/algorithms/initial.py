"""The contents of each rank's blocks before a schedule begins, as symbolic values."""

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
    """Return the contents of each rank's blocks before the first step.

    A contribution is (rank, block), or (rank, receiver) if each block has a receiver (all_to_all).

    Parameters
    ----------
    algorithm : Algorithm
        The algorithm that uses the blocks.
    size : int
        Number of ranks.
    contents : Contents
        Stores the values.
    root : int
        The rank that gives the data, if there is one.
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
    """Return the blocks to which a rank contributes."""
    if collective in _ALL_BLOCKS:
        return range(count)
    if collective in _FIRST_BLOCK:
        return range(1)
    if collective in _OWN_BLOCK:
        return range(rank, rank + 1)
    return range(count if rank == root else 0)
