"""What a collective must return: SEMANTICS.md in NumPy, from the inputs of all ranks.

One function per collective: the inputs of all ranks, by rank, and the call's arguments; returns the
results of all ranks, by rank. Those of other collectives have their place here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any

import numpy as np

from gpucoll.kernels import reference
from gpucoll.types import ReduceOp


def all_reduce(inputs: Sequence[np.ndarray], op: str | ReduceOp = "sum") -> list[np.ndarray]:
    """Op over ranks 0..P-1, in that order, on every rank."""
    parsed = ReduceOp.parse(op)
    parameter = len(inputs) if parsed.name == "avg" else (parsed.factor or 1)
    return [reference.reduce(parsed.name, inputs, parameter)] * len(inputs)


def broadcast(inputs: Sequence[np.ndarray], root: int = 0) -> list[np.ndarray]:
    """The root's x on every rank."""
    return [inputs[root]] * len(inputs)


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
