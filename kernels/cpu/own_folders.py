"""Folders that this user alone can write to: what lies in others is not run. Imports no compiler.

Compiled kernels are pickles and machine code: whoever can put a file where they are kept, or can
put another folder in that place, runs code as this user.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import pwd
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PrivateFolder", "UnsafeFolderError", "is_own_file", "own_folder"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OWNER_FILE = "owner"
_ABANDONED_S = 60.0
"""A private folder is locked by its owner sooner than this."""


class UnsafeFolderError(OSError):
    """Others can put files into a folder. The message says where, whose it is and its mode."""


def own_folder(folder: Path) -> Path:
    """Make a folder that this user alone can write to, if need be, and return its real path.

    Each folder on the way to it is looked at, too. Those are root's or this user's and nobody else
    can write to them, or they are sticky, as ``/tmp`` is: then what this user owns stays in place.

    Raises
    ------
    UnsafeFolderError
        It, or a folder on the way to it, is another user's, or others can write to it.
    OSError
        It cannot be made.
    """
    real = Path(os.path.realpath(folder))
    is_foreign = True  # whether the folder above is another user name space's: so begins "/"
    for step in (*reversed(real.parents), real):
        is_own = step == real
        try:
            facts = os.lstat(step)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(step, 0o700)
            facts = os.lstat(step)
        is_foreign = is_foreign and not is_own and _is_of_no_user_here(facts.st_uid)
        if problem := _problem(step, facts, is_own=is_own, is_foreign=is_foreign):
            raise UnsafeFolderError(f"{step} {problem}")
        is_foreign = (is_foreign or facts.st_uid == 0) and not facts.st_mode & _OTHERS_WRITE
    return real


def is_own_file(facts: os.stat_result) -> bool:
    """Return whether this is a file that only this user can have written."""
    return (
        stat.S_ISREG(facts.st_mode)
        and facts.st_uid == os.geteuid()
        and not facts.st_mode & _OTHERS_WRITE
    )


def _problem(step: Path, facts: os.stat_result, *, is_own: bool, is_foreign: bool) -> str:
    """Return why others could put something in the place of what lies here; empty if not."""
    about = f"(owner {_user_name(facts.st_uid)}, mode {stat.S_IMODE(facts.st_mode):04o})"
    me = os.geteuid()
    if not stat.S_ISDIR(facts.st_mode):
        return f"{about} is not a folder"
    if facts.st_uid != me and (is_own or facts.st_uid != 0) and not is_foreign:
        return f"{about} does not belong to user {_user_name(me)}"
    writable = facts.st_mode & _OTHERS_WRITE
    if not writable or (facts.st_mode & stat.S_ISVTX and not is_own):
        return ""
    if not writable & stat.S_IWOTH and _is_alone_in_group(step, facts):
        return ""
    return f"{about} can be written to by other users"


def _is_alone_in_group(step: Path, facts: os.stat_result) -> bool:
    """Return whether this is a user's own folder and group, as distributions make them."""
    import grp

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(facts.st_gid)
    except KeyError:
        return False
    if facts.st_uid != user.pw_uid or group.gr_name != user.pw_name:
        return False
    if user.pw_gid != facts.st_gid or any(name != user.pw_name for name in group.gr_mem):
        return False
    try:  # with a list of its own the group's bits stand for others, too
        return "system.posix_acl_access" not in os.listxattr(step)
    except OSError:
        return True  # a file system without such lists


def _is_of_no_user_here(uid: int) -> bool:
    """Return whether this is how a container without root shows what is the host's own.

    In a user name space (Apptainer, rootless Podman) root and everybody else outside look like one
    user, who has no number inside.
    """
    if uid in (0, os.geteuid()):
        return False
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):
        return False
    is_mapped = any(int(first) <= overflow < int(first) + int(n) for first, _, n in ranges)
    return uid == overflow and not is_mapped


def _user_name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)


class PrivateFolder:
    """A folder that lives as long as this process, for one that has no other.

    A process that is killed leaves its folder; the next one that makes such a folder removes it.
    """

    def __init__(self) -> None:
        parent = _parent_of_private_folders()
        _remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_private_prefix(), dir=parent))
        self._owner_pid = os.getpid()
        # Held until the process ends, however that happens.
        self._lock = os.open(self.path / _OWNER_FILE, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        atexit.register(self.remove)

    def remove(self) -> None:
        """Remove it, in the process that made it: a forked child leaves it alone."""
        if os.getpid() == self._owner_pid:
            shutil.rmtree(self.path, ignore_errors=True)


def _private_prefix() -> str:
    return f"gpucoll-{os.geteuid()}-"


def _parent_of_private_folders() -> Path:
    """Return the first folder for temporary files in which nobody can replace what we make."""
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
    except OSError:  # none can be written to
        return ""


def _remove_abandoned(parent: Path) -> None:
    """Remove private folders of processes of this user's that have ended without doing so."""
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
