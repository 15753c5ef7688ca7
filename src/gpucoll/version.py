"""The version, written only here; `setup.py` reads it without importing the package."""

from __future__ import annotations

from typing import Final

__all__ = ["__version__"]

__version__: Final = "0.1.0.dev0"
