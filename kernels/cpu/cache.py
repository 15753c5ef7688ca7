"""Where compiled loops are kept, and who compiles them. Imports no compiler.

Numba's cache sees an edit of the cached function only, not of one that it calls in another module;
so the folder is named after a hash of every source that takes part, and of what compiles it. A
stamp in it says that everything is there; while it is not, one process of the host compiles and the
others wait for it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path

from gpucoll import config

_PACKAGE = Path(config.__file__).parent
_COMPILED_FOLDERS = (
    "kernels/cpu",
    "transport/shared",
    "memory",
    "entries",
    "group/host",
    "backends/cpu/host",
    "backends/gpu",
)
_FURTHER_SOURCES = ("types.py", "arrays/numpy_struct.py")
_STAMP = "complete"
N_ELSEWHERE = 3
"""The last modules take as long to compile as all others: a second process does these."""


def _source_files() -> list[Path]:
    files = [file for name in _COMPILED_FOLDERS for file in (_PACKAGE / name).glob("*.py")]
    return sorted(files) + [_PACKAGE / name for name in _FURTHER_SOURCES]


@functools.cache
def cache_folder() -> Path:
    """Return the folder of the loops compiled from exactly these sources, made if need be."""
    digest = hashlib.sha256()
    for file in _source_files():
        digest.update(file.read_bytes())
    versions = [metadata.version(name) for name in ("numba", "llvmlite", "numpy")]
    for text in (*versions, platform.python_version(), platform.machine(), str(_PACKAGE)):
        digest.update(text.encode() + b"\0")
    folder = config.cache_root() / f"loops-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home, or a read-only one: compile again in the next boot, but work
        folder = Path(tempfile.gettempdir()) / f"gpucoll-{os.getuid()}" / folder.name
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def is_complete() -> bool:
    """Return whether every loop is in the cache."""
    return (cache_folder() / _STAMP).exists()


def import_compiled(
    modules: Sequence[str], compile_elsewhere: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """Import modules with compiled loops; while the cache is incomplete, one process at a time.

    Parameters
    ----------
    modules : sequence of str
        All of them.
    compile_elsewhere : callable
        Starts a process that compiles the last ones, while this one does the others.
    """
    if is_complete():
        _import(modules)
        return
    with open(cache_folder() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_complete() and len(os.sched_getaffinity(0)) > 1:
            with compile_elsewhere() as helper:
                _import(modules[:-N_ELSEWHERE])
                helper.wait()  # what it could not do is done below
        _import(modules)
        (cache_folder() / _STAMP).touch()


def _import(modules: Iterable[str]) -> None:
    for name in modules:
        importlib.import_module(name)
