"""Vectors that gpucoll's calls take directly: NumPy arrays with adjacent blocks.

They are the most frequent case. `specifications.Vector` reads all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpucoll.integrations.mpi4py.datatypes import Datatype

if TYPE_CHECKING:
    from gpucoll.arrays.library import AnyArray
    from gpucoll.calls.given import Unchecked
    from gpucoll.integrations.mpi4py.specifications import AnySpec

_array = np.ndarray


def is_plain(x: AnyArray) -> bool:
    """Return whether x is exactly a NumPy array, in native byte order and contiguous."""
    return type(x) is _array and x.flags.c_contiguous and x.dtype.isnative


def flat(x: AnyArray) -> AnyArray:
    """Return an array as one row: a view."""
    return x if x.ndim == 1 else x.reshape(-1)


def plain_vector(message: AnySpec) -> tuple[AnyArray, Sequence[int]] | None:
    """Return the row of all blocks and their counts; None if the specification is not plain."""
    if type(message) not in (list, tuple) or not 2 <= len(message) <= 4:
        return None
    x, counts, displacements = message[0], message[1], None
    if not is_plain(x):
        return None
    if len(message) == 4:
        displacements = message[2]
    elif type(counts) is tuple:
        if len(counts) != 2:
            return None
        counts, displacements = counts
    if len(message) > 2 and not _is_of(message[-1], x.dtype):
        return None
    counts = _numbers(counts)
    if counts is None or (displacements is not None and not _follow(counts, displacements)):
        return None
    try:
        total = sum(counts)
    except TypeError:
        return None
    row = flat(x)
    return (row if row.size == total else row[:total]), counts


def _numbers(given: Unchecked) -> Sequence[int] | None:
    """Convert a list or an array of numbers to a list; return None for anything else."""
    if type(given) is _array and given.ndim == 1:
        numbers: list[int] = given.tolist()
        return numbers
    return given if type(given) in (list, tuple) else None


def _follow(counts: Unchecked, displacements: Unchecked) -> bool:
    """Return whether blocks are adjacent, from the first element on."""
    places, end = _numbers(displacements), 0
    if places is None or len(places) != len(counts):
        return False
    for count, place in zip(counts, places, strict=True):
        if count and place != end:
            return False
        end += count
    return True


def _is_of(datatype: object, dtype: np.dtype[np.generic]) -> bool:
    """Return whether a predefined datatype is the type of an array's elements."""
    if not isinstance(datatype, Datatype) or datatype._core is None:
        return False
    core = datatype._core
    return bool(core.combiner == "NAMED" and core.map.is_dense and core.map.element == dtype)
