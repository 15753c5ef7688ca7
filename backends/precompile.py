"""Compiling this backend's loops once per host, before many ranks need them at once."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable

from gpucoll.kernels.cpu import cache

MODULES = (
    "gpucoll.transport.shared.flags",
    "gpucoll.transport.shared.ordering",
    "gpucoll.memory.heap",
    "gpucoll.memory.numpy_handler",
    "gpucoll.group.host.channel",
    "gpucoll.entries.collectives",
    "gpucoll.entries.lists",
    "gpucoll.group.host.enqueued",
    "gpucoll.backends.gpu.enqueue_entry",
    "gpucoll.backends.cpu.host.reductions",
    "gpucoll.entries.messages",
    "gpucoll.backends.cpu.host.message_loop",
    "gpucoll.backends.cpu.host.movements",
)
"""Every module with compiled loops; see `gpucoll.kernels.cpu.cache.N_ELSEWHERE`."""

_NAME = "gpucoll.backends.precompile"
"""This module's name also where it runs as ``__main__``."""


def load() -> None:
    """Import the compiled loops: from the cache, or compiling what it lacks."""
    cache.import_compiled(MODULES, _compile_elsewhere)


def _compile_elsewhere() -> subprocess.Popen[bytes]:
    """Start a process that compiles the last modules."""
    return subprocess.Popen(
        [sys.executable, "-m", _NAME, *MODULES[-cache.N_ELSEWHERE :]],
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _environment() -> dict[str, str]:
    """Return an environment in which another Python finds this very package."""
    path = os.pathsep.join(entry for entry in sys.path if entry)  # as here, installed or not
    return {**os.environ, "PYTHONPATH": path}


def ensure_compiled(report: Callable[[str], None] | None = None) -> bool:
    """Make sure that the loops are compiled; return whether they had to be.

    In a process of its own, so that a launcher need not load the compiler. Without Numba's import,
    and in about a millisecond, where nothing is to do.

    Parameters
    ----------
    report : callable, optional
        Gets one line of text before anything is compiled.
    """
    if cache.is_complete():
        return False
    if report is not None:
        report("gpucoll: compiling the CPU kernels once for this machine (about 15 s) ...")
    subprocess.run([sys.executable, "-m", _NAME], check=True, env=_environment())
    return True


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if not sys.argv[1:]:
        load()
