"""Python's ints in reductions: the result is exact, whatever its size.

Ints travel as int64, like NumPy's numbers and arrays of that dtype, which they may meet in one
call. If the result of an op may not fit into int64, every rank that passed an int gets all inputs
and computes the result itself, in Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gpucoll.arrays.buffer import Buffer
from gpucoll.arrays.library import Template
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.kernels.cpu.addresses import KEPT, KEPT_COUNT
from gpucoll.types import ReduceOp

_DTYPE, _ITEM_BYTES = "int64", 8
_OVERFLOWING = ("sum", "prod", "avg", "scaled_sum")
"""Ops whose results may be larger than their inputs."""


def _is_integer(template: Template) -> bool:
    number = template.number
    return number is not None and issubclass(number, int) and not issubclass(number, bool)


def is_int64_number(template: Template) -> bool:
    """Return whether this is an int, or a NumPy number of the dtype as which ints travel."""
    return template.number is not None and template.dtype == _DTYPE


def may_overflow(collective: Collective, op: ReduceOp | None) -> bool:
    """Return whether this reduces integers to a result that 64 bits may not hold."""
    if op is None or collective.has_blocks:  # an int has no blocks
        return False
    return op.name in _OVERFLOWING


def is_exact(collective: Collective, op: ReduceOp | None, template: Template) -> bool:
    """Return whether the result is to be computed exactly."""
    return may_overflow(collective, op) and _is_integer(template)


def check_range(template: Template, what: str = "x") -> None:
    """Raise ArgumentTypeError for a Python int that int64 does not hold."""
    if _is_integer(template) and template.dtype != _DTYPE:
        raise ArgumentTypeError(
            f"{what} is an int that int64 does not hold; in collectives Python's ints travel as "
            "int64, whatever the other ranks pass: pass numpy.uint64(x) on every rank, or a float, "
            "or use "
            "all_reduce_object"
        )


class KeptInputs:
    """The memory in which a reduction of ints leaves its inputs.

    Parameters
    ----------
    op : ReduceOp
        The op of the reduction.
    world_size : int
        Number of ranks.

    Attributes
    ----------
    buffer : Buffer
        The request's destination. The inputs are stored after it.
    """

    def __init__(self, op: ReduceOp, world_size: int) -> None:
        self._op = op
        # Not NumPy's memory: inside `shared_arrays`, other ranks would reduce into it.
        self._words = np.frombuffer(bytearray(_ITEM_BYTES * (KEPT + world_size)), np.int64)
        self._words[KEPT_COUNT] = -1
        address = self._words.ctypes.data
        self.buffer = Buffer(address, (), _DTYPE, _ITEM_BYTES, self._words)

    def forget(self) -> None:
        """Note that there is no input: rank 0 of an exclusive scan gets the identity."""
        self._words[KEPT_COUNT] = 0

    def finish(self) -> int:
        """Return the result."""
        count = int(self._words[KEPT_COUNT])
        if count < 0:
            raise ArgumentError(
                "x is an int, but other ranks passed an array in shared memory (comm.empty, "
                "shared_arrays): the sum of ints is exact only if every rank passes a number. "
                "Pass the same kind on every rank"
            )
        if count == 0:
            return int(self._words[0])
        return exact_result(self._op, self._words[KEPT : KEPT + count].tolist())


def exact_result(op: ReduceOp, values: Sequence[int]) -> int:
    """Return the result of these ranks' ints.

    Parameters
    ----------
    op : ReduceOp
        An op that may overflow; "avg" rounds toward zero.
    values : sequence of int
        The ints, by rank.
    """
    if op.name == "prod":
        return math.prod(values)
    total = sum(values)
    if op.name == "avg":
        return abs(total) // len(values) * (1 if total >= 0 else -1)
    return total if op.name == "sum" else total * int(op.factor or 0)
