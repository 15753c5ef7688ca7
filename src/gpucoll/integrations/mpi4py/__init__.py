"""mpi4py's names over gpucoll: ``from gpucoll.integrations.mpi4py import MPI``.

Programs written for mpi4py run on any of gpucoll's backends, without an MPI:
`docs/mpi4py_programs.md`.
Importing `MPI` joins the job, as mpi4py's import does, unless ``rc.initialize`` is False.
"""

from __future__ import annotations

from typing import Any

from gpucoll.integrations.mpi4py.options import Rc, rc

__all__ = ["MPI", "Rc", "get_config", "rc"]
__version__ = "4.1.0"


def __getattr__(name: str) -> Any:
    if name == "MPI":
        import importlib

        return importlib.import_module(f"{__name__}.MPI")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_config() -> dict[str, str]:
    """Return nothing: there is no MPI that this was built with."""
    return {}


def profile(*_: Any, **__: Any) -> None:
    """Do nothing: there is no profiler."""
