"""Compiling this backend's loops once per host, before many ranks need them at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from gpucoll.kernels.cpu import cache

MODULES = (
    "gpucoll.transport.flags",
    "gpucoll.transport.heap",
    "gpucoll.transport.numpy_handler",
    "gpucoll.control.entry",
    "gpucoll.control.message_entry",
    "gpucoll.control.list_entry",
    "gpucoll.control.exchange",
    "gpucoll.backends.cpu.reductions",
    "gpucoll.backends.cpu.movements",
    "gpucoll.backends.cpu.messages",
)
"""Every module with compiled loops."""


def load() -> None:
    """Import the compiled loops: from the cache, or compiling what it lacks."""
    cache.import_compiled(MODULES)


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
        report("gpucoll: compiling the CPU kernels once for this machine (about 10 s) ...")
    path = os.pathsep.join(entry for entry in sys.path if entry)  # as here, installed or not
    subprocess.run(
        [sys.executable, "-m", __name__], check=True, env={**os.environ, "PYTHONPATH": path}
    )
    return True


if __name__ == "__main__":
    load()
