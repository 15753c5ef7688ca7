"""Become one rank: tie this process's life to the launcher's, bind it to CPUs, run the program.

The settings survive ``exec``. A launcher without other threads calls `set_up` between fork and
exec. If it has other threads, only another process can do this safely: a bare interpreter runs this
file (``python -I -S exec_rank.py PARENT CPUS PROGRAM [ARGUMENT ...]``). It imports nothing of
gpucoll and takes 14 ms of CPU time. It also reports a program that cannot be run.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
EXIT_CANNOT_RUN = 126  # the shells' code for this
EXIT_NOT_FOUND = 127


def set_up(parent: int, cpus: str) -> None:
    """Tie this process's life to its parent's, and bind it to CPUs."""
    die_with(parent)
    bind(cpus)


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
        text = f"gpucoll: cannot bind a rank to CPUs {cpus}: {error.strerror}\n"
        os.write(2, text.encode())  # sys.stderr may be the launcher's


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
    set_up(parent, cpus)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"gpucoll: cannot run {program[0]}: {error.strerror}", file=sys.stderr)
        return EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
