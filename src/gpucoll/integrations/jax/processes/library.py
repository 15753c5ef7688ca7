"""The library of stubs for the jaxlib that is installed: its names, its file, and its table."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import os
import platform
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpucoll.errors import BackendUnavailableError
from gpucoll.integrations.jax.processes import stub_library
from gpucoll.kernels.cpu.cache import cache_folder
from gpucoll.kernels.cpu.loop_files import read_own

__all__ = ["Library", "load"]

_ASKS = b"MPITRAMPOLINE_LIB"
"""What the file of jaxlib contains that loads an MPI."""
_NAME = re.compile(rb"(MPIX?ABI_[A-Za-z0-9_]+)\0")
_STARTS = "mpiwrapper_export_fortran_constants_"
"""The function that jaxlib calls as soon as it has loaded the library."""
_INTS = {
    **{f"mpiabi_version_{part}": number for part, number in (("major", 2), ("minor", 10))},
    "mpiabi_version_patch": 0,
    **{f"mpiwrapper_version_{part}": 2 for part in ("major", "minor", "patch")},
}
"""The version of the interface between jaxlib and an MPI; jaxlib refuses an older one."""
_FIRST_VALUE = 0x1000
"""The first number among the values of constants that have no meaning here."""


@dataclass(frozen=True)
class Library:
    """A loaded library.

    Attributes
    ----------
    path : Path
    functions : dict
        The place of each function in the table, by its name without ``MPIABI_``.
    slots : ctypes array
        The addresses to which the functions jump.
    constants : dict
        The value of each constant, by its name without ``MPIABI_``.
    """

    path: Path
    functions: dict[str, int]
    slots: ctypes.Array[ctypes.c_void_p]
    constants: dict[str, int]


def load(values: dict[str, int]) -> Library:
    """Write the library, unless it is there, and load it.

    Parameters
    ----------
    values : dict
        Constants that have a meaning here, without ``MPIABI_``; all others get a number each.

    Raises
    ------
    BackendUnavailableError
        There is no jaxlib, it has no MPI implementation, or it lacks a name; or the stubs do not
        know this processor.
    """
    machine = stub_library.MACHINES.get(platform.machine())
    if machine is None or os.name != "posix" or platform.system() != "Linux":
        known = " or ".join(stub_library.MACHINES)
        raise BackendUnavailableError(
            f"JAX's collectives between processes need Linux on {known}, not "
            f"{platform.system()} on {platform.machine()}: use JAX's own (Gloo)"
        )
    functions, names = _names_of_jaxlib()
    if missing := sorted(values.keys() - {_short(name) for name in names}):
        raise BackendUnavailableError(
            f"this jaxlib has no {', '.join(missing)} in its interface to MPI, so it is a version "
            "that gpucoll does not know: docs/jax_processes.md lists those that were tried"
        )
    constants = {name: _FIRST_VALUE + turn for turn, name in enumerate(names)}
    constants |= {name: values[_short(name)] for name in names if _short(name) in values}
    content = stub_library.write(machine, functions, constants, _INTS)
    path = _written(content)
    handle = ctypes.CDLL(str(path))
    slots = (ctypes.c_void_p * len(functions)).in_dll(handle, stub_library.SLOTS)
    return Library(
        path,
        {_short(name): turn for turn, name in enumerate(functions)},
        slots,
        {_short(name): value for name, value in constants.items()},
    )


def _short(name: str) -> str:
    return name.removeprefix("MPIABI_")


def _names_of_jaxlib() -> tuple[list[str], list[str]]:
    """Return the functions and the constants that jaxlib asks the library for.

    jaxlib ends the process if one of them is missing, so they are read from jaxlib itself, each
    time: 0.2 s for its 350 MB where they are in the page cache, which jaxlib needs anyway.
    """
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise BackendUnavailableError("jaxlib is not installed: pip install jax")
    folder = Path(next(iter(spec.submodule_search_locations)))
    for path in sorted(folder.glob("*.so"), key=lambda path: -path.stat().st_size):
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            found = {match.decode() for match in _NAME.findall(content)}
            if found and content.find(_ASKS) >= 0:
                constants = sorted(name for name in found if name == name.upper())
                return [*sorted(found.difference(constants)), _STARTS], constants
    raise BackendUnavailableError(
        f"the jaxlib in {folder} has no MPI implementation of its collectives; versions from "
        "0.4.34 on have one, on Linux"
    )


def _written(content: bytes) -> Path:
    """Return a file with this content, in a folder to which only this user can write."""
    import hashlib

    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    path = cache_folder() / f"jax_processes_{digest}.so"
    with contextlib.suppress(OSError):
        if read_own(path) == content:
            return path
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".jax_processes_")  # mode 600
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return path
