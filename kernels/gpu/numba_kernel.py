"""The reduce kernel that Numba compiles around a user's function, or runs in its simulator."""

from __future__ import annotations

from typing import Any

from numba import cuda


def make_kernel(load: Any, store: Any, convert: Any, function: Any) -> Any:
    """Return the kernel's Python function.

    Its arguments: the number of elements, a tuple of the destinations' addresses, one of the
    sources'.
    """

    def kernel(count, destinations, sources):
        for index in range(cuda.grid(1), count, cuda.gridsize(1)):
            total = load(sources[0], index)
            for place in range(1, len(sources)):
                total = convert(function(total, load(sources[place], index)))
            for place in range(len(destinations)):
                store(destinations[place], index, total)

    return kernel
