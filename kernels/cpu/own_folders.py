"""Folders that this user alone can write to: what lies in others is not run. Imports no compiler.

Compiled kernels are pickles and machine code: whoever can put a file where they are kept, or can
put another folder in that place, runs code as this user.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path

__all__ = ["UnsafeFolderError", "is_own_file", "own_folder"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


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
