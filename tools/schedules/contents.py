"""The content of blocks in a run without payload: who contributed, and in which order."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

from gpucoll.errors import ArgumentError

EMPTY: Final = -1
"""The content of a block into which nothing has been written yet."""
_SHIFT: Final = 40


class Contents:
    """Symbolic values, each a number: equal numbers are equal values, reduced in the same order.

    `leaf` makes a rank's contribution, `combine` the value of two values. A value is stored once,
    however many blocks have it. So a run with thousands of ranks needs only one number per block.
    """

    def __init__(self) -> None:
        self._leaves: dict[Hashable, int] = {}
        self._pairs: dict[int, int] = {}
        self._made: list[int] = []  # by value: its two operands, packed; a leaf: -1 - index
        self._names: list[Hashable] = []

    def leaf(self, name: Hashable) -> int:
        """Return the value that stands for `name`: for instance (rank, block)."""
        value = self._leaves.get(name)
        if value is None:
            value = self._leaves[name] = len(self._made)
            self._made.append(-1 - len(self._names))
            self._names.append(name)
        return value

    def combine(self, first: int, second: int) -> int:
        """Return the value of ``first op second``."""
        if EMPTY in (first, second):
            raise ArgumentError("schedule: a block is reduced into which nothing was written")
        key = first << _SHIFT | second
        value = self._pairs.get(key)
        if value is None:
            value = self._pairs[key] = len(self._made)
            self._made.append(key)
        return value

    def operands(self, value: int) -> tuple[int, int] | None:
        """Return the two values that were combined into a value; None for a contribution."""
        made = self._made[value]
        return None if made < 0 else (made >> _SHIFT, made & ((1 << _SHIFT) - 1))

    def contributions(self, value: int) -> list[Any]:
        """Return the names of all contributions to a value, in the order of the operands."""
        if value == EMPTY:
            return []
        found: list[Any] = []
        left = [value]
        while left:
            made = self._made[left.pop()]
            if made < 0:
                found.append(self._names[-1 - made])
            else:
                left += (made & ((1 << _SHIFT) - 1), made >> _SHIFT)
        return found

    def spelled(self, value: int) -> str:
        """Return a value as text with its brackets: ``((0 1) 2)``."""
        if value == EMPTY:
            return "empty"
        operands = self.operands(value)
        if operands is None:
            return str(self._names[-1 - self._made[value]])
        return f"({self.spelled(operands[0])} {self.spelled(operands[1])})"
