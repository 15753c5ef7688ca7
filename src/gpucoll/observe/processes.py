"""What the kernel says of a process: its state, its CPU time, its memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucoll.topology import processes

__all__ = ["Process", "ancestors_of", "pids_here", "process_of", "program_of", "user_of"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
_MOST_SHOWN = 60
_MEMORY = {"VmRSS": "rss_bytes", "VmSwap": "swap_bytes"}


@dataclass(frozen=True)
class Process(processes.Process):
    """A process at one moment, with what only an observer asks for.

    Attributes
    ----------
    rss_bytes, swap_bytes : int
        Memory in use, and memory that was moved to a swap device.
    where : str
        The kernel function in which its main thread sleeps; empty if the kernel does not tell.
    wanted_s : float
        For how long its main thread has run, or was ready to run but had no CPU, in seconds.
    """

    rss_bytes: int = 0
    swap_bytes: int = 0
    where: str = ""
    wanted_s: float = 0.0

    @property
    def cpu_s(self) -> float:
        """CPU time of all its threads, in seconds."""
        return self.cpu_ticks / _TICKS_PER_S


def process_of(pid: int) -> Process | None:
    """Return a process; None if it is gone."""
    try:
        found, memory = processes.process_of(pid), _memory_of(pid)
    except (OSError, ValueError):
        return None
    if found is None:
        return None
    return Process(**vars(found), **memory, where=_place_of(pid), wanted_s=_wanted_s(pid))


def _memory_of(pid: int) -> dict[str, Any]:
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


def program_of(pid: int) -> str:
    """Return the program that a process runs, without the interpreter; empty if it is gone.

    At most 60 characters, which a terminal can show. Of a longer one, paths lose their folders.
    """
    try:
        words = (
            (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        )
    except OSError:
        return ""
    program = words[1:] if words and Path(words[0]).name.startswith("python") else words
    text = _one_line(program)
    if len(text) > _MOST_SHOWN:
        text = _one_line([Path(word).name if word.startswith("/") else word for word in program])
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def _one_line(words: list[str]) -> str:
    text = "".join(each if each.isprintable() else " " for each in " ".join(words))
    return " ".join(text.split())


def _wanted_s(pid: int) -> float:
    """Return a main thread's time on CPUs and in their queues; 0 if the kernel counts neither."""
    try:
        ran_ns, queued_ns, _ = (_PROC / str(pid) / "schedstat").read_text().split()
        return (int(ran_ns) + int(queued_ns)) / 1e9
    except (OSError, ValueError):
        return 0.0


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


def user_of(pid: int) -> int | None:
    """Return the user whose process it is, by number; None: there is no such process."""
    try:
        return (_PROC / str(pid)).stat().st_uid
    except OSError:
        return None


def ancestors_of(pid: int) -> list[int]:
    """Return a process and its ancestors, the nearest first."""
    found: list[int] = []
    while pid > 0 and pid not in found:
        found.append(pid)
        process = processes.process_of(pid)
        pid = process.parent if process is not None else 0
    return found
