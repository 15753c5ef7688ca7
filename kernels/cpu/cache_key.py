"""The name of a set of compiled loops: a hash of all that their machine code depends on."""

from __future__ import annotations

import functools
import importlib.util
import mmap
import os
import sys
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from gpucoll import config
from gpucoll.hashing import blake2b

__all__ = ["COMPILED_FOLDERS", "PACKAGE", "key", "packaged_digest", "processor", "version_of"]

PACKAGE = Path(config.__file__).parent
COMPILED_FOLDERS = (
    "kernels/cpu",
    "transport/shared",
    "memory",
    "entries",
    "group/host",
    "backends/cpu/host",
    "backends/gpu",
)
"""The folders with compiled functions, below the package."""
_FURTHER_SOURCES = (
    *("types.py", "collectives.py", "codes.py", "blocks.py"),
    *("arrays/numpy_struct.py", "arrays/tensor_table.py", "kernels/block_message.py"),
)
"""Further files from which numbers and layouts get into machine code."""
_FURTHER_PACKAGED = ("transport/tcp", "backends/cpu/wires")
"""Further folders whose loops are in the package's machine code."""
_VERSION_FILES = {"numba": "_version.py", "llvmlite": "_version.py", "numpy": "version.py"}
_ABOUT_PROCESSOR = {
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),  # x86
    *("features", "cpu implementer", "cpu variant", "cpu part"),  # Arm
    *("cpu", "isa", "uarch"),  # others
}


@functools.cache
def key() -> str:
    """Return the name of these loops: a hash of sources, compilers and processor.

    The linker is one of the sources. The place of the package and the age of its files do not
    count, so that the virtual environments of a user share compiled code.
    """
    versions = [version_of(name) for name in _VERSION_FILES]
    # The second one contains the name of the interpreter's binary interface.
    python = (f"{sys.implementation.name} {sys.version.split()[0]}", EXTENSION_SUFFIXES[0])
    texts = (*versions, *python, processor(), config.code_settings())
    return f"loops-{_digest(_source_files(), texts)}"


def packaged_digest() -> str:
    """Return a hash of the sources of the package's machine code.

    The compilers' versions do not count: they are those of the machine that built the package. What
    depends on the interpreter is in the names of the files (`gpucoll.kernels.cpu.packaged`).
    """
    return _digest(_source_files(_FURTHER_PACKAGED))


def _digest(files: Iterable[tuple[str, Path]], texts: Iterable[str] = ()) -> str:
    """Return a hash of files and texts, and of the page size, which is a constant in loops."""
    digest = blake2b(digest_size=32)
    for name, file in files:
        digest.update(name.encode() + b"\0")
        digest.update(blake2b(file.read_bytes()).digest())
    for text in (str(mmap.PAGESIZE), *texts):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def version_of(name: str) -> str:
    """Return the version of an installed package, read from the file that states it.

    Neither imports the package nor searches for its metadata, which would take 15 ms; this takes
    0.1.
    """
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        return f"no {name}"
    file = Path(found.submodule_search_locations[0]) / _VERSION_FILES[name]
    try:
        said = file.read_bytes()
    except OSError:
        said = b""
    if b"version" not in said:
        from importlib import metadata

        return metadata.version(name)
    return blake2b(said).hexdigest()


def _source_files(further: tuple[str, ...] = ()) -> list[tuple[str, Path]]:
    """Return the sources by name, in a fixed order."""
    folders = (*COMPILED_FOLDERS, *further)
    files = [(f"{name}/{file.name}", file) for name in folders for file in _at(name).glob("*.py")]
    return sorted(files) + [(name, _at(name)) for name in _FURTHER_SOURCES]


def _at(name: str) -> Path:
    """Return where a part of the package lies; in an editable install that is not one folder."""
    top, _, rest = name.partition("/")
    return _folder(top) / rest if rest else PACKAGE / name


@functools.cache
def _folder(name: str) -> Path:
    spec = importlib.util.find_spec(f"gpucoll.{name}")
    return PACKAGE / name if spec is None else Path(str(spec.origin)).parent


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the facts on which machine code depends: the first processor's model and features.

    Its current speed and the number of processors are not included.
    """
    lines: list[str] = []
    try:
        with open(cpuinfo, encoding="utf-8", errors="replace") as file:
            for line in file:  # the kernel writes one processor at a time: the first is cheap
                name, _, value = line.partition(":")
                if not line.strip() and lines:
                    break
                if name.strip().lower() in _ABOUT_PROCESSOR:
                    lines.append(f"{name.strip()}={' '.join(sorted(value.split()))}")
    except OSError:
        lines = []
    return "\n".join([os.uname().machine, *lines])
