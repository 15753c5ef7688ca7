"""Become one rank: tie this process's life to the launcher's, bind it to CPUs, run the program.

Run as a file by a bare interpreter (``python -I -S exec_rank.py PARENT CPUS PROGRAM [ARGUMENT
...]``), so it imports nothing of gpucoll and starts in a few milliseconds. Its settings survive
  ``exec``. Doing this here, not between fork and exec in the launcher, is safe even if the launcher
  has other threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
EXIT_CANNOT_RUN = 126  # the shells' code for this
EXIT_NOT_FOUND = 127


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, even if the parent is killed."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the request took effect
        os.kill(os.getpid(), signal.SIGKILL)


def bind(cpus: str) -> None:
    """Bind this process to CPUs, given as ``0,1,8``; ``-`` leaves it as it is."""
    if cpus == "-":
        return
    try:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    except OSError as error:
        # Being unbound is slower, not wrong: the CPUs may have been withdrawn since the launcher
        # looked.
        print(f"gpucoll: cannot bind a rank to CPUs {cpus}: {error.strerror}", file=sys.stderr)


def restore_signals() -> None:
    """Undo what this interpreter did at its start; ignored signals stay ignored after exec."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    # a caller such as nohup may want it ignored
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def main(arguments: list[str]) -> int:
    """Set this process up and replace it; return an exit code only if that fails."""
    parent, cpus, program = int(arguments[0]), arguments[1], arguments[2:]
    restore_signals()
    die_with(parent)
    bind(cpus)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"gpucoll: cannot run {program[0]}: {error.strerror}", file=sys.stderr)
        return EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
