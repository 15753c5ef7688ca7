"""What a collective must return, in NumPy, from the inputs of all ranks.

One function per collective: the inputs of all ranks, by rank, and the call's arguments; returns the
results of all ranks, by rank; None for one that gets nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any

import numpy as np

from gpucoll.kernels import reference
from gpucoll.types import ReduceOp


def _parse(op: str | ReduceOp, n_inputs: int) -> tuple[str, float]:
    """Return the operation's name and its parameter: the factor, or what avg divides by."""
    parsed = ReduceOp.parse(op)
    return parsed.name, n_inputs if parsed.name == "avg" else (parsed.factor or 1)


def all_reduce(inputs: Sequence[np.ndarray], op: str | ReduceOp = "sum") -> list[np.ndarray]:
    """Op over ranks 0..P-1, in that order, on every rank."""
    name, parameter = _parse(op, len(inputs))
    return [reference.reduce(name, inputs, parameter)] * len(inputs)


def reduce(
    inputs: Sequence[np.ndarray], op: str | ReduceOp = "sum", root: int = 0
) -> list[np.ndarray | None]:
    """The same on the root."""
    return _on_root(all_reduce(inputs, op)[0], root, len(inputs))


def scan(inputs: Sequence[np.ndarray], op: str | ReduceOp = "sum") -> list[np.ndarray]:
    """Op over ranks 0..r."""
    return reference.scan(*_scanned(inputs, op))


def exclusive_scan(inputs: Sequence[np.ndarray], op: str | ReduceOp = "sum") -> list[np.ndarray]:
    """Op over ranks 0..r-1; rank 0 gets the op's identity."""
    return reference.exclusive_scan(*_scanned(inputs, op))


def _scanned(
    inputs: Sequence[np.ndarray], op: str | ReduceOp
) -> tuple[str, Sequence[np.ndarray], float]:
    name, parameter = _parse(op, len(inputs))
    return name, inputs, parameter


def broadcast(inputs: Sequence[np.ndarray], root: int = 0) -> list[np.ndarray]:
    """The root's x on every rank."""
    return [inputs[root]] * len(inputs)


def all_gather(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Every rank's rows, by rank, on every rank; 0-d inputs are a row each."""
    return [np.concatenate([np.atleast_1d(x) for x in inputs])] * len(inputs)


def gather(inputs: Sequence[np.ndarray], root: int = 0) -> list[np.ndarray | None]:
    """The same on the root."""
    return _on_root(all_gather(inputs)[0], root, len(inputs))


def scatter(
    inputs: Sequence[np.ndarray], root: int = 0, counts: Sequence[int] | None = None
) -> list[np.ndarray]:
    """Block r of the root's x on rank r."""
    return blocks(inputs[root], len(inputs), counts)


def reduce_scatter(
    inputs: Sequence[np.ndarray], op: str | ReduceOp = "sum", counts: Sequence[int] | None = None
) -> list[np.ndarray]:
    """Block r of the reduction on rank r."""
    return blocks(all_reduce(inputs, op)[0], len(inputs), counts)


def all_to_all(
    inputs: Sequence[np.ndarray], send_counts: Sequence[Sequence[int]] | None = None
) -> list[np.ndarray]:
    """Block s of rank r's result is block r of rank s; `send_counts` of all ranks, by rank."""
    ranks = range(len(inputs))
    sent = [
        blocks(inputs[rank], len(inputs), None if send_counts is None else send_counts[rank])
        for rank in ranks
    ]
    return [np.concatenate([sent[sender][rank] for sender in ranks]) for rank in ranks]


def blocks(x: np.ndarray, n_blocks: int, counts: Sequence[int] | None = None) -> list[np.ndarray]:
    """Axis 0 of x in blocks of so many rows; by default of equally many."""
    rows = [len(x) // n_blocks] * n_blocks if counts is None else counts
    return [x[sum(rows[:place]) :][: rows[place]] for place in range(n_blocks)]


def _on_root(result: np.ndarray, root: int, world_size: int) -> list[np.ndarray | None]:
    return [result if rank == root else None for rank in range(world_size)]


def broadcast_object(values: Sequence[Any], root: int = 0) -> list[Any]:
    """The root's object on every rank."""
    return [values[root]] * len(values)


def all_gather_object(values: Sequence[Any]) -> list[list[Any]]:
    """The objects of all ranks, by rank, on every rank."""
    return [list(values)] * len(values)


def gather_object(values: Sequence[Any], root: int = 0) -> list[list[Any] | None]:
    """The objects of all ranks on the root."""
    return [list(values) if rank == root else None for rank in range(len(values))]


def scatter_object(values: Sequence[Any]) -> list[Any]:
    """Item r of the root's sequence on rank r."""
    return list(values)


def all_reduce_object(values: Sequence[Any], function: Callable[[Any, Any], Any]) -> list[Any]:
    """The objects combined left to right, on every rank."""
    return [fold(function, values)] * len(values)
