"""Machine code that came with the package, and whether it fits here. Imports no compiler.

`gpucoll.backends.machine_code` makes it when the package is built: for each level of processors a
few libraries, which together have the loops and kernels that most programs need. The name of a file
says what must be equal here: the level, a digest of the sources, and the interpreter's binary
interface. Each file ends in its checksum. It is trusted as the package's Python files are, so its
owner does not matter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpucoll import config
from gpucoll.kernels.cpu.cache_key import PACKAGE, packaged_digest
from gpucoll.kernels.cpu.levels import levels_here
from gpucoll.kernels.cpu.loop_files import content_of

if TYPE_CHECKING:
    from gpucoll.kernels.cpu.library import Library

__all__ = ["FOLDER", "N_PARTS", "Fit", "file_name", "fit", "library", "look", "problem"]

FOLDER = PACKAGE / "machine_code"
N_PARTS = 3
"""How many libraries the machine code of a level consists of; as many processes make them."""
_REASON = "not_made.txt"
"""The file in the place of the others that says why the build made none."""
_SUFFIX = EXTENSION_SUFFIXES[0]
"""The end of a file's name, as of an extension module for this interpreter."""
_NONE = "the package has none"


class Fit(NamedTuple):
    """The machine code that this process may load.

    Attributes
    ----------
    level : str
        The level of processors that it was made for; empty if none fits.
    files : tuple of Path
        Its libraries.
    problem : str
        Why none fits.
    is_refused : bool
        Whether there is some that would have to fit: neither the user nor the build wanted it so.
    """

    level: str
    files: tuple[Path, ...] = ()
    problem: str = ""
    is_refused: bool = False


def file_name(level: str, part: int, digest: str) -> str:
    """Return the name of a library."""
    return f"{level}-{part}-{digest}{_SUFFIX}"


@functools.cache
def fit() -> Fit:
    """Return the package's machine code for this process; reads all of it (2 ms)."""
    if config.compiles():
        return Fit("", problem=f"{config.COMPILE} is set")
    if settings := config.code_settings():
        return Fit("", problem=f"{settings} asks for other code")
    if not FOLDER.exists():  # a checkout: nothing has to be read
        return Fit("", problem=_NONE)
    return look(FOLDER, packaged_digest(), [level.name for level in levels_here()])


def look(folder: Path, digest: str, levels: list[str]) -> Fit:
    """Return what a folder has for this interpreter, these sources and levels, the best first."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return Fit("", problem=_NONE)
    damaged = ""
    for level in levels:
        wanted = [file_name(level, part, digest) for part in range(N_PARTS)]
        if not set(wanted).isdisjoint(names):
            files = tuple(folder / name for name in wanted)
            if not (damage := next(filter(None, map(_damage, files)), "")):
                return Fit(level, files)
            damaged = damaged or damage
    found = [_Name.of(name) for name in names if name.endswith(".so")]
    if not found:
        return Fit("", problem=_reason(folder))
    return Fit("", problem=damaged or _misfit(found, digest, levels), is_refused=True)


def _damage(file: Path) -> str:
    try:
        return "" if content_of(file.read_bytes()) else f"{file} is damaged"
    except OSError as error:
        return f"{file}: {error.strerror}"


class _Name(NamedTuple):
    level: str
    digest: str
    suffix: str

    @classmethod
    def of(cls, file_name: str) -> _Name:
        stem, _, suffix = file_name.partition(".")
        level, _, digest = (*stem.rsplit("-", 2), "", "")[:3]
        return cls(level, digest, f".{suffix}")


def _misfit(found: list[_Name], digest: str, levels: list[str]) -> str:
    suffixes = {name.suffix for name in found}
    if _SUFFIX not in suffixes:
        return f"it is for {_listed(suffixes)}, and this interpreter loads *{_SUFFIX}"
    if all(name.digest != digest for name in found):
        return "it was made of other sources, or for another page size"
    here = levels[0] if levels else "no level"
    return f"it is for {_listed(name.level for name in found)}; this processor reaches {here}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted({*names}))


def _reason(folder: Path) -> str:
    try:
        return (folder / _REASON).read_text(encoding="utf-8").strip()
    except OSError:
        return _NONE


@functools.cache
def library() -> Library | None:
    """Return the loaded libraries; None if none fits, or the dynamic linker refuses one."""
    files = fit().files
    if not files:
        return None
    from gpucoll.kernels.cpu import library as libraries  # a launcher loads none

    loaded = [found for file in files if (found := libraries.load(file)) is not None]
    return libraries.Libraries(loaded) if len(loaded) == len(files) else None


def problem() -> str:
    """Return why this process does not use the package's machine code; empty if it does."""
    refused = "the dynamic linker refuses it" if library() is None else ""
    return fit().problem or refused
