"""A temporary folder for compiled kernels, for a process that has no other."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gpucoll.kernels.cpu.own_folders import UnsafeFolderError, own_folder

__all__ = ["PrivateFolder"]

_OWNER_FILE = "owner"
_ABANDONED_S = 60.0
"""A private folder older than this that is not locked has no owner any more."""


class PrivateFolder:
    """A folder that lives as long as this process, for a process that has no other.

    A process that is killed leaves its folder behind; the next process that makes such a folder
    removes it.
    """

    def __init__(self) -> None:
        parent = _parent_of_private_folders()
        _remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_private_prefix(), dir=parent))
        self._owner_pid = os.getpid()
        # Held until the process ends, in whatever way.
        self._lock = os.open(self.path / _OWNER_FILE, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        atexit.register(self.remove)

    def remove(self) -> None:
        """Remove the folder, if this process made it: a forked child leaves it alone."""
        if os.getpid() == self._owner_pid:
            shutil.rmtree(self.path, ignore_errors=True)


def _private_prefix() -> str:
    return f"gpucoll-{os.geteuid()}-"


def _parent_of_private_folders() -> Path:
    """Return the first folder for temporary files in which no other user can replace ours."""
    problems = []
    for place in dict.fromkeys((_temporary_folder(), "/tmp", "/var/tmp", "/dev/shm")):
        if not place:
            continue
        try:
            made = Path(tempfile.mkdtemp(prefix=_private_prefix(), dir=place))
            try:
                return own_folder(made).parent
            finally:
                os.rmdir(made)
        except OSError as error:
            problems.append(str(error))
    raise UnsafeFolderError("; ".join(problems))


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # none is writable
        return ""


def _remove_abandoned(parent: Path) -> None:
    """Remove private folders of this user's processes that ended without removing them."""
    for folder in _private_folders(parent):
        with contextlib.suppress(OSError):
            facts = os.lstat(folder)
            if facts.st_uid != os.geteuid() or time.time() - facts.st_mtime < _ABANDONED_S:
                continue
            lock = os.open(folder / _OWNER_FILE, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _private_folders(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(parent):
            if entry.name.startswith(_private_prefix()) and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)
