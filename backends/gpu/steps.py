"""What calls on GPU arrays enqueue beside calls of a library, as data."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Place(NamedTuple):
    """Who this rank is."""

    rank: int
    world_size: int


class Copy(NamedTuple):
    """A copy on the device."""

    destination: int
    source: int
    size_bytes: int


class Fill(NamedTuple):
    """Elements of one value."""

    destination: int
    element: bytes
    n_elements: int


class Run(NamedTuple):
    """A kernel."""

    enqueue: Callable[[int], None]
    """Puts it on a stream, as often as wanted."""


Step = Copy | Fill | Run
