"""The files of compiled loops: complete and undamaged, or made anew.

A folder of loops is filled under another name and then renamed, so that it is either complete or
absent. A list in it has the checksums of its files, and no file that differs is loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from gpucoll.hashing import blake2b
from gpucoll.kernels.cpu.own_folders import UnsafeFolderError, is_own_file, own_folder

__all__ = [
    "LIBRARY",
    "Contents",
    "FolderLock",
    "begin",
    "check_room",
    "content_of",
    "look",
    "publish",
    "read_own",
    "remove",
    "remove_old",
    "salvage",
    "touch",
    "with_checksum",
]

_LIST = "complete"
_SUFFIXES = (".nbi", ".nbc", ".so")
LIBRARY = "kernels.so"
"""The file of the linked library."""
_CHECKSUM_BYTES = 32
_DAY_S = 86400.0
NEEDED_BYTES = 16 << 20
"""Room for a folder of loops: 7 MiB with all of them (2026-11-24), and what is compiled later."""
KEPT_DAYS = 30
KEPT_FOLDERS = 8
LOCK_WAIT_S = 600.0
"""How long to wait for another process to compile; then this one compiles, too: no harm is done."""


class Contents(NamedTuple):
    """The state of a folder of loops.

    Attributes
    ----------
    is_complete : bool
        Whether loops may be loaded from it.
    damage : str
        What is wrong with a folder that was complete before.
    """

    is_complete: bool
    damage: str = ""


def look(folder: Path) -> Contents:
    """Read a folder of loops; return whether it is complete and undamaged (about 2 ms)."""
    try:
        own_folder(folder)
        listed = json.loads(read_own(folder / _LIST))
        for name, checksum in listed.items():
            data = read_own(folder / name)
            if _checksum(data) != checksum:
                return Contents(False, f"{name} is {'empty' if not data else 'damaged'}")
    except FileNotFoundError as error:
        name = Path(error.filename).name
        return Contents(False, "" if name == _LIST else f"{name} is missing")
    except (AttributeError, ValueError):
        return Contents(False, f"the list of its files ({_LIST}) is damaged")
    except OSError as error:
        return Contents(False, str(error))
    return Contents(True)


def read_own(path: Path) -> bytes:
    """Return the content of a file that only this user can have written; otherwise OSError."""
    with open(path, "rb", opener=_open_without_waiting) as file:
        if not is_own_file(os.fstat(file.fileno())):
            raise UnsafeFolderError(f"{path.name} is no file that this user alone can write to")
        return file.read()


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # it might be a pipe


def _checksum(data: bytes) -> str:
    return blake2b(data, digest_size=_CHECKSUM_BYTES).hexdigest()


def with_checksum(content: bytes) -> bytes:
    """Return the content of a file that ends in its checksum."""
    return content + bytes.fromhex(_checksum(content))


def content_of(data: bytes) -> bytes | None:
    """Return what stands before the checksum at a file's end; None if the file is damaged."""
    content = data[:-_CHECKSUM_BYTES]
    return content if content and data == with_checksum(content) else None


def touch(folder: Path) -> None:
    """Note that the loops were used today."""
    with contextlib.suppress(OSError):
        if time.time() - os.stat(folder / _LIST).st_mtime > _DAY_S:
            os.utime(folder / _LIST)


def check_room(folder: Path) -> None:
    """Raise OSError if a folder has no loops yet and there is no room for them."""
    if (folder / _LIST).exists():
        return
    import tempfile  # only if something is compiled

    try:
        with tempfile.TemporaryFile(dir=folder.parent) as file:  # quotas count, too
            os.posix_fallocate(file.fileno(), 0, NEEDED_BYTES)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder.parent)) from None


# --- making ---------------------------------------------------------------------------------------


def begin(folder: Path) -> Path:
    """Return a new, empty folder, which `publish` later puts in the place of `folder`."""
    import tempfile  # only if something is compiled

    return Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))


def salvage(folder: Path, made: Path) -> None:
    """Copy the undamaged loops of a damaged folder, so that they need not be compiled."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        listed = json.loads(read_own(own_folder(folder) / _LIST))
        for name, checksum in listed.items():
            with contextlib.suppress(OSError):
                data = read_own(folder / name)
                if _checksum(data) == checksum and name != LIBRARY and name == Path(name).name:
                    (made / name).write_bytes(data)


def publish(made: Path, folder: Path) -> None:
    """Put a filled folder in the place of an empty or damaged one.

    If two processes do this at the same time, one of them succeeds, and both get what they need.
    """
    _write_list(made)
    for _ in range(10):
        try:
            os.rename(made, folder)
        except OSError:
            if look(folder).is_complete:
                remove(made)
                return
            away = begin(folder)
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder, away / "old")  # whatever kind of file it is
            remove(away)
        else:
            return
    raise OSError(f"{folder} cannot be replaced")


def _write_list(made: Path) -> None:
    checksums = {}
    for entry in sorted(made.iterdir()):
        if entry.suffix in _SUFFIXES:
            entry.chmod(0o600)
            checksums[entry.name] = _checksum(entry.read_bytes())
        else:
            entry.unlink()
    (made / _LIST).write_text(json.dumps(checksums))
    (made / _LIST).chmod(0o600)


# --- ending ---------------------------------------------------------------------------------------


def remove_old(used: Path) -> None:
    """Remove old loops of other sources, versions or processors next to `used`.

    Removes all that were not used for 30 days, and all but the eight used last. Loops that a
    process loads or compiles now are kept.
    """
    folders = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(used.parent):
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                folders.append(Path(entry.path))
    for folder in folders:
        is_begun = folder.name.startswith(".") and _is_of_loops(folder.name[1:23])
        if is_begun and _age_s(folder) > _DAY_S:  # left by a process that was killed
            remove(folder)
    loops = [folder for folder in folders if _is_of_loops(folder.name) and folder != used]
    for place, folder in enumerate(sorted(loops, key=_age_s), start=1):
        if place >= KEPT_FOLDERS or _age_s(folder) > KEPT_DAYS * _DAY_S:
            with FolderLock(folder) as lock:
                if lock.take_at_once():
                    remove(folder)
                    lock.remove()


def _is_of_loops(name: str) -> bool:
    start, _, digits = name.partition("-")
    return start == "loops" and len(digits) == 16 and set(digits) <= set("0123456789abcdef")


def remove(folder: Path) -> None:
    """Remove a folder and its content, as far as possible."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _age_s(folder: Path) -> float:
    """Return the time since the folder's loops were used; infinity if it is gone."""
    for path in (folder / _LIST, folder):
        with contextlib.suppress(OSError):
            return time.time() - os.stat(path).st_mtime
    return float("inf")


class FolderLock:
    """Protects a folder while processes load from it, and lets one process at a time fill it.

    If the file system has no locks, or the folder cannot be written to, it excludes no process.
    Then several processes may do the same work.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder.with_name(f"{folder.name}.lock")
        self._descriptor = -1

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def take(self, *, alone: bool, limit_s: float | None = None) -> bool:
        """Wait until no other process fills the folder; with `alone`, until none loads either.

        Return False if another one still does.
        """
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        deadline = time.monotonic() + (LOCK_WAIT_S if limit_s is None else limit_s)
        while self._try(kind) is False:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def take_at_once(self) -> bool:
        """Return whether no other process uses the folder; if so, none can from now on."""
        return self._try(fcntl.LOCK_EX) is True

    def remove(self) -> None:
        """Remove the lock together with the folder."""
        self._path.unlink(missing_ok=True)

    def _try(self, kind: int) -> bool | None:
        """Return whether the lock was taken; None if there are no locks."""
        try:
            if self._descriptor < 0:
                flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
                self._descriptor = os.open(self._path, flags, 0o600)
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._descriptor), os.stat(self._path)):
                return True
        self._close()  # the lock was removed with its folder while this process waited
        return False

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
