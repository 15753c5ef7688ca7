"""mpi4py's names over gpucoll: ``from gpucoll.integrations.mpi4py import MPI``.

Programs written for mpi4py run on any of gpucoll's backends, without an MPI:
`docs/mpi4py_programs.md`.
Importing `MPI` joins the job, as mpi4py's import does, unless ``rc.initialize`` is False.
"""

from __future__ import annotations

import sys
from types import ModuleType

from gpucoll.integrations.mpi4py.options import Rc, rc

__all__ = ["MPI", "Rc", "get_config", "get_include", "profile", "rc"]
__version__ = "4.1.0"
sys.modules[f"{__name__}.rc"] = rc  # type: ignore[assignment]  # where mpi4py has it, too


def __getattr__(name: str) -> ModuleType:
    is_mpi4py = sys.modules.get("mpi4py") is sys.modules[__name__]
    if name == "MPI":
        import importlib

        return importlib.import_module("mpi4py.MPI" if is_mpi4py else f"{__name__}.MPI")
    if is_mpi4py:
        from gpucoll.integrations.mpi4py.alias import part_of

        if (found := part_of(name)) is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_config() -> dict[str, str]:
    """Return an empty dictionary: this package was not built with an MPI."""
    return {}


def get_include() -> str:
    """Return the folder of an installed mpi4py's headers.

    Raises
    ------
    NotImplementedError
        mpi4py is not installed: this package has no C interface of its own.
    """
    from gpucoll.integrations.mpi4py.errors import refused
    from gpucoll.integrations.mpi4py.installed import folder

    where = folder()
    if where is None:
        refused("get_include", "pip install mpi4py, whose headers this function then returns")
    return str(where / "include")


def profile(*_: object, **__: object) -> None:
    """Do nothing: there is no profiler."""
