"""The linked library of kernels, loaded: names become addresses. Imports no compiler."""

from __future__ import annotations

import ctypes
import itertools
import os
from pathlib import Path

__all__ = ["Library", "load"]

_MODE = os.RTLD_NOW | os.RTLD_LOCAL
_turns = itertools.count(1)


class Library:
    """A shared library of compiled loops and kernels, which stays for the life of the process."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._loaded = loaded

    def address(self, symbol: str) -> int | None:
        """Return where a function is; None where the library does not have it."""
        try:
            return ctypes.addressof(ctypes.c_char.in_dll(self._loaded, symbol))
        except ValueError:
            return None


def load(path: Path) -> Library | None:
    """Load a library; None where there is none, or this process may not run it.

    Symbols are all resolved at once, so that one that is missing is known here and not in the
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
    """Load a library that lies where nothing may be run: a cache that is mounted noexec."""
    data = path.read_bytes()
    descriptor = os.memfd_create("gpucoll-kernels", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        # A library is known by its path, and descriptors' numbers come again: each has its own.
        turn = "./" * next(_turns)
        return ctypes.CDLL(f"/proc/self/fd/{turn}{descriptor}", mode=_MODE)
    finally:
        os.close(descriptor)
