"""What the bench asks of a library, whichever it is: one small class for each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

__all__ = ["Array", "Call", "Library", "Loop", "repeated"]

Array = Any  # numpy's generic array types say nothing here: the dtype is known at run time only

Loop = Callable[[int], float]
"""Make a call so many times, with nothing in between; return the seconds that all of them took."""


@dataclass(frozen=True)
class Call:
    """A collective with everything that it is called with.

    `source` and `destination` are arrays in the bench's storage of `dtype` (see `inputs.STORAGE`),
    and the same array in place. `variant` is what a library has beside its plain call on ordinary
    arrays ("private"): "symmetric", "plan", "limit".
    """

    collective: str
    variant: str
    dtype: str
    redop: str
    root: int
    source: Array
    destination: Array

    @property
    def in_place(self) -> bool:
        """Whether the result goes where the input was."""
        return self.source is self.destination


class Library(Protocol):
    """One library, joined to its other ranks already."""

    rank: int
    world_size: int

    def versions(self) -> dict[str, str]:
        """Return what to note about the library: its version, and what decides about its speed."""
        ...

    def allocate(self, placement: str, count: int, dtype: str) -> Array:
        """Return an array in the bench's storage of `dtype`, "private" or "symmetric"."""
        ...

    def loop(self, call: Call) -> Loop | None:
        """Return the tightest loop there is around the call, or None: the library has no such."""
        ...

    def barrier(self) -> None:
        """Return when every rank has come here."""
        ...

    def close(self) -> None:
        """Leave the other ranks in good order."""
        ...


def repeated(function: Any, *arguments: Any) -> Loop:
    """Return the loop that calls `function` with none, two or three positional arguments.

    Each count is written out: unpacking a tuple would cost as much as a tenth of the quickest call.
    """
    now = time.perf_counter

    def run_0(reps: int) -> float:
        started = now()
        for _ in repeat(None, reps):
            function()
        return now() - started

    def run_2(reps: int) -> float:
        first, second = arguments
        started = now()
        for _ in repeat(None, reps):
            function(first, second)
        return now() - started

    def run_3(reps: int) -> float:
        first, second, third = arguments
        started = now()
        for _ in repeat(None, reps):
            function(first, second, third)
        return now() - started

    return {0: run_0, 2: run_2, 3: run_3}[len(arguments)]
