"""Numbers with names, for Python and compiled loops."""

from __future__ import annotations

from enum import EnumMeta, IntEnum


class CodesClass(EnumMeta):
    """The type of classes of codes, by which Numba knows them."""


class Codes(IntEnum, metaclass=CodesClass):
    """Numbers with names. To a loop a name is a plain number, not a type of its own."""
