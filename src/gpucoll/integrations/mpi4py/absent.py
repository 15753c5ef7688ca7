"""Parts of MPI that this package lacks: their names raise `NotImplementedError` when used."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from gpucoll.integrations.mpi4py.errors import refused
from gpucoll.integrations.mpi4py.handles import Handle

_FILES = "let each rank write a file of its own, or gather; h5py works without its MPI driver"
_HANDLES = (
    "a program that passes C handles to an MPI's functions (numba-mpi does) needs that MPI: run it "
    "on mpi4py, and give gpucoll its communicator by Communicator.from_mpi"
)
_PORTS = "start all processes together"

FUNCTIONS = {
    "Open_port": _PORTS,
    "Close_port": _PORTS,
    "Publish_name": _PORTS,
    "Unpublish_name": _PORTS,
    "Lookup_name": _PORTS,
    "Register_datarep": _FILES,
    "Iflush_buffer": "use Comm.Iflush_buffer",
    "Get_abi_info": "there is no ABI without an MPI library",
    "Get_abi_fortran_info": "there is no ABI without an MPI library",
    "_addressof": _HANDLES,
    "_handleof": _HANDLES,
    "_sizeof": _HANDLES,
}


class _Absent(Handle):
    """A class that has only the null handle."""

    _instead = ""

    @classmethod
    def _family(cls) -> type:
        return cls

    def free(self) -> None:
        """Do nothing: a null handle has nothing to free."""

    def __reduce__(self) -> tuple[object, ...]:
        return self._reduced(f"{type(self).__name__.upper()}_NULL")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        refused(f"{type(self).__name__}.{name}", self._instead)


class _RefusingType(type):
    """Metaclass of unsupported classes: any use of their methods is refused."""

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        refused(f"{cls.__name__}.{name}", cls._instead)


class File(_Absent, metaclass=_RefusingType):
    """MPI-IO, which is not supported."""

    _instead = _FILES


class Session(_Absent, metaclass=_RefusingType):
    """Sessions, which are not supported."""

    _instead = "use COMM_WORLD"


class Grequest(_Absent, metaclass=_RefusingType):
    """Generalised requests, which are not supported."""

    _instead = "use concurrent.futures"


FILE_NULL, SESSION_NULL = File(), Session()


def function_of(name: str) -> Callable[..., None] | None:
    """Return a function that raises; None if MPI has no function of this name."""
    if name not in FUNCTIONS:
        return None

    def function(*_: object, **__: object) -> None:
        refused(f"MPI.{name}", FUNCTIONS[name])

    function.__name__ = name
    return function
