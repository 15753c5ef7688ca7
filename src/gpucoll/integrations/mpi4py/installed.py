"""The modules of an installed mpi4py that are plain Python: they run over these names.

They are read where they lie. What mpi4py has compiled is never loaded.
"""

from __future__ import annotations

import importlib.machinery
from pathlib import Path

MODULES = ("bench", "futures", "run", "util", "__main__")


def spec_of(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return where one of those modules lies; None: mpi4py has no such module.

    Parameters
    ----------
    name : str
        In full, as ``mpi4py.util.dtlib``.

    Raises
    ------
    ModuleNotFoundError
        mpi4py is not installed.
    """
    _, first, *rest = name.split(".")
    if first not in MODULES:
        return None
    where = folder()
    if where is None:
        raise ModuleNotFoundError(
            f"{name} is Python code of mpi4py's own, which is not installed here: pip install "
            "mpi4py (gpucoll.integrations.mpi4py runs that code on gpucoll; no MPI is needed)",
            name=name,
        )
    inside = [str(where.joinpath(first, *rest[:-1]) if rest else where)]
    return importlib.machinery.PathFinder.find_spec(name, inside)


def folder() -> Path | None:
    """Return the folder of the mpi4py that is installed; None: there is none."""
    spec = importlib.machinery.PathFinder.find_spec("mpi4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent
