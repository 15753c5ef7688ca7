"""The probes of NCCL, RCCL and MPI: which copies there are, and which one gpucoll takes.

`candidates` only looks at names, so that it cannot hang; `look` opens one copy, each in a process
of its own.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

from gpucoll.backends.nccl import finding, library
from gpucoll.backends.nccl.vendor import NCCL, Vendor
from gpucoll.backends.rccl.vendor import RCCL
from gpucoll.devices.foreign_library import loaded_copies, open_library
from gpucoll.doctor.facts import LibraryFound
from gpucoll.errors import BackendUnavailableError

__all__ = ["Candidate", "Look", "candidates", "look", "merged"]

MPI = "MPI"
_VENDORS: dict[str, Vendor] = {vendor.name: vendor for vendor in (NCCL, RCCL)}
_MPI_NAMES = ("libmpi.so.12", "libmpi.so.40")
"""MPICH and Intel MPI; Open MPI."""
_MPI_PATTERN = r"libmpi\.so.*"
_MPI_KINDS = {
    "MPICH": r"MPICH Version:\s*(\S+)",
    "Open MPI": r"Open MPI v([^\s,]+)",
    "Intel MPI": r"Intel\(R\) MPI Library (\S+)",
}
_MPI_VERSION_BYTES = 8192  # MPI_MAX_LIBRARY_VERSION_STRING is at most this
_ELSEWHERE = {
    NCCL.name: ("/usr/local/cuda/lib64/libnccl.so.2", "/usr/lib/x86_64-linux-gnu/libnccl.so.2"),
    RCCL.name: ("/opt/rocm/lib/librccl.so.1",),
    MPI: (),
}
"""Where copies lie that are often meant, whether or not they are looked for there."""
BY_LOADER = "the system's loader finds it"
NOT_LOOKED_FOR = "not where gpucoll looks"


class Candidate(TypedDict):
    """A copy, before it is opened: a path, or a name for the loader."""

    name: str
    path: str
    source: str


class Look(TypedDict):
    """What a copy says when it is opened."""

    path: str
    version: str | None
    problem: str | None


def candidates() -> list[Candidate]:
    """Return copies in the order in which gpucoll takes them, then others; nothing is opened."""
    found = []
    for name, vendor in _VENDORS.items():
        found += [
            Candidate(name=name, path=copy.path, source=copy.reason)
            for copy in finding.candidates(vendor)
            # Places to try are no copies yet; a path that the user names is one, there or not.
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
    """Return whether this is for the loader to look for, and no path."""
    return os.path.sep not in path


def look(name: str, path: str) -> Look:
    """Open one copy and return where it lies and its version, or why it cannot serve."""
    if name == MPI:
        return _look_at_mpi(path)
    try:
        opened = library.Library(_VENDORS[name], library.Candidate(path, "gpucoll-doctor opens it"))
    except BackendUnavailableError as error:
        return Look(path=path, version=None, problem=str(error))
    return Look(path=opened.path, version=opened.version_text, problem=None)


def _look_at_mpi(path: str) -> Look:
    """Ask an MPI library for its version, which it tells before MPI_Init."""
    try:
        opened = open_library(path)
        text, size = ctypes.create_string_buffer(_MPI_VERSION_BYTES), ctypes.c_int()
        opened.MPI_Get_library_version(text, ctypes.byref(size))
    except (AttributeError, OSError) as error:
        return Look(path=path, version=None, problem=str(error))
    real = next(iter(loaded_copies(_MPI_PATTERN)), path)
    return Look(path=real, version=mpi_version(text.value.decode(errors="replace")), problem=None)


def mpi_version(text: str) -> str:
    """Return name and version out of what MPI_Get_library_version tells."""
    for name, pattern in _MPI_KINDS.items():
        if match := re.match(pattern, text):
            return f"{name} {match[1]}"
    return text.partition("\n")[0][:40].strip()


def merged(
    found: Iterable[Candidate], looks: Iterable[tuple[Look | None, str | None]]
) -> list[LibraryFound]:
    """Return each file once, in the order of preference, and mark those that gpucoll takes; pure.

    Parameters
    ----------
    found : iterable of Candidate
        What `candidates` returned.
    looks : iterable of (Look or None, str or None)
        What `look` said of each; or None, and why it said nothing.
    """
    copies: dict[tuple[str, str], LibraryFound] = {}
    for candidate, (opened, silence) in zip(found, looks, strict=True):
        problem = opened["problem"] if opened else silence
        if _is_name(candidate["path"]) and problem is not None and opened is not None:
            continue  # the loader knows no such library
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
    # The first one is used or refused: a worse one is never taken quietly instead.
    for name in _VENDORS:
        for copy in copies.values():
            if copy["name"] == name and copy["source"] != NOT_LOOKED_FOR:
                copy["is_used"] = copy["problem"] is None
                break
    return list(copies.values())
