"""The text of a kernel: its source file with all includes, constants, and the defining line.

Headers are pasted in, so that compilers need no include path. Compiled kernels are kept under a
digest of this text, so they are made anew after an edit of any header.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
THREADS = 256
"""Threads per block, in every kernel."""
MAX_RANKS = 16
"""The most sources, and the most destinations, of a reduce kernel."""
TILE_BYTES = 16384
TILE_ELEMENTS = 4096
"""How many elements a block copies, or converts, before it looks for the next piece of work."""

CONSTANTS = {
    "GPUCOLL_THREADS": THREADS,
    "GPUCOLL_MAX_RANKS": MAX_RANKS,
    "GPUCOLL_TILE_BYTES": TILE_BYTES,
    "GPUCOLL_TILE_ELEMENTS": TILE_ELEMENTS,
}
_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """One entry of a source file.

    Attributes
    ----------
    name : str
        Of the entry; no two kernels share one.
    file : str
        The source file.
    definition : str
        The macro of that file, with its arguments, that makes the entry.
    """

    name: str
    file: str
    definition: str


@functools.cache
def file_text(name: str) -> str:
    """Return a source file with everything that it includes from this folder."""
    return _pasted(name, set())


def _pasted(name: str, seen: set[str]) -> str:
    if name in seen:
        return ""
    seen.add(name)
    text = (FOLDER / name).read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda found: _pasted(found[1], seen), text)


def source_of(kernels: Iterable[Kernel]) -> str:
    """Return the source of kernels that come from one file."""
    chosen = list(kernels)
    (file,) = {kernel.file for kernel in chosen}
    defines = [f"#define {name} {value}" for name, value in CONSTANTS.items()]
    return "\n".join([*defines, file_text(file), *(kernel.definition for kernel in chosen), ""])
