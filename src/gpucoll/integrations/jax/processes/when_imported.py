"""Call a function before, and another after, a program imports JAX."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["AroundJax"]


class AroundJax(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds JAX by the other finders, and calls a function before and one after the import.

    What a program sets before its import of JAX (``os.environ``) has its effect.
    """

    def __init__(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        self._before, self._after = before, after
        self._loader: importlib.abc.Loader | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of JAX, with this object as loader; None for others."""
        if name != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Return the module that JAX's own loader makes."""
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Import JAX between the two functions."""
        assert self._loader is not None
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._before()
        self._loader.exec_module(module)
        self._after()
