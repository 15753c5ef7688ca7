"""Vendors' libraries, bound at run time: a table of prototypes, and the copies in a process.

The vendors' headers are never needed: each function that gpucoll calls is one row of a table, bound
by its symbol. A symbol that a copy lacks is left out, and code that needs it reports that.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILE_SYSTEM = Path("/")


class Prototype(NamedTuple):
    """One C function: a row of a table."""

    name: str
    arguments: tuple[Any, ...]
    """The ctypes types, in order."""
    result: Any = ctypes.c_int
    since: str = ""
    """The library's version that introduced it; empty if every supported version has it."""


def open_library(name: str) -> ctypes.CDLL:
    """Open a library by path or by name, for this package alone; OSError if that fails.

    Its symbols stay out of the process's global scope, so that they do not replace those of another
    copy. Calls release the interpreter.
    """
    return ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_LOCAL)


def files_of_wheels(patterns: Sequence[str]) -> Iterator[str]:
    """Yield the files on Python's path that match a pattern: ``package/lib/name``."""
    for folder in filter(os.path.isdir, sys.path):
        for pattern in patterns:
            yield from sorted(map(str, Path(folder).glob(pattern)))


def bind(
    library: ctypes.CDLL,
    prototypes: Sequence[Prototype],
    spellings: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Return the functions of a table that the library has, by name.

    Parameters
    ----------
    library : ctypes.CDLL
        The library in which the symbols are looked up.
    prototypes : sequence of Prototype
        The table.
    spellings : mapping, optional
        Name in the table -> the symbols to look for, in this order, if they differ from the name.
    """
    found = {}
    for prototype in prototypes:
        for symbol in (spellings or {}).get(prototype.name, (prototype.name,)):
            try:
                function: Any = library[symbol]  # not an attribute: that one is cached and shared
            except AttributeError:
                continue
            function.argtypes, function.restype = prototype.arguments, prototype.result
            found[prototype.name] = function
            break
    return found


def address_of(function: Any) -> int:
    """Return the address of a bound function, for compiled code that calls it."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def loaded_copies(pattern: str, root: Path = FILE_SYSTEM) -> list[str]:
    """Return the paths of this process's loaded libraries whose file name matches; each file once.

    Parameters
    ----------
    pattern : str
        A regular expression that the whole file name must match.
    root : Path
        The file system whose ``/proc/self/maps`` is read.
    """
    try:
        text = (root / "proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # without /proc nothing can be found
        return []
    copies: dict[tuple[str, str], str] = {}
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6:
            continue
        path = fields[5].removesuffix(" (deleted)")
        if re.fullmatch(pattern, os.path.basename(path)):
            copies.setdefault((fields[3], fields[4]), path)  # device and inode: the file itself
    return list(copies.values())
