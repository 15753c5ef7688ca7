"""The interface of a measured library: one small class for each library implements it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gpucoll.bench.rank.arrays import Arrays

__all__ = ["Array", "Call", "Library", "Loop"]

Array = Any  # numpy's generic array types are of no use here: the dtype is only known at run time

Loop = Callable[[int], float]
"""Makes a call a number of times with nothing in between; returns the total seconds."""


@dataclass(frozen=True)
class Call:
    """A collective with all its arguments.

    `source` and `destination` are arrays in the bench's storage of `dtype` (see `inputs.STORAGE`;
    PyTorch's arrays on a GPU have `dtype` itself), with the lengths that `inputs.lengths` gives for
    every rank. In place they are the same array, or the smaller is a block of the larger one.

    `variant` is "private" for a plain call on ordinary arrays. Others are what a library offers in
    addition ("symmetric", "plan", "fused", "torch", "limit") and parts of a pattern ("blocking",
    "work"). `work_s` is how long a rank works during an asynchronous call. With a `list_length` the
    arrays consist of that many arrays of equal size, one after another, and the call is made on
    each of them.
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
        """Return the calls on each array of the list; without a list, this call."""
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
    """One library that has joined its other ranks.

    Attributes
    ----------
    rank, world_size : int
        The numbers that the library itself uses.
    reduce_scatter_block : int
        The block of its input where an in-place reduce_scatter puts its result.
    arrays : Arrays
        The kind of arrays that it is measured with.
    """

    arrays: Arrays
    rank: int
    world_size: int
    reduce_scatter_block: int

    def versions(self) -> dict[str, str]:
        """Return the versions of the library and of the parts that determine its speed."""
        ...

    def allocate(self, placement: str, count: int, dtype: str) -> Array:
        """Return an array of the kind of `arrays`, "private" or "symmetric"."""
        ...

    def loop(self, call: Call) -> Loop | None:
        """Return the tightest loop around the call; None if the library has no such call."""
        ...

    def path(self) -> str:
        """Return the path that the last call took; empty if the library does not report it."""
        ...

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        ...

    def close(self) -> None:
        """Leave the other ranks in an orderly way."""
        ...
