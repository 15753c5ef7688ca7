"""Compiled kernels by their sources: loaded from the cache, or compiled now.

An image contains one kernel, or a group of kernels that was compiled ahead.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from gpucoll.devices.kernels import image_files
from gpucoll.devices.kernels.compiler import VENDORS, Compiler, compiler_of, kind_of
from gpucoll.errors import BackendUnavailableError
from gpucoll.hashing import blake2b
from gpucoll.kernels.gpu.catalogue import group_of
from gpucoll.kernels.gpu.source import Kernel, source_of

__all__ = ["Image", "compile_group", "image_of"]

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
        if (found := _look(kernel, target, image_files.any_kept, ".", "kept")) is not None:
            return found
        raise
    ending = f".{compiler.identity}"
    if (found := _look(kernel, target, image_files.kept, ending, str(compiler))) is not None:
        return found
    return _made((kernel,), target, compiler)


def compile_group(group: Group, target: str) -> Image:
    """Return the image of kernels that are compiled together, from the cache or compiled now."""
    return _made(group, target, compiler_of(kind_of(target)))


def _made(group: Group, target: str, compiler: Compiler) -> Image:
    def make() -> bytes:
        return compiler.compile(source_of(group), target)

    name = f"{_name(group, target)}.{compiler.identity}"
    return Image(group, image_files.made_once(name, make), str(compiler))


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
