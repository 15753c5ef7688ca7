"""A check whether a file of the user's hides a package that gpucoll needs."""

from __future__ import annotations

import functools
import importlib.util

from gpucoll.errors import BackendUnavailableError

__all__ = ["check_dependencies"]

_PACKAGES = ("numpy", "numba", "llvmlite", "cloudpickle")


@functools.cache
def check_dependencies() -> None:
    """Raise BackendUnavailableError if an import finds another file in place of a package.

    Without this check, a ``numpy.py`` beside the script would first fail far inside Numba. Cost:
    0.1 ms, once.
    """
    for name in _PACKAGES:
        try:
            found = importlib.util.find_spec(name)
        except ValueError:  # a module made by hand, as in a test, does not tell its origin
            continue
        if found is not None and found.submodule_search_locations is None:
            raise BackendUnavailableError(
                f"gpucoll needs the package {name}, but `import {name}` finds {found.origin}, "
                "which hides it: give that file another name"
            )
