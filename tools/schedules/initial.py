"""The contents of each rank's blocks before a schedule begins, as symbolic values."""

from __future__ import annotations

from gpucoll.algorithms.table import Algorithm
from gpucoll.collectives import Collective, Data, Flow
from schedules.contents import EMPTY, Contents


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
    if collective.flow == Flow.FROM_ROOT:
        return range(count if rank == root else 0)
    if collective.gathers:
        return range(rank, rank + 1)
    is_first = collective.excludes_own or collective.data == Data.NOTHING
    return range(1 if is_first else count)
