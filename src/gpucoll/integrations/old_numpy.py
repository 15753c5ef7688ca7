"""The name of NumPy that MXNet 1.9.1 needs, and that NumPy 1.24 took away."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

__all__ = ["BeforeMXNet", "restore"]


def restore() -> None:
    """Give NumPy back ``numpy.bool``, unless it has one."""
    import numpy as np

    vars(np).setdefault("bool", bool)


class BeforeMXNet(importlib.abc.MetaPathFinder):
    """Calls `restore` when a program imports MXNet, and leaves finding it to others."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return None; see the class."""
        if name == "mxnet":
            restore()
            sys.meta_path.remove(self)
        return None
