"""The reduce kernel that Numba compiles around a user's function, or runs in its simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from numba import cuda

if TYPE_CHECKING:
    from gpucoll.types import AnyScalar


def make_kernel(
    load: Callable[..., AnyScalar],
    store: Callable[..., AnyScalar],
    convert: Callable[..., AnyScalar],
    function: Callable[..., AnyScalar],
) -> Callable[..., None]:
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
