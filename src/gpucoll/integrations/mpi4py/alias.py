"""Make ``import mpi4py`` load this package, for programs that should not be changed."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

from gpucoll.integrations.mpi4py import installed

_HERE = __name__.rpartition(".")[0]
_OWN = ("mpi4py", "mpi4py.MPI", "mpi4py.typing")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules of mpi4py."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of mpi4py; None for other modules."""
        if name in _OWN:
            return importlib.machinery.ModuleSpec(name, self, is_package=name == "mpi4py")
        if not name.startswith("mpi4py."):
            return None
        found = installed.spec_of(name)
        if found is None:  # no other finder may try: a compiled module would load an MPI
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module of this package that stands for it."""
        made = importlib.import_module(_HERE + spec.name.removeprefix("mpi4py"))
        if spec.name == "mpi4py":
            sys.modules["mpi4py.rc"] = made.rc
        # MPI is imported as mpi4py.MPI, too, because programs look for it in sys.modules
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module was executed under its own name."""


def part_of(name: str) -> ModuleType | None:
    """Return a Python module of mpi4py, for ``from mpi4py import futures``; None if none exists."""
    if name.startswith("_") or name not in installed.MODULES:
        return None
    return importlib.import_module(f"mpi4py.{name}")


def install() -> None:
    """Make ``import mpi4py`` load this package in this process from now on."""
    loaded = sys.modules.get("mpi4py")
    if loaded is not None and getattr(loaded, "__name__", "") != _HERE:
        raise RuntimeError("mpi4py is imported already: call this before importing it")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
