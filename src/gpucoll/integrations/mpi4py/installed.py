"""The pure Python modules of an installed mpi4py, which run on this package.

They are loaded from their own files. Compiled modules of mpi4py are never loaded.
"""

from __future__ import annotations

import importlib.machinery
from pathlib import Path

MODULES = ("bench", "futures", "run", "util", "__main__")


def spec_of(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of one of these modules; None if mpi4py has no such module.

    Parameters
    ----------
    name : str
        The full name, such as ``mpi4py.util.dtlib``.

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
            f"{name} is a Python module of mpi4py, which is not installed here: pip install "
            "mpi4py (gpucoll.integrations.mpi4py runs that module on gpucoll; no MPI is needed)",
            name=name,
        )
    inside = [str(where.joinpath(first, *rest[:-1]) if rest else where)]
    return importlib.machinery.PathFinder.find_spec(name, inside)


def folder() -> Path | None:
    """Return the folder of the installed mpi4py; None if it is not installed."""
    spec = importlib.machinery.PathFinder.find_spec("mpi4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent
