"""The linked library of kernels, loaded: returns addresses by name. Imports no compiler."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Libraries", "Library", "load"]

_MODE = os.RTLD_NOW | os.RTLD_LOCAL
_turns = itertools.count(1)


class Library:
    """A shared library of compiled loops and kernels, loaded for the life of the process."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._loaded = loaded

    def address(self, symbol: str) -> int | None:
        """Return the address of a function; None if the library lacks it."""
        try:
            return ctypes.addressof(ctypes.c_char.in_dll(self._loaded, symbol))
        except ValueError:
            return None


class Libraries(Library):
    """Several libraries, which together have each function once."""

    def __init__(self, parts: Sequence[Library]) -> None:
        self._parts = parts

    def address(self, symbol: str) -> int | None:
        """Return the address of a function; None if no library has it."""
        found = (part.address(symbol) for part in self._parts)
        return next((address for address in found if address is not None), None)


def load(path: Path) -> Library | None:
    """Load a library; None if there is none, or this process may not run it.

    All symbols are resolved immediately, so that a missing one is noticed here and not in the
    middle of a call.
    """
    for way in (_load_in_place, _load_from_memory):
        try:
            return Library(way(path))
        except (OSError, AttributeError):
            continue
    return None


def _load_in_place(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path), mode=_MODE)


def _load_from_memory(path: Path) -> ctypes.CDLL:
    """Load a library from a place where no code may be run: a cache that is mounted noexec."""
    data = path.read_bytes()
    descriptor = os.memfd_create("gpucoll-kernels", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        # Libraries are identified by path, and descriptor numbers recur: each gets its own path.
        turn = "./" * next(_turns)
        return ctypes.CDLL(f"/proc/self/fd/{turn}{descriptor}", mode=_MODE)
    finally:
        os.close(descriptor)
