"""What the bench asks of a library, whichever it is: one small class for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gpucoll.bench.rank.arrays import Arrays

__all__ = ["Array", "Call", "Library", "Loop"]

Array = Any  # numpy's generic array types say nothing here: the dtype is known at run time only

Loop = Callable[[int], float]
"""Make a call so many times, with nothing in between; return the seconds that all of them took."""


@dataclass(frozen=True)
class Call:
    """A collective with everything that it is called with.

    `source` and `destination` are arrays in the bench's storage of `dtype` (see `inputs.STORAGE`;
    PyTorch's on a GPU: of `dtype`), as long as `inputs.lengths` says on every rank; in place they
    are the same array, or the smaller is a block of the larger one. `variant` is what a library has
    beside its plain call on ordinary arrays ("private"): "symmetric", "plan", "fused", "torch",
    "limit"; or a part of a pattern: "blocking", "work". `work_s` is how long a rank works beside an
    asynchronous call. With a `list_length` the arrays are so many of equal size, one after another,
    and the call is made on each of them.
    """

    collective: str
    variant: str
    dtype: str
    redop: str
    root: int
    source: Array
    destination: Array
    in_place: bool
    list_length: int = 1
    work_s: float = 0.0

    def pieces(self) -> list[Call]:
        """Return the call on each array of the list; on one array, this call."""
        if self.list_length == 1:
            return [self]
        sources = list(self.source.reshape((self.list_length, -1)))
        same = self.source is self.destination
        destinations = sources if same else list(self.destination.reshape((self.list_length, -1)))
        return [
            replace(self, source=source, destination=destination, list_length=1)
            for source, destination in zip(sources, destinations, strict=True)
        ]


class Library(Protocol):
    """One library, joined to its other ranks already.

    Attributes
    ----------
    rank, world_size : int
        As the library itself numbers its ranks.
    reduce_scatter_block : int
        The block of its input where an in-place reduce_scatter leaves its result.
    arrays : Arrays
        What kind of arrays it is measured with.
    """

    arrays: Arrays
    rank: int
    world_size: int
    reduce_scatter_block: int

    def versions(self) -> dict[str, str]:
        """Return what to note about the library: its version, and what decides about its speed."""
        ...

    def allocate(self, placement: str, count: int, dtype: str) -> Array:
        """Return an array of `arrays`' kind, "private" or "symmetric"."""
        ...

    def loop(self, call: Call) -> Loop | None:
        """Return the tightest loop there is around the call, or None: the library has no such."""
        ...

    def path(self) -> str:
        """Return which way the last call took, empty where the library does not say."""
        ...

    def barrier(self) -> None:
        """Return when every rank has come here."""
        ...

    def close(self) -> None:
        """Leave the other ranks in good order."""
        ...
