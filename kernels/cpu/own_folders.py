"""Folders to which only this user can write; code in others is not run. Imports no compiler.

Compiled kernels are pickles and machine code: a user who can put a file there, or another folder in
that place, runs code as this user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from pathlib import Path
from typing import NamedTuple

__all__ = ["UnsafeFolderError", "is_own_file", "own_folder"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # as the kernel follows


class UnsafeFolderError(OSError):
    """Others can put files into a folder. The message gives its path, owner and mode."""


def own_folder(folder: Path) -> Path:
    """Make a folder to which only this user can write, if needed, and return its real path.

    Each folder on the way to it is checked, too, including the folders that contain symbolic links
    and those that links lead through. Each must belong to root or to this user, and either no other
    user can write to it, or it is sticky, as ``/tmp`` is. In a sticky folder this user's files stay
    in place, and a link must belong to this user or to root.

    Raises
    ------
    UnsafeFolderError
        The folder, or a folder or link on the way to it, belongs to another user, or others can
        write to it.
    OSError
        The folder cannot be made.
    """
    left = [*reversed((Path.cwd() / folder).parts)]
    way: list[_Step] = []
    n_links = 0
    while left:
        name = left.pop()
        if name == "..":
            del way[max(len(way) - 1, 1) :]
            continue
        path = way[-1].path / name if way and name != "/" else Path("/")
        facts = _facts_of(path)
        if not stat.S_ISLNK(facts.st_mode):
            way = [] if name == "/" else way
            way.append(_looked_at(path, facts, way[-1] if way else None))
            continue
        if way[-1].is_open and facts.st_uid not in (0, os.geteuid()):
            raise UnsafeFolderError(f"{path} {_about(facts)} is another user's link")
        if (n_links := n_links + 1) > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        left += reversed(Path(os.readlink(path)).parts)
    last = way[-1]
    if problem := _problem(last.path, last.facts, is_own=True, is_foreign=False):
        raise UnsafeFolderError(f"{last.path} {problem}")
    return last.path


class _Step(NamedTuple):
    path: Path
    facts: os.stat_result
    is_foreign: bool
    """Whether the content may belong to another user namespace; "/" begins as such."""

    @property
    def is_open(self) -> bool:
        """Whether others may put files here; the folder is then sticky."""
        return bool(self.facts.st_mode & _OTHERS_WRITE)


def _facts_of(step: Path) -> os.stat_result:
    try:
        return os.lstat(step)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(step, 0o700)
        return os.lstat(step)


def _looked_at(path: Path, facts: os.stat_result, above: _Step | None) -> _Step:
    """Return a folder on the way; UnsafeFolderError if others could replace the next one."""
    is_foreign = (above is None or above.is_foreign) and _is_of_no_user_here(facts.st_uid)
    if problem := _problem(path, facts, is_own=False, is_foreign=is_foreign):
        raise UnsafeFolderError(f"{path} {problem}")
    is_closed = not facts.st_mode & _OTHERS_WRITE
    return _Step(path, facts, (is_foreign or facts.st_uid == 0) and is_closed)


def is_own_file(facts: os.stat_result) -> bool:
    """Return whether this is a file that only this user can have written."""
    return (
        stat.S_ISREG(facts.st_mode)
        and facts.st_uid == os.geteuid()
        and not facts.st_mode & _OTHERS_WRITE
    )


def _problem(step: Path, facts: os.stat_result, *, is_own: bool, is_foreign: bool) -> str:
    """Return why others could replace the content of this folder; empty if they cannot."""
    about, me = _about(facts), os.geteuid()
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


def _about(facts: os.stat_result) -> str:
    return f"(owner {_user_name(facts.st_uid)}, mode {stat.S_IMODE(facts.st_mode):04o})"


def _is_alone_in_group(step: Path, facts: os.stat_result) -> bool:
    """Return whether this is a user's own folder and private group, as distributions make them."""
    import grp

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(facts.st_gid)
    except KeyError:
        return False
    if facts.st_uid != user.pw_uid or group.gr_name != user.pw_name:
        return False
    if user.pw_gid != facts.st_gid or any(name != user.pw_name for name in group.gr_mem):
        return False
    try:  # with an access control list, the group's bits also stand for others
        return "system.posix_acl_access" not in os.listxattr(step)
    except OSError:
        return True  # a file system without such lists


def _is_of_no_user_here(uid: int) -> bool:
    """Return whether a container without root shows a user of the host this way.

    In a user namespace (Apptainer, rootless Podman) root and all other users outside look like a
    single user, who has no number inside.
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
