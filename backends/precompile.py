"""Compiling this backend's loops once per host, before many ranks need them at once."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpucoll.kernels.cpu import cache

if TYPE_CHECKING:
    import subprocess

MODULES = (
    "gpucoll.transport.shared.flags",
    "gpucoll.transport.shared.ordering",
    "gpucoll.transport.shared.room",
    "gpucoll.transport.shared.peer_arena",
    "gpucoll.memory.heap",
    "gpucoll.memory.numpy_handler",
    "gpucoll.group.host.channel",
    "gpucoll.entries.collectives",
    "gpucoll.entries.collective_entry",
    "gpucoll.entries.block_entry",
    "gpucoll.entries.lists",
    "gpucoll.entries.pending",
    "gpucoll.entries.starting",
    "gpucoll.entries.waiting",
    "gpucoll.group.host.enqueued",
    "gpucoll.backends.gpu.enqueue_entry",
    "gpucoll.backends.cpu.host.reductions",
    "gpucoll.entries.begun_messages",
    "gpucoll.entries.messages",
    "gpucoll.backends.cpu.host.message_step",
    "gpucoll.backends.cpu.host.message_loop",
    "gpucoll.backends.cpu.host.movements",
)
"""Every module with compiled loops; see `gpucoll.kernels.cpu.cache.N_ELSEWHERE`."""
MODULES_WHEN_USED = (
    "gpucoll.backends.cpu.wires.loop",
    "gpucoll.transport.tcp.stream_loop",
    "gpucoll.transport.tcp.stream_plan",
    "gpucoll.transport.tcp.exchange",
    "gpucoll.transport.tcp.small_calls",
    "gpucoll.devices.host.loop",
    "gpucoll.backends.mpi.carrying",
    "gpucoll.backends.mpi.loop",
    "gpucoll.backends.mpi.exchange",
)
"""Those that most programs do not need: not compiled here (`gpucoll.kernels.cpu.kept_loops`)."""

_NAME = "gpucoll.backends.precompile"
"""This module's name also where it runs as ``__main__``."""


class _Compiler:
    """Numba, through this package."""

    def compile(self, module: str) -> None:
        """Import a module and compile its loops, or load them one by one."""
        from gpucoll.kernels.cpu import jit

        importlib.import_module(module)
        jit.compile_module(module)

    def compile_elsewhere(self, folder: Path) -> subprocess.Popen[bytes]:
        """Start a process that compiles the last modules into a folder."""
        import subprocess

        return subprocess.Popen(
            [sys.executable, "-m", _NAME, str(folder), *MODULES[-cache.N_ELSEWHERE :]],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def link(self, library: Path) -> None:
        """Make one library of all loops and of the usual kernels."""
        from gpucoll.kernels.cpu import jit, linking
        from gpucoll.kernels.cpu.addresses import linked_kernels

        loops = [loop for module in MODULES for loop in jit.loops_of(module)]
        kernels = [(kernel.name, kernel.emit()) for kernel in linked_kernels()]
        library.write_bytes(linking.linked(loops, kernels))
        linking.try_out(library)


def load() -> None:
    """Have the compiled loops ready: from the cache, or compiling what it lacks."""
    cache.prepare(MODULES, _Compiler())


def _environment() -> dict[str, str]:
    """Return an environment in which another Python finds this very package."""
    path = os.pathsep.join(entry for entry in sys.path if entry)  # as here, installed or not
    return {**os.environ, **cache.environment(), "PYTHONPATH": path}


def ensure_compiled(report: Callable[[str], None] | None = None) -> bool:
    """Make sure that the loops are compiled; return whether they had to be.

    In a process of its own, so that a launcher need not load the compiler. Without Numba's import,
    and in about a millisecond, where nothing is to do.

    Parameters
    ----------
    report : callable, optional
        Gets one line of text before anything is compiled, and one after it: from the process that
        compiles. Nothing comes while another job compiles, for which this one then waits.

    Raises
    ------
    subprocess.CalledProcessError
        They could not be compiled.
    """
    if cache.is_complete():
        return False
    import subprocess

    # With an end that it can pass on after a Ctrl-C to this process alone.
    command = [sys.executable, "-m", _NAME]
    with subprocess.Popen(command, env=_environment(), stderr=subprocess.PIPE, text=True) as child:
        try:
            for line in child.stderr or ():
                if report is not None:
                    report(line.rstrip("\n"))
        except BaseException:
            child.send_signal(signal.SIGINT)  # so that it removes what it has begun
            raise
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return True


if __name__ == "__main__":
    if sys.argv[1:]:
        cache.build_into(Path(sys.argv[1]))
        for name in sys.argv[2:]:
            _Compiler().compile(name)
    else:
        load()
