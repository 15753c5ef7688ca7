"""Topologies: which rank averages with which others, with which weights, in which round.

Entry ``[i, j]`` of a round's matrix is the weight with which rank i takes the array of rank j.
Every row and every column adds up to one (doubly stochastic), so a round leaves the mean over the
ranks as it is. All ranks reach each other, so the rounds bring every rank to that mean.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll import ArgumentError, ArgumentTypeError

__all__ = ["Topology", "exponential", "from_matrix", "grid", "one_peer_exponential", "ring"]

Matrix = npt.NDArray[np.float64]


class Topology:
    """The weights of each round; after the last round the first one comes again.

    Made by the functions of this module. Read-only, and the same on every rank.
    """

    def __init__(self, rounds: Sequence[Matrix]) -> None:
        for matrix in rounds:
            matrix.flags.writeable = False
        self.rounds = tuple(rounds)
        self.digest = hashlib.sha256(b"".join(each.tobytes() for each in rounds)).hexdigest()[:16]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.rounds[0])

    def matrix(self, step: int = 0) -> Matrix:
        """Return the weights of a step, shape (ranks, ranks)."""
        return self.rounds[step % len(self.rounds)]

    def sources(self, rank: int, step: int = 0) -> dict[int, float]:
        """Return the other ranks whose arrays a rank takes in a step, and their weights."""
        row = self.matrix(step)[rank]
        return {int(other): float(row[other]) for other in np.flatnonzero(row) if other != rank}

    def destinations(self, rank: int, step: int = 0) -> list[int]:
        """Return the other ranks that take this rank's array in a step."""
        return [int(other) for other in np.flatnonzero(self.matrix(step)[:, rank]) if other != rank]

    def partners(self, rank: int) -> list[int]:
        """Return the ranks with which a rank has to do in any round, in either direction."""
        used = np.sum(self.rounds, axis=0)
        return [int(other) for other in np.flatnonzero(used[rank] + used[:, rank]) if other != rank]

    def __repr__(self) -> str:
        count = len(self.rounds)
        return f"<Topology of {self.world_size} ranks, {count} round{'s' * (count > 1)}>"


def ring(n: int) -> Topology:
    """Return a ring of n ranks: each averages with the one before and the one behind it.

    The consensus error falls by the factor 1/3 + 2/3 cos(2 pi / n) in every round (n > 2).
    """
    shifts = sorted({0, 1 % _size(n), -1 % n})
    return Topology([_circulant(n, dict.fromkeys(shifts, 1 / len(shifts)))])


def exponential(n: int) -> Topology:
    """Return the static exponential graph: rank i takes from i - 1, i - 2, i - 4, ...

    The consensus error falls by the factor (L - 1) / (L + 1) in every round, if n is 2**L.
    """
    shifts = [0, *(2**k for k in range(_doublings(n)))]
    return Topology([_circulant(n, dict.fromkeys(shifts, 1 / len(shifts)))])


def one_peer_exponential(n: int) -> Topology:
    """Return the one-peer exponential graph: in round k rank i averages with i - 2**k alone.

    If n is a power of two, every rank has the mean after log2(n) rounds, up to rounding.
    """
    rounds = [_circulant(n, {0: 0.5, 2**k: 0.5}) for k in range(_doublings(n))]
    return Topology(rounds or [np.eye(1)])


def grid(rows: int, columns: int) -> Topology:
    """Return a grid, with rank r in row r // columns: each rank averages with up to four others.

    Two neighbours with a and b neighbours of their own take 1 / (1 + max(a, b)) from each other.
    """
    n = _size(rows, "rows") * _size(columns, "columns")
    places = np.arange(n).reshape(rows, columns)
    edges = [
        *zip(places[:, :-1].flat, places[:, 1:].flat, strict=True),
        *zip(places[:-1].flat, places[1:].flat, strict=True),
    ]
    degrees = np.bincount(np.array(edges, int).reshape(-1), minlength=n)
    matrix = np.zeros((n, n))
    for i, j in edges:
        matrix[i, j] = matrix[j, i] = 1 / (1 + max(degrees[i], degrees[j]))
    np.fill_diagonal(matrix, 1 - matrix.sum(axis=1))
    return Topology([matrix])


def from_matrix(weights: Any) -> Topology:
    """Return the topology of your own weights.

    Parameters
    ----------
    weights : array_like
        Shape (n, n), or (rounds, n, n) for several rounds. Entry ``[i, j]`` is the weight with
        which rank i takes the array of rank j.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        A weight is negative or no number, a row or a column does not add up to one (to rounding in
        the array's own dtype), the ranks are not connected, or they would take turns for ever and
        never agree.
    """
    try:
        given = np.asarray(weights)
        rounds = np.array(given, np.float64)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"from_matrix needs an array of weights: {error}") from error
    if rounds.ndim == 2:
        rounds = rounds[None]
    if rounds.ndim != 3 or rounds.shape[1] != rounds.shape[2] or not rounds.size:
        raise ArgumentError(
            "from_matrix needs weights of shape (ranks, ranks) or (rounds, ranks, ranks); got "
            f"shape {given.shape}"
        )
    digits = given.dtype if given.dtype.kind == "f" else np.dtype(np.float64)
    for number, matrix in enumerate(rounds):
        where = f" of round {number}" if len(rounds) > 1 else ""
        _check_stochastic(matrix, len(matrix) * float(np.finfo(digits).eps), where)
    _check_connected(rounds)
    return Topology(list(rounds))


def _size(n: object, name: str = "n") -> int:
    try:
        size = operator.index(n)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(f"{name} must be an int; got {n!r}") from None
    if size < 1:
        raise ArgumentError(f"{name} must be at least 1; got {size}")
    return size


def _doublings(n: int) -> int:
    """Return how often 1 must be doubled to reach n."""
    return math.ceil(math.log2(_size(n)))


def _circulant(n: int, weights: dict[int, float]) -> Matrix:
    """Return the matrix with which every rank takes from those at the same distances before it."""
    ranks, matrix = np.arange(n), np.zeros((n, n))
    for shift, weight in weights.items():
        matrix[ranks, (ranks - shift) % n] += weight
    return matrix


def _check_stochastic(matrix: Matrix, tolerance: float, where: str) -> None:
    """Raise unless all weights are at least 0, and rows and columns add up to one."""
    wrong = np.argwhere(~(np.isfinite(matrix) & (matrix >= 0)))
    if len(wrong):
        i, j = map(int, wrong[0])
        raise ArgumentError(f"weight [{i}, {j}]{where} is {matrix[i, j]}: give a number from 0 up")
    for axis, name in ((1, "row"), (0, "column")):
        sums = matrix.sum(axis=axis)
        worst = int(np.abs(sums - 1).argmax())
        if abs(sums[worst] - 1) > tolerance:
            raise ArgumentError(
                f"{name} {worst}{where} of the weights adds up to {sums[worst]:.9g} instead of "
                "1: the matrix must be doubly stochastic, or the mean over the ranks would move"
            )


def _check_connected(rounds: npt.NDArray[np.float64]) -> None:
    """Raise unless powers of one pass through the rounds come to link every two ranks."""
    n = rounds.shape[1]
    linked = np.eye(n, dtype=bool) | (rounds > 0).any(axis=0)
    for _ in range(_doublings(n) + 1):
        linked = linked @ linked
    if not linked.all():
        apart = sorted({tuple(map(int, np.flatnonzero(row))) for row in linked})
        raise ArgumentError(
            f"the topology is not connected: ranks {list(apart[0])} never hear of ranks "
            f"{list(apart[1])}. Add weights between them"
        )
    product = np.eye(n, dtype=bool)
    for matrix in rounds:
        product = (matrix > 0) @ product
    for _ in range(2 * _doublings(n) + 1):  # Wielandt: (n - 1)**2 + 1 passes link all, or none do
        product = product @ product
    if not product.all():
        raise ArgumentError(
            "the ranks of this topology only pass their arrays around and never agree: let each "
            "keep a part of its own (weights on the diagonal)"
        )
