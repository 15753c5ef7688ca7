"""Numba's cache of compiled functions, over the folder that `gpucoll.kernels.cpu.cache` chose.

Numba itself would look for a folder (``NUMBA_CACHE_DIR``, beside the source), name the files after
the place of the source, and raise whatever reading a damaged file raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc

from gpucoll.kernels.cpu import cache
from gpucoll.kernels.cpu.cache_key import key

__all__ = ["CachedLoop"]


class _Place(_CacheLocator):  # type: ignore[misc]
    """Where the files of a function are, and what they are called."""

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        self._py_file = function.__code__.co_filename  # Numba's warnings name it
        self._folder = folder
        self._name = f"{function.__module__}-{function.__code__.co_firstlineno}"

    def get_cache_path(self) -> str:
        """Return the folder."""
        return str(self._folder)

    def ensure_cache_path(self) -> None:
        """Do nothing: the folder is there, or writing says why not."""

    def get_source_stamp(self) -> str:
        """Return what changes with the source."""
        return key()

    def get_disambiguator(self) -> str:
        """Return what tells functions of one name apart."""
        return self._name


class _Files(CompileResultCacheImpl):  # type: ignore[misc]
    """What is written of a compiled function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # Not Numba's own, which searches for a place.
        self._lineno = function.__code__.co_firstlineno
        folder = cache.building() or cache.folder_to_load_from() or cache.cache_folder()
        self._locator = _Place(function, folder)
        self._filename_base = self.get_filename_base(function.__qualname__, "")


class _LoopCache(FunctionCache):  # type: ignore[misc]
    """Loads what was found to be whole, and writes only into a folder that is being filled."""

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function; None where it has to be compiled."""
        if cache.building() is None and cache.folder_to_load_from() is None:
            return None
        try:
            found = super().load_overload(sig, target_context)
        except Exception:  # damaged just now, and pickle raises anything
            found = None
        if found is None and cache.building() is None:
            _say_missing()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write a compiled function, if the folder is being filled and can be written to."""
        if cache.building() is None:
            return
        try:
            super().save_overload(sig, data)
        except OSError as error:
            cache.cannot_keep(error)


@functools.cache
def _say_missing() -> None:
    cache.say(
        f"gpucoll: compiling the CPU kernels for this process alone: {cache.cache_folder()} has "
        "none for this processor, or was changed just now"
    )


class CachedLoop(CFunc):
    """A compiled C function that is kept in gpucoll's cache."""

    def enable_caching(self) -> None:
        """Use gpucoll's cache."""
        self._cache = _LoopCache(self.__wrapped__)
