"""What the kernel says of the processes of this host."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Process", "process_of", "start_time"]


@dataclass(frozen=True)
class Process:
    """A process, as ``/proc/PID/stat`` has it (proc(5)).

    Attributes
    ----------
    state : str
        R runs or could, S sleeps, D waits for a disk or for memory, T is stopped, t is stopped by a
        debugger, Z has ended and its parent has not noticed.
    cpu_ticks, started_ticks : int
        CPU time of all its threads, and when it was started.
    """

    pid: int
    name: str
    state: str
    parent: int
    cpu_ticks: int
    started_ticks: int

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more, although its parent may not have noticed."""
        return self.state in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.state in "Tt"


def process_of(pid: int) -> Process | None:
    """Return a process; None if it is gone, or ``/proc`` is hidden."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            status = file.read()
    except OSError:
        return None
    # The name stands in parentheses, and may have any characters.
    _, _, rest = status.partition(b"(")
    name, _, rest = rest.rpartition(b")")
    fields = rest.split()
    if len(fields) < 20:  # it ended just now
        return None
    return Process(
        pid,
        name.decode(errors="replace"),
        fields[0].decode(),
        int(fields[1]),
        int(fields[11]) + int(fields[12]),
        int(fields[19]),
    )


def start_time(pid: int) -> int:
    """Return when a process was started, in the kernel's ticks; -1 if it has ended.

    Together with its number it identifies a process: the kernel gives numbers again.
    """
    process = process_of(pid)
    return -1 if process is None or process.has_ended else process.started_ticks
