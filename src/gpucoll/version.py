"""The one place where the version is written; `setup.py` reads it from here without importing."""

from __future__ import annotations

from typing import Final

__all__ = ["__version__"]

__version__: Final = "0.1.0.dev0"
