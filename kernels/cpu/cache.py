"""Where compiled loops come from, and which process compiles them. Imports no compiler.

Loops come from the package if it has machine code that fits here (`gpucoll.kernels.cpu.packaged`),
otherwise from the cache.

Numba's cache only notices an edit of the cached function, not of one that it calls in another
module. So the folder is named after a hash of every source involved, of the versions of the
compilers, and of the processor. One process of the host compiles loops that are missing or damaged,
and the others wait for it. Because loops are code, they are loaded only from a folder that no other
user can write to.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gpucoll import config
from gpucoll.errors import ArgumentError, BackendUnavailableError
from gpucoll.kernels.cpu import loop_files, packaged
from gpucoll.kernels.cpu.cache_key import key
from gpucoll.kernels.cpu.own_folders import UnsafeFolderError, own_folder

if TYPE_CHECKING:
    import subprocess

    from gpucoll.kernels.cpu.library import Library
    from gpucoll.kernels.cpu.private_folder import PrivateFolder
    from gpucoll.progress import Progress

N_ELSEWHERE = 3
"""The last modules take as long to compile as all others, so a second process compiles them."""


# --- the folder -----------------------------------------------------------------------------------


_private: PrivateFolder | None = None
_why_private = ""


@functools.cache
def cache_folder() -> Path:
    """Return the folder of the loops compiled from exactly these sources; make it if needed.

    A file system without room for them counts as having no folder. A launcher then makes one folder
    for all its ranks, which would otherwise each compile for themselves.

    Raises
    ------
    ArgumentError
        The folder that the user named is not usable.
    BackendUnavailableError
        There is no folder to which no other user can write.
    """
    problems = []
    if (named := config.cache_dir()) is not None:
        try:
            folder = _folder_in(named)
        except OSError as error:
            raise ArgumentError(_refusal(named, error)) from None
        try:
            _check_room(folder)
        except OSError as error:
            problems.append(_text(error))
        else:
            return folder
    for root in () if named else config.usual_cache_dirs():
        try:
            folder = _folder_in(root)
            _check_room(folder)
        except OSError as error:
            problems.append(_text(error))
        else:
            return folder
    return _private_folder("; ".join(problems) or "there is no home folder")


def _folder_in(root: Path) -> Path:
    folder = own_folder(root) / key()
    if not folder.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _check_room(folder: Path) -> None:
    """Raise OSError if there is no room for all loops, unless they are in the package."""
    if not packaged.fit().files:
        loop_files.check_room(folder)


def _private_folder(why: str) -> Path:
    """Return a folder of this process, or of the launcher that started it."""
    global _private, _why_private
    from gpucoll.kernels.cpu.private_folder import PrivateFolder

    _why_private = why
    if (given := config.launcher_cache()) is not None:
        with contextlib.suppress(OSError):
            return _folder_in(given)
    try:
        _private = PrivateFolder()
        return _folder_in(_private.path)
    except OSError as error:
        raise BackendUnavailableError(
            f"there is no folder for the compiled CPU kernels: {why}; {_text(error)}. They are "
            f"code, so no other user may be able to write to it: name one by {config.CACHE_DIR}"
        ) from None


def _refusal(named: Path, error: OSError) -> str:
    return (
        f"{config.CACHE_DIR}={named} cannot hold the compiled CPU kernels: {_text(error)}. They "
        "are code that this process runs, so the folder must belong to the user who runs it, and "
        "neither it nor a folder above it may be open to others (except sticky ones, as /tmp): "
        f"chmod go-w, name another folder, or unset {config.CACHE_DIR}"
    )


def _text(error: OSError) -> str:
    if isinstance(error, UnsafeFolderError) or error.strerror is None or error.filename is None:
        return error.strerror or str(error)
    return f"{error.filename}: {error.strerror}"


def environment() -> dict[str, str]:
    """Return the environment with which child processes use this one's private folder, if any."""
    return {} if _private is None else {config.LAUNCHER_CACHE: str(_private.path)}


# --- loading and compiling ------------------------------------------------------------------------

_lock = threading.Lock()  # several threads may call init
_imported = False
_compiling = False
_building: Path | None = None
_verified: Path | None = None
_not_kept = ""
_not_linked = ""


def is_complete() -> bool:
    """Return whether every loop is in the package or the cache, and undamaged."""
    return bool(packaged.fit().files) or loop_files.look(cache_folder()).is_complete


class Compiler(Protocol):
    """Compiles loops; Numba is imported when one of its methods is called."""

    def compile(self, module: str) -> None:
        """Import a module and compile its loops, or load them one by one."""

    def compile_elsewhere(self, folder: Path) -> subprocess.Popen[bytes]:
        """Start a process that compiles the last modules into a folder."""

    def extent(self, folder: Path | None) -> str:
        """Return how many loops are compiled, by this process or into the folder: a thread asks."""

    def link(self, library: Path) -> None:
        """Make one library of all loops; raise the error if that fails."""


def prepare(modules: Sequence[str], compiler: Compiler, is_alone: bool = False) -> None:
    """Make all loops ready; while the cache is incomplete, one process at a time compiles.

    If the package has them, nothing is left to do. The process that compiles shows on stderr how
    far it is. The others wait, and load the library that it linked. If a process may not run code
    from there, it loads the loops one by one.

    Parameters
    ----------
    modules : sequence of str
        All modules with loops.
    compiler : Compiler
        Compiles them.
    is_alone : bool
        Whether this is the only process of its program. If so, it also shows that it waits.
    """
    global _imported, _verified
    with _lock:
        if _imported:
            return
        if packaged.library() is not None:
            _imported = True
            return
        folder = cache_folder()
        with loop_files.FolderLock(folder) as lock:
            _take(lock, is_alone, alone=False)
            found = loop_files.look(folder)
            if not found.is_complete:
                _take(lock, is_alone, alone=True)
                found = loop_files.look(folder)
            if found.is_complete:
                lock.take(alone=False)  # other waiting processes can load at the same time
                _verified = folder
                if library() is None:
                    _compile(modules, compiler)
                loop_files.touch(folder)
            else:
                _build(folder, found.damage, modules, compiler)
        _imported = True


def _take(lock: loop_files.FolderLock, shows: bool, *, alone: bool) -> None:
    if lock.take(alone=alone, limit_s=0):
        return
    from gpucoll.progress import WAITING, Progress

    with Progress(WAITING) if shows else contextlib.nullcontext():
        lock.take(alone=alone)


def _build(folder: Path, damage: str, modules: Sequence[str], compiler: Compiler) -> None:
    """Compile all loops, and keep them in the folder if that is possible."""
    from gpucoll.progress import Progress, say

    start = time.monotonic()
    if packaged.fit().is_refused or packaged.fit().files:
        say(f"gpucoll: the package's machine code is not used: {packaged.problem()}")
    if damage or _why_private:
        say(_reason(folder, damage))
    once = "for this run alone" if _why_private else "for this machine, once"
    with Progress(f"gpucoll: compiling {once}") as progress:
        _fill(folder, modules, compiler, progress)
        done = f"gpucoll: compiled the CPU kernels in {time.monotonic() - start:.0f} s"
        if not _not_kept and not _not_linked:
            progress.ended = f"{done}, into {folder}"
    if _not_kept:
        say(f"{done}, but cannot keep them: {_not_kept}")
    elif _not_linked:
        say(f"{done}, into {folder}, but ranks will start slowly: {_not_linked}")


def _fill(folder: Path, modules: Sequence[str], compiler: Compiler, progress: Progress) -> None:
    global _building, _compiling
    made = None
    _compiling = True
    progress.extent = lambda: compiler.extent(made)
    try:
        made = _building = loop_files.begin(folder)
        loop_files.salvage(folder, made)
    except OSError as error:
        cannot_keep(error)
    try:
        if made is not None and len(os.sched_getaffinity(0)) > 1:
            _compile_in_two_processes(modules, compiler, made)
        _compile(modules, compiler)
        if made is not None and _building is not None:
            progress.extent = lambda: f"{compiler.extent(made)}, linking"
            _link(made, compiler)
            _keep(made, folder)
    finally:
        _building, _compiling = None, False
        if made is not None:
            loop_files.remove(made)


def _link(made: Path, compiler: Compiler) -> None:
    global _not_linked
    library = made / loop_files.LIBRARY
    try:
        compiler.link(library)
    except Exception as error:  # the exceptions of other versions of Numba and LLVM are unknown
        _not_linked = f"{error}" or type(error).__name__
        library.unlink(missing_ok=True)


def _keep(made: Path, folder: Path) -> None:
    global _verified
    try:
        loop_files.publish(made, folder)
    except OSError as error:
        cannot_keep(error)
    else:
        _verified = folder
        loop_files.remove_old(folder)


def _reason(folder: Path, damage: str) -> str:
    """Return why loops are compiled that were kept before, or that will not be."""
    compiling, time_needed = "gpucoll: compiling the CPU kernels", "(10 s to a minute)"
    if damage:
        return f"{compiling} again {time_needed}: those in {folder} cannot be used, {damage} ..."
    return (
        f"{compiling} for this run alone {time_needed}, since there is no folder to keep them in, "
        f"{_why_private}; {config.CACHE_DIR} can name one ..."
    )


def _compile_in_two_processes(modules: Sequence[str], compiler: Compiler, made: Path) -> None:
    with compiler.compile_elsewhere(made) as helper:
        try:
            _compile(modules[:-N_ELSEWHERE], compiler)
            helper.wait()  # this process does what the helper could not do
        except BaseException:
            helper.kill()
            raise


def _compile(modules: Iterable[str], compiler: Compiler) -> None:
    for name in modules:
        compiler.compile(name)


def build_into(folder: Path) -> None:
    """Write the loops that this process compiles to a folder that another process fills."""
    global _building
    _building = own_folder(folder)


def building() -> Path | None:
    """Return the folder for compiled loops, if this process compiles them."""
    return _building


def cannot_keep(error: OSError) -> None:
    """Note that the loops cannot be written; this process can use them nevertheless."""
    global _building, _not_kept
    _building, _not_kept = None, _text(error)


def folder_to_load_from() -> Path | None:
    """Return the folder with the loops, if they are complete and undamaged."""
    return _verified or _folder_found_complete()


def library() -> Library | None:
    """Return the package's library or the cache's, unless this process compiles or has none."""
    if _compiling or _building is not None:
        return None
    if (found := packaged.library()) is not None:
        return found
    folder = folder_to_load_from()
    return None if folder is None else _library_in(folder)


@functools.cache
def _library_in(folder: Path) -> Library | None:
    from gpucoll.kernels.cpu import library  # a launcher loads none

    return library.load(folder / loop_files.LIBRARY)


@functools.cache
def _folder_found_complete() -> Path | None:
    folder = cache_folder()
    return folder if loop_files.look(folder).is_complete else None


def _renew_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_in_child)
