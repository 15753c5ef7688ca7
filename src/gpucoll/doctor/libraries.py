"""The probes of NCCL, RCCL, oneCCL and MPI: which copies exist, and which one gpucoll uses.

`candidates` only reads names, so it cannot hang; `look` opens one copy, each in its own process.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

from gpucoll.backends.nccl import library
from gpucoll.backends.nccl.library import NCCL, RCCL, Vendor
from gpucoll.backends.oneccl.library import ONECCL
from gpucoll.devices.foreign_library import loaded_copies, open_library
from gpucoll.doctor.facts import LibraryFound
from gpucoll.errors import BackendUnavailableError

__all__ = ["Candidate", "Look", "candidates", "look", "merged"]

MPI = "MPI"
_VENDORS: dict[str, Vendor] = {vendor.name: vendor for vendor in (NCCL, RCCL, ONECCL)}
_MPI_NAMES = ("libmpi.so.12", "libmpi.so.40")
"""MPICH and Intel MPI; Open MPI."""
_MPI_PATTERN = r"libmpi\.so.*"
_MPI_KINDS = {
    "MPICH": r"MPICH Version:\s*(\S+)",
    "Open MPI": r"Open MPI v([^\s,]+)",
    "Intel MPI": r"Intel\(R\) MPI Library (\S+)",
}
_MPI_VERSION_BYTES = 8192  # the limit of MPI_MAX_LIBRARY_VERSION_STRING
_ELSEWHERE = {
    NCCL.name: ("/usr/local/cuda/lib64/libnccl.so.2", "/usr/lib/x86_64-linux-gnu/libnccl.so.2"),
    RCCL.name: ("/opt/rocm/lib/librccl.so.1",),
    ONECCL.name: ("/usr/lib/x86_64-linux-gnu/libccl.so.2",),
    MPI: (),
}
"""Common places of copies, whether or not gpucoll looks there."""
BY_LOADER = "the system's loader finds it"
NOT_LOOKED_FOR = "not where gpucoll looks"


class Candidate(TypedDict):
    """A copy before it is opened: a path, or a name for the loader."""

    name: str
    path: str
    source: str


class Look(TypedDict):
    """What a copy reports when it is opened."""

    path: str
    version: str | None
    problem: str | None


def candidates() -> list[Candidate]:
    """Return the copies in the order of gpucoll's preference, then others; nothing is opened."""
    found = []
    for name, vendor in _VENDORS.items():
        found += [
            Candidate(name=name, path=copy.path, source=copy.reason)
            for copy in library.candidates(vendor)
            # Default places count only if a file is there; a path that the user names always
            # counts.
            if copy.path not in vendor.file_names or _is_name(copy.path) or Path(copy.path).exists()
        ]
    prefix = Path(sys.prefix, "lib")
    found += [
        Candidate(name=MPI, path=str(path), source="this Python environment")
        for path in (prefix / name for name in _MPI_NAMES)
        if path.exists()
    ]
    found += [Candidate(name=MPI, path=name, source=BY_LOADER) for name in _MPI_NAMES]
    for name, paths in _ELSEWHERE.items():
        here = [str(prefix / file) for file in _VENDORS[name].file_names] if name != MPI else []
        found += [
            Candidate(name=name, path=path, source=NOT_LOOKED_FOR)
            for path in (*here, *paths)
            if os.path.exists(path)
        ]
    return _without_repetition(found)


def _without_repetition(found: Iterable[Candidate]) -> list[Candidate]:
    first: dict[tuple[str, str], Candidate] = {}
    for candidate in found:
        first.setdefault((candidate["name"], os.path.realpath(candidate["path"])), candidate)
    return list(first.values())


def _is_name(path: str) -> bool:
    """Return whether this is a name for the loader, not a path."""
    return os.path.sep not in path


def look(name: str, path: str) -> Look:
    """Open one copy; return its path and version, or why it cannot be used."""
    if name == MPI:
        return _look_at_mpi(path)
    try:
        opened = library.Library(_VENDORS[name], library.Candidate(path, "gpucoll-doctor opens it"))
    except BackendUnavailableError as error:
        return Look(path=path, version=None, problem=str(error))
    return Look(path=opened.path, version=opened.version_text, problem=None)


def _look_at_mpi(path: str) -> Look:
    """Return an MPI library's version, which it reports before MPI_Init."""
    try:
        opened = open_library(path)
        text, size = ctypes.create_string_buffer(_MPI_VERSION_BYTES), ctypes.c_int()
        opened.MPI_Get_library_version(text, ctypes.byref(size))
    except (AttributeError, OSError) as error:
        return Look(path=path, version=None, problem=str(error))
    real = next(iter(loaded_copies(_MPI_PATTERN)), path)
    return Look(path=real, version=mpi_version(text.value.decode(errors="replace")), problem=None)


def mpi_version(text: str) -> str:
    """Return name and version from the text of MPI_Get_library_version."""
    for name, pattern in _MPI_KINDS.items():
        if match := re.match(pattern, text):
            return f"{name} {match[1]}"
    return text.partition("\n")[0][:40].strip()


def merged(
    found: Iterable[Candidate], looks: Iterable[tuple[Look | None, str | None]]
) -> list[LibraryFound]:
    """Return each file once, in order of preference, and mark those that gpucoll uses; pure.

    Parameters
    ----------
    found : iterable of Candidate
        The results of `candidates`.
    looks : iterable of (Look or None, str or None)
        The result of `look` for each candidate; or None, and why there is none.
    """
    copies: dict[tuple[str, str], LibraryFound] = {}
    for candidate, (opened, silence) in zip(found, looks, strict=True):
        problem = opened["problem"] if opened else silence
        if _is_name(candidate["path"]) and problem is not None and opened is not None:
            continue  # the loader does not find this library
        path = opened["path"] if opened else candidate["path"]
        copy = LibraryFound(
            name=candidate["name"],
            path=path,
            version=opened["version"] if opened else None,
            source=candidate["source"],
            is_used=False,
            problem=problem,
        )
        copies.setdefault((copy["name"], os.path.realpath(path)), copy)
    # The first copy is used or refused; gpucoll never silently falls back to a later one.
    for name in _VENDORS:
        for copy in copies.values():
            if copy["name"] == name and copy["source"] != NOT_LOOKED_FOR:
                copy["is_used"] = copy["problem"] is None
                break
    return list(copies.values())
