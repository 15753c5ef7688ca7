"""Grids and graphs of ranks as numbers, without communicators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeAlias, TypeGuard

from gpucoll.integrations.mpi4py.constants import CART, DIST_GRAPH, GRAPH, PROC_NULL, WEIGHTS_EMPTY
from gpucoll.integrations.mpi4py.errors import argument_error
from gpucoll.integrations.mpi4py.integers import integer

Weights: TypeAlias = Sequence[int] | int | None
"""A weight for each edge, or UNWEIGHTED, WEIGHTS_EMPTY or None."""


class Topology(Protocol):
    """The neighbours of each rank."""

    number: int
    kind: str

    def neighbours(self, rank: int) -> tuple[list[int], list[int]]:
        """Return the ranks from which a rank receives, and those to which it sends, by edge."""


class Cart:
    """A grid in C order; periodic dimensions wrap around.

    Parameters
    ----------
    dims : sequence of int
        Ranks along each dimension.
    periods : sequence of bool, or bool
        Which dimensions are periodic.
    """

    number, kind = CART, "cart"

    def __init__(self, dims: Sequence[int], periods: Sequence[bool] | bool | None = None) -> None:
        self.dims = tuple(int(n) for n in ([dims] if isinstance(dims, int) else dims))
        if min(self.dims, default=1) < 1:
            raise argument_error(f"a grid of {list(self.dims)} has no ranks", "ERR_DIMS")
        given = [False] * len(self.dims) if periods is None else periods
        if isinstance(given, int):
            given = [given] * len(self.dims)
        self.periods = tuple(bool(item) for item in given)
        if len(self.periods) != len(self.dims):
            raise ValueError(f"expecting {len(self.dims)} items, got {len(self.periods)}")
        self.size = math.prod(self.dims)

    def coords(self, rank: int) -> list[int]:
        """Return the coordinates of a rank."""
        rank = integer(rank)
        if not 0 <= rank < self.size:
            raise argument_error(f"rank must be 0 to {self.size - 1}; got {rank}", "ERR_RANK")
        found: list[int] = []
        for n in reversed(self.dims):
            rank, place = divmod(rank, n)
            found.insert(0, place)
        return found

    def rank_at(self, coords: Sequence[int]) -> int:
        """Return the rank at some coordinates; PROC_NULL if they are beyond an edge."""
        rank = 0
        for place, n, is_circle in zip(coords, self.dims, self.periods, strict=True):
            if is_circle:
                place %= n
            elif not 0 <= place < n:
                return PROC_NULL
            rank = rank * n + place
        return rank

    def shifted(self, rank: int, direction: int, step: int) -> tuple[int, int]:
        """Return the ranks from which and to which a shift moves data."""
        direction, step = integer(direction), integer(step)
        if not 0 <= direction < len(self.dims):
            raise argument_error(
                f"direction must be 0 to {len(self.dims) - 1}; got {direction}", "ERR_DIMS"
            )
        ends = []
        for move in (-step, step):
            coords = self.coords(rank)
            coords[direction] += move
            ends.append(self.rank_at(coords))
        return ends[0], ends[1]

    def neighbours(self, rank: int) -> tuple[list[int], list[int]]:
        """Return both neighbours along each dimension, the lower one first."""
        both = [end for axis in range(len(self.dims)) for end in self.shifted(rank, axis, 1)]
        return both, list(both)


class Graph:
    """A graph of the neighbours of all ranks: those of rank r end at ``index[r]`` in `edges`."""

    number, kind = GRAPH, "graph"

    def __init__(self, index: Sequence[int], edges: Sequence[int]) -> None:
        self.index, self.edges = [int(n) for n in index], [int(n) for n in edges]
        if len(self.index) > 1 and self.index[0] == 0 and self.index[-1] == len(self.edges):
            del self.index[0]  # mpi4py accepts an index with a leading 0, too
        self.size = len(self.index)
        if self.index and self.index[-1] != len(self.edges):
            raise argument_error(
                f"index ends at {self.index[-1]}, but there are {len(edges)} edges"
            )

    def neighbours(self, rank: int) -> tuple[list[int], list[int]]:
        """Return a rank's neighbours."""
        begin = self.index[rank - 1] if rank else 0
        found = self.edges[begin : self.index[rank]]
        return found, list(found)


class DistGraph:
    """A graph given by the neighbours of this rank."""

    number, kind = DIST_GRAPH, "dist_graph"

    def __init__(
        self,
        sources: Sequence[int] | None,
        destinations: Sequence[int] | None,
        incoming: Weights,
        outgoing: Weights,
    ) -> None:
        self.sources, self.destinations = list(sources or []), list(destinations or [])
        for given, edges in ((incoming, self.sources), (outgoing, self.destinations)):
            n_weights = 0 if given == WEIGHTS_EMPTY else len(given) if _is_list(given) else None
            if n_weights is not None and n_weights != len(edges):
                raise ValueError(f"expecting {len(edges)} weights, got {n_weights}")
        self.is_weighted = any(
            _is_list(given) or given == WEIGHTS_EMPTY for given in (incoming, outgoing)
        )
        self.weights = (
            list(incoming) if _is_list(incoming) else [1] * len(self.sources),
            list(outgoing) if _is_list(outgoing) else [1] * len(self.destinations),
        )

    def neighbours(self, rank: int) -> tuple[list[int], list[int]]:
        """Return this rank's neighbours."""
        return self.sources, self.destinations


def _is_list(given: object) -> TypeGuard[list[int] | tuple[int, ...]]:
    return isinstance(given, list | tuple)


def dimensions(dims: int | Sequence[int]) -> list[int]:
    """Return numbers of ranks along dimensions; an int gives the number of dimensions."""
    return [0] * dims if isinstance(dims, int) else [int(n) for n in dims]


def compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """Factor `nnodes` ranks into a grid, as square as possible; dimensions other than 0 stay."""
    nnodes, found = integer(nnodes), dimensions(dims)
    if min(found, default=0) < 0:
        raise argument_error(f"negative dimension in {found}", "ERR_DIMS")
    fixed = math.prod(n for n in found if n)
    free = [axis for axis, n in enumerate(found) if n == 0]
    if nnodes < 1 or nnodes % fixed or (not free and fixed != nnodes):
        raise argument_error(f"{nnodes} ranks do not fill a grid of {found}", "ERR_DIMS")
    for axis, n in zip(free, _square(nnodes // fixed, len(free)), strict=True):
        found[axis] = n
    return found


def _square(size: int, n_factors: int) -> list[int]:
    """Return factors of a number in descending order, with the largest as small as possible."""
    if n_factors < 2:
        return [size] * n_factors
    best: list[int] | None = None
    for first in range(1, size + 1):
        if size % first or first**n_factors < size:
            continue
        rest = _square(size // first, n_factors - 1)
        if rest[0] <= first:
            best = [first, *rest]
            break
    assert best is not None
    return best
