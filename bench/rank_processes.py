"""Processes that are, or start, a library's ranks, and descriptions of how they ended."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

__all__ = [
    "Answer",
    "ConnectedRank",
    "Start",
    "StartedProcess",
    "explain",
    "last_lines",
    "pidfd_of",
]

Answer = dict[str, Any]

LOG_LINES = 15


@dataclass(frozen=True)
class Start:
    """A process to start: an mpiexec for all ranks, or one rank.

    Attributes
    ----------
    command : list of str
        ``{connect}`` in it is replaced by the name of the socket to connect to.
    rank : int or None
        The number of the rank if the process is one, else None.
    """

    command: list[str]
    environment: dict[str, str]
    rank: int | None = None


@dataclass
class StartedProcess:
    """A process that was started; ``pidfd`` becomes readable when it ends."""

    start: Start
    popen: subprocess.Popen[bytes]
    pidfd: int
    ended: bool = False

    def fate(self) -> str:
        """Return how the process ended, as the end of a sentence."""
        code = self.popen.wait()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


@dataclass
class ConnectedRank:
    """A rank that has connected, and its messages that have not been read yet."""

    connection: socket.socket
    pidfd: int
    number: int = -1
    received: bytes = b""
    inbox: list[Answer] = field(default_factory=list)
    gone: bool = False
    failed_at: float = math.inf

    def awaited(self, messages: int) -> bool:
        """Return whether the rank has yet to send some of `messages` messages."""
        return not (self.gone or self.failed() or len(self.inbox) >= messages)

    def failed(self) -> bool:
        """Return whether the rank has reported an error."""
        return bool(self.inbox) and "error" in self.inbox[-1]


def pidfd_of(pid: int) -> int:
    """Return a descriptor of a process that connected, or -1 if it has ended since."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def explain(
    processes: Sequence[StartedProcess], ranks: Sequence[ConnectedRank], expected: int
) -> str | None:
    """Return what failed, a line for each rank, the likeliest cause first; None if nothing did.

    Parameters
    ----------
    processes : sequence of StartedProcess
        The processes that were started.
    ranks : sequence of ConnectedRank
        The ranks that have connected.
    expected : int
        How many ranks should connect.
    """
    said = {rank.number for rank in ranks if rank.failed()}
    ended = [process for process in processes if process.ended]
    # A rank that died silently comes first, since it makes the others report errors.
    lines: dict[int | None, str] = {
        process.start.rank: f"rank {process.start.rank} of {expected} {process.fate()}"
        for process in ended
        if process.start.rank is not None and process.start.rank not in said
    }
    for rank in sorted(ranks, key=lambda rank: rank.failed_at):
        if rank.failed():
            error = rank.inbox[-1]
            trace = "" if lines else "\n" + error["traceback"].rstrip()
            lines[rank.number] = f"rank {rank.number} of {expected}: {error['error']}{trace}"
        elif rank.gone and rank.number not in lines:
            lines[rank.number] = f"rank {rank.number} of {expected} is gone"
    for process in ended:
        if process.start.rank is None:
            lines[None] = f"its mpiexec {process.fate()}"
    return "\n".join(lines.values()) or None


def last_lines(log: IO[bytes]) -> str:
    """Return the last lines that the ranks have printed, each on its own line."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - 8192))
    lines = log.read().decode(errors="replace").strip().splitlines()[-LOG_LINES:]
    return "".join(f"\n  | {line}" for line in lines)
