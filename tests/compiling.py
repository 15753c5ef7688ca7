"""What tests need compiled on a machine that has not run them: each piece once, by one process.

A compiler that has compiled several loops has the functions that they inline; in another process it
would compile those again. And it leaves half a gigabyte, which forks of that process would inherit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from threading import Thread
from typing import TypeVar

from gpucoll.backends import precompile
from gpucoll.kernels.cpu import cache, jit
from gpucoll.kernels.cpu.addresses import reduce_kernel
from gpucoll.kernels.cpu.loop_files import FolderLock
from gpucoll.progress import Progress
from gpucoll.testing import server
from gpucoll.testing.fork_server import apart
from tests.import_order import rotated, worker

_T = TypeVar("_T")


def compile_beforehand(start: Callable[[], server.RankServer]) -> None:
    """Compile the kernels before the workers of pytest-xdist collect, which imports their code.

    Without them each worker would load the compiler. A thread then starts a server of ranks by
    `start`: that server compiles what else ranks of tests need, while the workers collect.
    """
    if not cache.is_complete():
        server.RankServer().close()  # it starts when the kernels are compiled
        Thread(target=lambda: start().close(), daemon=True).start()


def load_loops() -> None:
    """Load the loops that few programs need; the first process to ask compiles them in a child."""
    names = [name for name in precompile.MODULES_WHEN_USED if name in sys.modules]  # not MPI's
    loops = [loop for name in names for loop in jit.loops_of(name)]
    with FolderLock(cache.cache_folder() / "for-tests") as lock:
        lock.take(alone=True)
        apart(_compile_loops, loops)
    for loop in loops:
        assert loop.address


def _compile_loops(loops: Sequence[jit.Loop]) -> None:
    for loop in _shown("loops for tests", loops, is_shown=True):
        assert loop.address


def load_kernels(kernels: Sequence[tuple[str, str]]) -> None:
    """Load (dtype, operation) kernels, which a child compiles.

    Each worker begins with others, so that all compile; it loads what another has compiled.
    """
    apart(_compile_kernels, kernels)
    for dtype, operation in kernels:
        reduce_kernel(dtype, operation)


def _compile_kernels(kernels: Sequence[tuple[str, str]]) -> None:
    number, count = worker()
    mine = rotated(kernels, number, count)
    for dtype, operation in _shown("reduce kernels for tests", mine, is_shown=number == 0):
        reduce_kernel(dtype, operation)


def _shown(what: str, functions: Sequence[_T], is_shown: bool) -> Iterator[_T]:
    """Yield functions to compile, and show how far it is."""
    with Progress(f"gpucoll: compiling {what}, once") if is_shown else nullcontext() as work:
        for done, function in enumerate(functions):
            if work is not None:
                work.extent = partial("{} of {} functions".format, done, len(functions))
            yield function
