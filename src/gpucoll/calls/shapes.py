"""Shapes and counts: the shape of each collective's result, computed before anything moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError, ArgumentTypeError

MOST_ROWS = 2**63 - 1
"""The largest length of an array, which must fit into a word."""


class Result(NamedTuple):
    """The result of a collective on one rank.

    Attributes
    ----------
    shape : tuple of int
        The shape of the result.
    in_place_rows : int
        In place, the number of rows between the beginning of the output and that of the input.
    row_count : int
        Number of elements in a row.
    """

    shape: tuple[int, ...]
    in_place_rows: int = 0
    row_count: int = 1


def parse_shape(shape: object) -> tuple[int, ...]:
    """Return the shape of a new array as a tuple of int; raise if it is not a shape."""
    lengths: Any = shape if isinstance(shape, Sequence | np.ndarray) else (shape,)
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int | np.integer):
            raise ArgumentTypeError(f"shape must be an int or a sequence of them; got {shape!r}")
        if length < 0:
            raise ArgumentError(f"shape must not have negative lengths; got {shape!r}")
    whole = tuple(int(length) for length in lengths)
    if max(whole, default=0) > MOST_ROWS or math.prod(whole) > MOST_ROWS:
        raise ArgumentError(f"shape is not possible: no array has so many elements; got {shape!r}")
    return whole


def parse_counts(counts: object, world_size: int, name: str = "counts") -> tuple[int, ...]:
    """Return the counts of rows for each rank as a tuple; raise if they are invalid."""
    if isinstance(counts, str) or not isinstance(counts, Sequence | np.ndarray):
        raise ArgumentTypeError(
            f'{name} must be one number of rows per rank, or "auto"; got {counts!r}'
        )
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int | np.integer):
            raise ArgumentTypeError(f"{name} must be whole numbers of rows; got {count!r}")
    rows = tuple(int(count) for count in counts)
    if len(rows) != world_size:
        raise ArgumentError(f"{name} must have one entry per rank, {world_size}; got {len(rows)}")
    if min(rows) < 0:
        raise ArgumentError(f"{name} must not be negative; got {list(rows)}")
    if sum(rows) > MOST_ROWS:
        raise ArgumentError(
            f"{name} add up to {sum(rows)} rows, more than any array has; got {list(rows)}"
        )
    return rows


def check_rows(collective: Collective, shape: tuple[int, ...], rows: int, what: str) -> None:
    """Raise unless an input has `rows` rows."""
    if not shape:
        raise ArgumentError(f"{collective.spelled} with counts needs an array with rows; x is 0-d")
    if shape[0] != rows:
        raise ArgumentError(
            f"{collective.spelled}: x has {shape[0]} rows (shape {shape}), but {what} {rows}"
        )


def result_of(
    collective: Collective,
    shape: tuple[int, ...],
    rank: int,
    world_size: int,
    counts: tuple[int, ...] | None = None,
    receive_counts: tuple[int, ...] | None = None,
) -> Result:
    """Return the shape of this rank's result for an input of this shape.

    Raises
    ------
    ArgumentError
        The input does not fit: its rows do not divide by the ranks, or differ from the counts.
    """
    row_count = math.prod(shape[1:])
    if not collective.has_blocks:
        return Result(shape)
    if not collective.spreads:
        if counts is None:
            rows = shape[0] if shape else 1
            return Result((world_size * rows, *shape[1:]), rank * rows, row_count)
        check_rows(collective, shape, counts[rank], f"counts[{rank}] is")
        return Result((sum(counts), *shape[1:]), sum(counts[:rank]), row_count)
    if not collective.gathers:
        if counts is None:
            rows = _equal_rows(collective, shape, world_size)
            return Result((rows, *shape[1:]), -rank * rows, row_count)
        check_rows(collective, shape, sum(counts), "the counts add up to")
        return Result((counts[rank], *shape[1:]), -sum(counts[:rank]), row_count)
    if counts is None or receive_counts is None:
        _equal_rows(collective, shape, world_size)
        return Result(shape, 0, row_count)
    check_rows(collective, shape, sum(counts), "send_counts add up to")
    return Result((sum(receive_counts), *shape[1:]), 0, row_count)


def _equal_rows(collective: Collective, shape: tuple[int, ...], world_size: int) -> int:
    if not shape or shape[0] % world_size:
        raise ArgumentError(
            f"{collective.spelled}: axis 0 of x must divide into {world_size} equal blocks; got "
            f"shape {shape}. Pass counts for blocks of different sizes"
        )
    return shape[0] // world_size
