"""``import mpi4py`` finds this package: for programs that are not to be changed."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_HERE = __name__.rpartition(".")[0]
_ABSENT = {
    "mpi4py.futures": "use concurrent.futures, or schwimmbad's MPIPool",
    "mpi4py.util": "its modules stand on mpi4py's compiled ones",
    "mpi4py.run": "use python -m gpucoll.integrations.mpi4py",
    "mpi4py.bench": "use gpucoll-bench",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for the modules of mpi4py."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return where a module of mpi4py comes from; None for all others."""
        if name == "mpi4py" or name.startswith("mpi4py."):
            return importlib.machinery.ModuleSpec(name, self, is_package=name == "mpi4py")
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """Return the module of this package that it is."""
        if spec.name in ("mpi4py", "mpi4py.MPI"):
            return importlib.import_module(_HERE + spec.name.removeprefix("mpi4py"))
        if spec.name == "mpi4py.rc":
            return importlib.import_module(f"{_HERE}.options").rc
        for name, instead in _ABSENT.items():
            if spec.name == name or spec.name.startswith(f"{name}."):
                raise ModuleNotFoundError(
                    f"{spec.name} is not there in gpucoll.integrations.mpi4py; {instead} "
                    "(docs/mpi4py_programs.md)",
                    name=spec.name,
                )
        raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it was executed under its own name."""


def install() -> None:
    """Make ``import mpi4py`` find this package, in this process, from now on."""
    loaded = sys.modules.get("mpi4py")
    if loaded is not None and getattr(loaded, "__name__", "") != _HERE:
        raise RuntimeError("mpi4py itself is imported already: call this before")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
