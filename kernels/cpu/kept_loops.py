"""Loops that most programs do not need: compiled when they are first used, and kept since.

They are not in the linked library, so that whoever does not use them neither compiles nor loads
them. Each lies beside it in a library of its own, which one process of the host makes.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from gpucoll.hashing import blake2b
from gpucoll.kernels.cpu import cache
from gpucoll.kernels.cpu.jit import Loop, Signature

__all__ = ["KeptLoop", "compiled_when_used"]

_lock = threading.RLock()


class KeptLoop(Loop):
    """A compiled C function in a library of its own.

    Of the sources it depends on those of its own folder, on those of the folders of `further`
    modules, and on what the cache's folder is named after.
    """

    def __init__(
        self, function: Callable[..., Any], signature: Signature, further: tuple[str, ...] = ()
    ) -> None:
        super().__init__(function, signature)
        self._modules = (self.__module__, *further)

    @cached_property
    def numba(self) -> Any:
        """The function as Numba compiled it just now."""
        from numba.core import sigutils
        from numba.core.ccallback import CFunc

        signature = sigutils.normalize_signature(self.signature.numba)
        made = CFunc(self.py_func, signature, {}, {"error_model": "numpy"})
        made.compile()
        return made

    @cached_property
    def address(self) -> int:
        """Where its code is; compiled now (2 to 4 s) where nobody has used it here before."""
        with _lock:
            if cache.library() is not None:
                from gpucoll.kernels.cpu.kernel_files import kept_library
                from gpucoll.kernels.cpu.loop_files import FolderLock

                path, make = self.path(), functools.partial(_linked, self)
                with FolderLock(path) as lock:
                    if not path.exists():
                        lock.take(alone=True)  # one compiles, the others wait for it
                    kept = kept_library(path, make)
                found = None if kept is None else kept.address(self.symbol)
                if found is not None:
                    return found
            return int(self.numba.address)

    def path(self) -> Path:
        """Return where it is kept; the name changes with any source of the loop's folders."""
        digest = blake2b(digest_size=8)
        for module in self._modules:
            for file in sorted(Path(str(sys.modules[module].__file__)).parent.glob("*.py")):
                digest.update(file.name.encode() + b"\0" + blake2b(file.read_bytes()).digest())
        return cache.cache_folder() / f"{self.symbol}-{digest.hexdigest()}.so"


def _linked(loop: Loop) -> bytes:
    from gpucoll.kernels.cpu.linking import linked

    return linked([loop], [])


def compiled_when_used(signature: Signature, *further: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorate what becomes a C function, by itself, when its address is first asked for.

    Parameters
    ----------
    signature : Signature
        Of the function.
    *further : str
        Modules, imported by its own, in whose folders lies what it inlines.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        return KeptLoop(function, signature, further)

    return decorate
