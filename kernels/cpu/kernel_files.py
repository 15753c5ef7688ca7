"""Kernels that were compiled on request: each in a separate library.

They are in the folder of the linked library, and end in a checksum: one that is truncated or
changed is made anew. If a file cannot be used, the kernel is compiled for this process only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gpucoll.kernels.cpu import library
from gpucoll.kernels.cpu.library import Library
from gpucoll.kernels.cpu.loop_files import content_of, read_own, remove_old, with_checksum

__all__ = ["keep_content", "kept_content", "kept_library"]


def kept_library(path: Path, make: Callable[[], bytes]) -> Library | None:
    """Return the library at a path, made if needed; None if it cannot be made, kept or loaded.

    Parameters
    ----------
    make : callable
        Returns the library's content; may raise any exception.
    """
    if (found := _load(path)) is not None:
        return found
    try:
        content = make()
        keep_content(path, content)
        remove_old(path.parent)
    except Exception:
        return None
    return _load(path)


def _load(path: Path) -> Library | None:
    return None if kept_content(path) is None else library.load(path)


def kept_content(path: Path) -> bytes | None:
    """Return a file's content before its checksum; None if the file is damaged."""
    try:
        data = read_own(path)
    except OSError:
        return None
    return content_of(data)


def keep_content(path: Path, content: bytes) -> None:
    """Put a file in place atomically; processes that use the previous one keep it."""
    import tempfile  # only if something is compiled

    descriptor, made = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(with_checksum(content))
        os.replace(made, path)
    except BaseException:
        os.unlink(made)
        raise
