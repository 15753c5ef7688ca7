"""Shares of an array: each rank combines one of them, from the arrays of all ranks.

The edges of shares are the offsets at which they begin, in order, and last the end of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise


def equal_edges(count: int, n_shares: int, unit: int = 1) -> list[int]:
    """Return the edges of shares of equal size; the last ones are smaller, or empty.

    Parameters
    ----------
    count : int
        Number of elements of the array.
    n_shares : int
        Number of shares.
    unit : int
        Every share begins at a multiple of it, or at the end of the array.
    """
    length = -(-count // (n_shares * unit)) * unit
    return [min(number * length, count) for number in range(n_shares + 1)]


def edges_of(counts: Sequence[int]) -> list[int]:
    """Return the edges of shares of these sizes."""
    return [0, *accumulate(counts)]


def sizes_of(edges: Sequence[int]) -> list[int]:
    """Return the sizes of shares."""
    return [end - start for start, end in pairwise(edges)]


def pieces(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the size of consecutive pieces of at most `most` elements."""
    for start in range(0, count, most):
        yield start, min(most, count - start)
