"""The arguments of a call as its user gave them, before they are checked; and what it returns."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

from gpucoll.types import ReduceOp

AnyInput: TypeAlias = Any
"""x or `out`: an array of any library, a number, or a list or tuple of arrays."""
AnyResult: TypeAlias = Any
"""What a call returns: an array or number of x's type, a list, a Work, or None.

The overloads of the methods in `gpucoll.api` say which of them it is for which arguments.
"""
AnyObject: TypeAlias = Any
"""A Python object that a rank has pickled: only the program knows its type."""
Unchecked: TypeAlias = Any
"""An argument of any type: the check of the argument says what is wrong with it."""
CountsName: TypeAlias = Literal["counts", "receive_counts"]


class Given(TypedDict, total=False):
    """Only what the collective's method has is there; `preparation.Arguments` is the same, checked.

    ``out`` may also be a list of arrays.
    """

    op: str | ReduceOp
    root: Unchecked
    out: AnyInput
    counts: Unchecked
    receive_counts: Unchecked
