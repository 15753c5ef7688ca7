"""The cache of compiled GPU kernels: a folder next to the CPU kernels', with the same rules.

A file is named after everything on which its content depends, and ends in a checksum. It is written
under another name and renamed. Because it is code, it is read only from a folder to which no other
user can write.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpucoll.errors import BackendUnavailableError
from gpucoll.kernels.cpu import cache
from gpucoll.kernels.cpu.kernel_files import keep_content, kept_content
from gpucoll.kernels.cpu.loop_files import FolderLock
from gpucoll.kernels.cpu.own_folders import own_folder

__all__ = ["any_kept", "folder", "kept", "made_once"]

_NAME = "gpu-kernels"
_SUFFIX = ".image"
_DAY_S = 86400.0
_KEPT_DAYS = 60
WAIT_S = 60.0
"""How long to wait for another process that compiles the same; then this one compiles, too."""


@functools.cache
def folder() -> Path | None:
    """Return the folder, made if needed; None if every possible folder is writable by others.

    Raises
    ------
    ArgumentError
        The user named a folder for compiled kernels that is not usable.
    """
    try:
        return own_folder(cache.cache_folder().parent / _NAME)
    except (BackendUnavailableError, OSError):
        return None


def kept(name: str) -> bytes | None:
    """Return the content kept under a name; None if there is none, or it is damaged."""
    place = folder()
    return None if place is None else _read(place / f"{name}{_SUFFIX}")


def any_kept(start: str) -> bytes | None:
    """Return the content last written under a name that begins with `start`."""
    place = folder()
    if place is None:
        return None
    paths = sorted(place.glob(f"{start}*{_SUFFIX}"), key=_age_s)
    return next((content for path in paths if (content := _read(path)) is not None), None)


def made_once(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the content kept under a name; if needed, one process at a time makes and keeps it.

    If it cannot be kept, this process can use it nevertheless.
    """
    place = folder()
    if place is None:
        return make()
    path = place / f"{name}{_SUFFIX}"
    if (content := _read(path)) is not None:
        return content
    with FolderLock(path) as lock:
        lock.take(alone=True, limit_s=WAIT_S)
        content = _read(path)  # another process may have made it meanwhile
        if content is None:
            content = make()
            with contextlib.suppress(OSError):
                keep_content(path, content)
                _remove_old(place)
        with contextlib.suppress(OSError):
            lock.remove()
    return content


def _read(path: Path) -> bytes | None:
    content = kept_content(path)
    if content is not None and _age_s(path) > _DAY_S:
        with contextlib.suppress(OSError):
            os.utime(path)  # it was used
    return content


def _remove_old(place: Path) -> None:
    """Remove files that were not used for a long time, mostly of earlier sources and compilers."""
    for path in _files(place):
        if _age_s(path) > _KEPT_DAYS * _DAY_S:
            path.unlink(missing_ok=True)


def _files(place: Path) -> Iterator[Path]:
    yield from (Path(entry.path) for entry in os.scandir(place))


def _age_s(path: Path) -> float:
    try:
        return time.time() - os.stat(path).st_mtime
    except OSError:
        return 0.0
