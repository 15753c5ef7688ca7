"""Whether another process of this host is still there."""

from __future__ import annotations

__all__ = ["start_time"]


def start_time(pid: int) -> int:
    """Return when a process was started, in the kernel's ticks; -1 if it has ended.

    Together with its number it identifies a process: the kernel gives numbers again.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
