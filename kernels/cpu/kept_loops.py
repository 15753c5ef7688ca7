"""Loops that most programs do not need: compiled when they are first used, then kept.

They are not in the cache's linked library, so that programs that do not use them neither compile
nor load them. Each is in a separate library next to it, which one process of the host makes.
The package's machine code has some of them.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from gpucoll.hashing import blake2b
from gpucoll.kernels.cpu import cache
from gpucoll.kernels.cpu.jit import Loop, NumbaFunction

__all__ = ["KeptLoop", "compiled_when_used"]

_lock = threading.RLock()


class KeptLoop(Loop):
    """A compiled C function in a separate library.

    It depends on the sources in its own folder, on those in the folders of the `further` modules,
    and on everything that the name of the cache's folder depends on.
    """

    def __init__(self, function: Callable[..., object], further: tuple[str, ...] = ()) -> None:
        super().__init__(function)
        self._modules = (self.__module__, *further)

    @cached_property
    def numba(self) -> NumbaFunction:
        """The function, compiled by Numba now."""
        from numba.core import sigutils
        from numba.core.ccallback import CFunc

        signature = sigutils.normalize_signature(self.numba_signature)
        made = CFunc(self.py_func, signature, {}, {"error_model": "numpy"})
        made.compile()
        return made

    @cached_property
    def address(self) -> int:
        """The address of its code; compiled now (2 to 4 s) if neither package nor cache has it."""
        with _lock:
            library = cache.library()
            found = None if library is None else library.address(self.symbol)
            if found is None and library is not None:
                from gpucoll.kernels.cpu.kernel_files import kept_library
                from gpucoll.kernels.cpu.loop_files import FolderLock

                path, make = self.path(), functools.partial(_linked, self)
                with FolderLock(path) as lock:
                    if not path.exists():
                        lock.take(alone=True)  # one compiles, the others wait for it
                    kept = kept_library(path, make)
                found = None if kept is None else kept.address(self.symbol)
            return int(self.numba.address) if found is None else found

    def path(self) -> Path:
        """Return its library's path, which changes with any source in the loop's folders."""
        digest = blake2b(digest_size=8)
        for module in self._modules:
            for file in sorted(Path(str(sys.modules[module].__file__)).parent.glob("*.py")):
                digest.update(file.name.encode() + b"\0" + blake2b(file.read_bytes()).digest())
        return cache.cache_folder() / f"{self.symbol}-{digest.hexdigest()}.so"


def _linked(loop: Loop) -> bytes:
    from gpucoll.progress import Progress

    with Progress(f"gpucoll: compiling {loop.__name__} for this machine, once"):
        from gpucoll.kernels.cpu.linking import linked

        return linked([loop], [])


def compiled_when_used(*further: str) -> Callable[[Callable[..., object]], KeptLoop]:
    """Decorate a function that becomes a separate C function when its address is first requested.

    Parameters
    ----------
    *further : str
        Modules, imported by the function's own module, whose folders contain functions that it
        inlines.
    """

    def decorate(function: Callable[..., object]) -> KeptLoop:
        return KeptLoop(function, further)

    return decorate
