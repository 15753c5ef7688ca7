"""Make ``import mpi4py`` load this package, for programs that should not be changed."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from types import ModuleType

from gpucoll.integrations.aliases import Alias
from gpucoll.integrations.mpi4py import installed

_OWN = ("mpi4py", "mpi4py.MPI", "mpi4py.typing")


class _Mpi4py(Alias):
    """The names of mpi4py, whose modules of plain Python are its own."""

    def serves(self, name: str) -> bool:
        """Return whether it is a module of this package."""
        return name in _OWN

    def otherwise(self, name: str) -> importlib.machinery.ModuleSpec:
        """Return the spec of a Python module of an installed mpi4py."""
        found = installed.spec_of(name)
        if found is None:  # a compiled module would load an MPI
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module of this package that stands for it."""
        made = super().create_module(spec)
        if spec.name == "mpi4py":
            sys.modules["mpi4py.rc"] = made.rc
        # MPI is imported as mpi4py.MPI, too, because programs look for it in sys.modules
        return made


def part_of(name: str) -> ModuleType | None:
    """Return a Python module of mpi4py, for ``from mpi4py import futures``; None if none exists."""
    if name.startswith("_") or name not in installed.MODULES:
        return None
    return importlib.import_module(f"mpi4py.{name}")


def install() -> None:
    """Make ``import mpi4py`` load this package in this process from now on."""
    _Mpi4py("mpi4py", __name__.rpartition(".")[0]).install()
