"""Ranks, tags and sizes as mpi4py accepts them: any number, truncated to an int.

Lists of numbers and the counts of a message must be whole numbers, as in mpi4py.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpucoll.calls.given import Unchecked


def integer(given: Unchecked) -> int:
    """Convert a number to an int, dropping its fraction as C does.

    Raises
    ------
    TypeError
        The argument is not a number.
    """
    try:
        return int(operator.index(given))
    except TypeError:
        convert = getattr(type(given), "__int__", None)
    if convert is None:
        raise TypeError(f"an integer is required; got {given!r}")
    return int(convert(given))
