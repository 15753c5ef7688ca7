"""Compiled kernels by their sources: loaded from the cache, or compiled now.

The cache is a folder next to the CPU kernels', with the same rules. A file is named after
everything on which its content depends, and ends in a checksum. It is written under another name
and renamed. Because it is code, it is read only from a folder to which no other user can write.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gpucoll.devices.kernels.compiler import VENDORS, Compiler, compiler_of, kind_of
from gpucoll.errors import BackendUnavailableError
from gpucoll.hashing import blake2b
from gpucoll.kernels.cpu import cache
from gpucoll.kernels.cpu.kernel_files import keep_content, kept_content
from gpucoll.kernels.cpu.loop_files import FolderLock
from gpucoll.kernels.cpu.own_folders import own_folder
from gpucoll.kernels.gpu.catalogue import group_of
from gpucoll.kernels.gpu.source import Kernel, source_of

# --- the cache ------------------------------------------------------------------------------------


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
    for path in place.iterdir():
        if _age_s(path) > _KEPT_DAYS * _DAY_S:
            path.unlink(missing_ok=True)


def _age_s(path: Path) -> float:
    try:
        return time.time() - os.stat(path).st_mtime
    except OSError:
        return 0.0


# --- images ---------------------------------------------------------------------------------------

# An image contains one kernel, or a group of kernels that was compiled ahead.


Group = tuple[Kernel, ...]


class Image(NamedTuple):
    """The compiled code that a device loads."""

    kernels: Group
    """The kernels in it."""
    content: bytes
    origin: str
    """The compiler that made it, for messages."""


def image_of(kernel: Kernel, target: str, most_major: int = 0) -> Image:
    """Return an image with a kernel, compiled for a target.

    Cost: reading a file if it was kept; otherwise about half a second of compiling. If several
    processes need it at the same time, one of them compiles.

    Parameters
    ----------
    kernel : Kernel
    target : str
        A device's `gpucoll.devices.Device.target`.
    most_major : int
        See `gpucoll.devices.kernels.compiler.compiler_of`.

    Raises
    ------
    BackendUnavailableError
        It was not kept, and there is no compiler. Without a compiler, images from any copy are
        accepted.
    BackendError
        It does not compile.
    """
    try:
        compiler = compiler_of(kind_of(target), most_major)
    except BackendUnavailableError:
        if (found := _look(kernel, target, any_kept, ".", "kept")) is not None:
            return found
        raise
    ending = f".{compiler.identity}"
    if (found := _look(kernel, target, kept, ending, str(compiler))) is not None:
        return found
    return _made((kernel,), target, compiler)


def compile_group(group: Group, target: str) -> Image:
    """Return the image of kernels that are compiled together, from the cache or compiled now."""
    return _made(group, target, compiler_of(kind_of(target)))


def _made(group: Group, target: str, compiler: Compiler) -> Image:
    def make() -> bytes:
        return compiler.compile(source_of(group), target)

    name = f"{_name(group, target)}.{compiler.identity}"
    return Image(group, made_once(name, make), str(compiler))


def _look(
    kernel: Kernel, target: str, find: Callable[[str], bytes | None], ending: str, origin: str
) -> Image | None:
    """Return a kept image: for exactly this target, or for its architecture in all modes."""
    for group in dict.fromkeys([(kernel,), group_of(kernel)]):
        for name in dict.fromkeys([target, target.partition(":")[0]]):
            if (content := find(_name(group, name) + ending)) is not None:
                return Image(group, content, origin)
    return None


@functools.cache
def _name(group: Group, target: str) -> str:
    """Return the file name of an image, without the part for the compiler's copy."""
    vendor = VENDORS[kind_of(target)]
    digest = blake2b(digest_size=12)
    for text in (vendor.name, *vendor.options, target, source_of(group)):
        digest.update(text.encode() + b"\0")
    stem, architecture = group[0].file.partition(".")[0], re.sub(r"\W", "_", target)
    return f"{stem}-{architecture}-{digest.hexdigest()}"
