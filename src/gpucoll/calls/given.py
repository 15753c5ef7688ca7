"""The arguments of a collective that its user gave by name, before they are checked."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

from gpucoll.types import ReduceOp

CountsName: TypeAlias = Literal["counts", "receive_counts"]


class Given(TypedDict, total=False):
    """Only what the collective's method has is there; `preparation.Arguments` is the same, checked.

    ``root`` may be any object, and ``counts`` and ``receive_counts`` too: the checks say what is
    wrong with them. ``out`` is an array of any library, or a list of them.
    """

    op: str | ReduceOp
    root: Any
    out: Any
    counts: Any
    receive_counts: Any
