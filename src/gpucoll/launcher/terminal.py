"""The terminal's width, without shutil: that loads four libraries of compression."""

from __future__ import annotations

import os
import sys

__all__ = ["columns"]


def columns() -> int:
    """Return how many columns the terminal has, as COLUMNS or the terminal say; else 80."""
    named = os.environ.get("COLUMNS", "")
    if named.isdecimal() and int(named):
        return int(named)
    try:
        # 0 where it is not known
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 80  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):  # none, or closed
        return 80
