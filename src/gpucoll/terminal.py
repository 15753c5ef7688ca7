"""Lines on a terminal: its width, and whether they can be erased.

Without shutil, which loads four compression libraries.
"""

from __future__ import annotations

import os
import sys

__all__ = ["ERASE_LINE", "columns", "is_terminal"]

ERASE_LINE = "\r\x1b[K"
"""To the line's start, then erase to its end (ECMA-48)."""


def columns() -> int:
    """Return the number of columns from COLUMNS or the terminal; 80 if neither is known."""
    named = os.environ.get("COLUMNS", "")
    if named.isdecimal() and int(named):
        return int(named)
    for stream in (sys.__stdout__, sys.__stderr__):
        try:
            # 0 if it is not known
            return os.get_terminal_size(stream.fileno()).columns or 80  # type: ignore[union-attr]
        except (AttributeError, OSError, ValueError):  # no terminal, or a closed one
            continue
    return 80


def is_terminal(descriptor: int) -> bool:
    """Return whether lines on it can be erased."""
    try:
        return os.isatty(descriptor) and os.environ.get("TERM", "dumb") != "dumb"
    except OSError:
        return False
