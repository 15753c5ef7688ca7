"""The packages that gpucoll stands on: whether a file of the user's hides one."""

from __future__ import annotations

import functools
import importlib.util

from gpucoll.errors import BackendUnavailableError

__all__ = ["check_dependencies"]

_PACKAGES = ("numpy", "numba", "llvmlite", "cloudpickle")


@functools.cache
def check_dependencies() -> None:
    """Raise BackendUnavailableError where an import finds another file in the place of a package.

    Of a ``numpy.py`` beside the script nothing else would tell: the first to miss something in it
    is far inside Numba. Cost: 0.1 ms, once.
    """
    for name in _PACKAGES:
        try:
            found = importlib.util.find_spec(name)
        except ValueError:  # made by hand, as in a test: it says nothing of where it is from
            continue
        if found is not None and found.submodule_search_locations is None:
            raise BackendUnavailableError(
                f"gpucoll needs the package {name}, but `import {name}` finds {found.origin}, "
                "which hides it: give that file another name"
            )
