"""What the kernel says of a process: its state, its CPU time, its memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "ancestors_of", "pids_here", "process_of"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
_MEMORY = {"VmRSS": "rss_bytes", "VmSwap": "swap_bytes"}


@dataclass(frozen=True)
class Process:
    """A process at one moment.

    Attributes
    ----------
    state : str
        The kernel's letter: R runs or could, S sleeps, D waits for a disk or for memory, T is
        stopped, t is stopped by a debugger, Z has ended.
    cpu_s : float
        CPU time of all its threads, in seconds.
    rss_bytes, swap_bytes : int
        Memory in use, and memory that was moved to a swap device.
    where : str
        The kernel function in which its main thread sleeps; empty if the kernel does not tell.
    """

    pid: int
    parent: int
    state: str
    cpu_s: float
    rss_bytes: int = 0
    swap_bytes: int = 0
    where: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more, although its parent may not have noticed."""
        return self.state in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.state in "Tt"


def process_of(pid: int) -> Process | None:
    """Return a process; None if it is gone."""
    try:
        name_and_rest = (_PROC / str(pid) / "stat").read_text(errors="replace")
        fields = name_and_rest.rpartition(")")[2].split()
        memory = _memory_of(pid)
    except (OSError, ValueError):
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return Process(pid, int(fields[1]), fields[0], cpu_s, **memory, where=_place_of(pid))


def _memory_of(pid: int) -> dict[str, int]:
    found = {}
    for line in (_PROC / str(pid) / "status").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name in _MEMORY:
            found[_MEMORY[name]] = int(value.split()[0]) * 1024
    return found


def _place_of(pid: int) -> str:
    try:
        place = (_PROC / str(pid) / "wchan").read_text().strip()
    except OSError:
        return ""
    return "" if place == "0" else place


def pids_here() -> list[int]:
    """Return the processes whose descriptors this user may look at: its own; for root, all."""
    user, found = os.geteuid(), []
    with os.scandir(_PROC) as entries:
        for entry in entries:
            if entry.name.isdecimal():
                try:
                    if user in (0, entry.stat().st_uid):
                        found.append(int(entry.name))
                except OSError:  # it has ended
                    continue
    return found


def ancestors_of(pid: int) -> list[int]:
    """Return a process and its ancestors, the nearest first."""
    found: list[int] = []
    while pid > 0 and pid not in found:
        found.append(pid)
        process = process_of(pid)
        pid = process.parent if process is not None else 0
    return found
