"""Ranks, tags and sizes as mpi4py takes them: numbers of any kind, cut to whole ones.

Lists of numbers, and the counts of a message, must hold whole ones, there and here.
"""

from __future__ import annotations

import operator
from typing import Any


def integer(given: Any) -> int:
    """Return a number as an int: what is after the point is cut, as C does.

    Raises
    ------
    TypeError
        It is no number.
    """
    try:
        return int(operator.index(given))
    except TypeError:
        convert = getattr(type(given), "__int__", None)
    if convert is None:
        raise TypeError(f"an integer is required; got {given!r}")
    return int(convert(given))
