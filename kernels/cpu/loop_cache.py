"""Numba's cache of compiled functions, in the folder that `gpucoll.kernels.cpu.cache` chose.

Numba itself would look for a folder (``NUMBA_CACHE_DIR``, or one next to the source), name the
files after the place of the source, and pass on any exception from reading a damaged file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc

from gpucoll.kernels.cpu import cache
from gpucoll.kernels.cpu.cache_key import key
from gpucoll.progress import say

if TYPE_CHECKING:
    from gpucoll.kernels.cpu.jit import NumbaContext, NumbaFunction, NumbaSignature

__all__ = ["CachedLoop"]


class _Place(_CacheLocator):  # type: ignore[misc]
    """The place and the names of a function's files."""

    def __init__(self, function: Callable[..., object], folder: Path) -> None:
        self._py_file = function.__code__.co_filename  # Numba's warnings name it
        self._folder = folder
        self._name = f"{function.__module__}-{function.__code__.co_firstlineno}"

    def get_cache_path(self) -> str:
        """Return the folder."""
        return str(self._folder)

    def ensure_cache_path(self) -> None:
        """Do nothing: the folder exists, or writing reports why not."""

    def get_source_stamp(self) -> str:
        """Return a value that changes with the source."""
        return key()

    def get_disambiguator(self) -> str:
        """Return a value that distinguishes functions of the same name."""
        return self._name


class _Files(CompileResultCacheImpl):  # type: ignore[misc]
    """The part of a compiled function that is written."""

    def __init__(self, function: Callable[..., object]) -> None:
        # Unlike Numba's own class, this one does not search for a place.
        self._lineno = function.__code__.co_firstlineno
        folder = cache.building() or cache.folder_to_load_from() or cache.cache_folder()
        self._locator = _Place(function, folder)
        self._filename_base = self.get_filename_base(function.__qualname__, "")


class _LoopCache(FunctionCache):  # type: ignore[misc]
    """Loads loops from a complete folder, and writes only into a folder that is being filled."""

    _impl_class = _Files

    def load_overload(
        self, sig: NumbaSignature, target_context: NumbaContext
    ) -> NumbaFunction | None:
        """Return the compiled function; None if it has to be compiled."""
        if cache.building() is None and cache.folder_to_load_from() is None:
            return None
        try:
            found = super().load_overload(sig, target_context)
        except Exception:  # damaged just now; pickle can raise any exception
            found = None
        if found is None and cache.building() is None:
            _say_missing()
        return found

    def save_overload(self, sig: NumbaSignature, data: NumbaFunction) -> None:
        """Write a compiled function, if the folder is being filled and can be written to."""
        if cache.building() is None:
            return
        try:
            super().save_overload(sig, data)
        except OSError as error:
            cache.cannot_keep(error)


@functools.cache
def _say_missing() -> None:
    say(
        f"gpucoll: compiling the CPU kernels for this process alone: {cache.cache_folder()} has "
        "none for this processor, or was changed just now"
    )


class CachedLoop(CFunc):
    """A compiled C function that is kept in gpucoll's cache."""

    def enable_caching(self) -> None:
        """Use gpucoll's cache."""
        self._cache = _LoopCache(self.__wrapped__)
