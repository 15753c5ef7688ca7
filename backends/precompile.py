"""Compile the loops of this package once per host, before many ranks need them at once."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucoll.kernels.cpu import cache

if TYPE_CHECKING:
    import subprocess

    from gpucoll.kernels.cpu.jit import Loop

MODULES = (
    "gpucoll.transport.shared.flags",
    "gpucoll.transport.shared.ordering",
    "gpucoll.transport.shared.room",
    "gpucoll.transport.shared.peer_memory",
    "gpucoll.transport.shared.spans",
    "gpucoll.memory.heap",
    "gpucoll.memory.numpy_memory",
    "gpucoll.group.host.channel",
    "gpucoll.entries.collectives",
    "gpucoll.entries.collective_entry",
    "gpucoll.entries.block_entry",
    "gpucoll.entries.lists",
    "gpucoll.entries.objects",
    "gpucoll.entries.pending",
    "gpucoll.entries.started",
    "gpucoll.group.host.enqueued",
    "gpucoll.backends.gpu.enqueue_entry",
    "gpucoll.backends.cpu.host.reductions",
    "gpucoll.entries.messages",
    "gpucoll.backends.cpu.host.message_step",
    "gpucoll.backends.cpu.host.message_loop",
    "gpucoll.backends.cpu.host.movements",
)
"""Every module with compiled loops; see `gpucoll.kernels.cpu.cache.N_ELSEWHERE`."""
MODULES_BETWEEN_HOSTS = (
    "gpucoll.backends.cpu.wires.loop",
    "gpucoll.transport.tcp.stream_loop",
    "gpucoll.transport.tcp.stream_plan",
    "gpucoll.transport.tcp.exchange",
    "gpucoll.transport.tcp.small_calls",
)
MODULES_WHEN_USED = (
    *MODULES_BETWEEN_HOSTS,
    "gpucoll.entries.native",
    "gpucoll.entries.mpi_functions",
    "gpucoll.integrations.jax.compiled.handler",
    "gpucoll.integrations.tensorflow.compiled.kernels",
    "gpucoll.devices.host.loop",
    "gpucoll.backends.mpi.carriers",
    "gpucoll.backends.mpi.collectives",
    "gpucoll.backends.mpi.exchange",
    "gpucoll.tables.loops",
    "gpucoll.tables.owner_loops",
)
"""Modules with loops that few programs need; `gpucoll.kernels.cpu.kept_loops` compiles them."""

_NAME = "gpucoll.backends.precompile"
"""This module's name, also when it runs as ``__main__``."""


class _Compiler:
    """Numba, through this package.

    Parameters
    ----------
    counted : sequence of str
        The modules whose loops `extent` counts.
    """

    def __init__(self, counted: Sequence[str] = ()) -> None:
        self._counted = counted
        self._loops: list[Loop] = []

    def compile(self, module: str) -> None:
        """Import a module and compile its loops, or load them one by one."""
        from gpucoll.kernels.cpu import jit

        if not self._loops:
            for name in self._counted:
                importlib.import_module(name)
            self._loops = [loop for name in self._counted for loop in jit.loops_of(name)]
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

    def extent(self, folder: Path | None) -> str:
        """Return how many loops are compiled; nothing until it is known how many there are."""
        if not self._loops:
            return ""
        n_here = sum("numba" in vars(loop) for loop in self._loops)  # a cached property
        # Numba writes one of these files for each loop, after it has compiled it.
        n_kept = sum(name.endswith(".nbc") for name in os.listdir(folder)) if folder else 0
        return f"{max(n_here, n_kept)} of {len(self._loops)} functions"

    def link(self, library: Path) -> None:
        """Make one library of all loops and of the usual kernels."""
        from gpucoll.kernels.cpu import jit, linking
        from gpucoll.kernels.cpu.addresses import linked_kernels

        loops = [loop for module in MODULES for loop in jit.loops_of(module)]
        kernels = [(kernel.name, kernel.emit()) for kernel in linked_kernels()]
        library.write_bytes(linking.linked(loops, kernels))
        linking.try_out(library)


def load(is_alone: bool = False) -> None:
    """Make the compiled loops ready: load them from the cache, compile those that it lacks.

    Parameters
    ----------
    is_alone : bool
        Whether this is the only process of its program. If so, it also shows that it waits.
    """
    cache.prepare(MODULES, _Compiler(MODULES), is_alone)


def _environment() -> dict[str, str]:
    """Return an environment in which another Python finds this very package."""
    path = os.pathsep.join(entry for entry in sys.path if entry)  # as here, installed or not
    return {**os.environ, **cache.environment(), "PYTHONPATH": path}


def ensure_compiled(report: Callable[[str], None] | None = None) -> bool:
    """Make sure that the loops are compiled; return whether they had to be.

    Another process compiles them, so that a launcher need not load the compiler. If nothing is to
    do, this takes about a millisecond and does not import Numba.

    Parameters
    ----------
    report : callable, optional
        Receives lines of text that show how far the compilation is. If stderr is a terminal, the
        process that compiles shows it there instead.

    Raises
    ------
    subprocess.CalledProcessError
        The loops could not be compiled.
    """
    if cache.is_complete():
        return False
    import subprocess

    from gpucoll.progress import is_at_terminal

    # A Ctrl-C may reach this process alone, which then passes it on to the child.
    command = [sys.executable, "-m", _NAME]
    is_shown = report is not None and is_at_terminal()
    stderr: Any = sys.stderr if is_shown else subprocess.PIPE
    with subprocess.Popen(command, env=_environment(), stderr=stderr, text=True) as child:
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
        try:
            load(is_alone=True)
        except KeyboardInterrupt:  # the process that started this one says so
            sys.exit(128 + signal.SIGINT)
