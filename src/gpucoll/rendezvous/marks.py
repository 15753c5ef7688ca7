"""Marks of processes that wait where there is no segment: they show an observer who waits for whom.

Before the ranks have met there is no segment to read, and waits in tables have nothing to do with
one. So a process has, for the length of a meeting or of such a wait, a descriptor of a little
anonymous memory with a text. Processes of the same user can open it through ``/proc``. The text has
a digest of the meeting's token, never the token itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gpucoll.hashing import blake2b
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting import Watch

__all__ = ["MARK_LINK", "WAIT_LINK", "Mark", "Wait", "WaitMark", "marked", "read_mark", "read_wait"]

_NAME = "gpucoll-meeting"
MARK_LINK = f"/memfd:{_NAME}"
"""How the link of such a descriptor in ``/proc/PID/fd`` begins."""
_WAIT_NAME = "gpucoll-wait"
WAIT_LINK = f"/memfd:{_WAIT_NAME}"
_MOST_BYTES = 1 << 20
_MARKED_AFTER_S = 0.02


class Mark(NamedTuple):
    """A process that is in a meeting.

    Attributes
    ----------
    pid : int
        The process.
    rank : int
        Its number, as errors give it.
    numbers : tuple of int
        The numbers of all ranks that are to meet.
    call : str
        The call in which they meet: ``"init"``, ``"split"``.
    since_ns : int
        When this process came, by the monotonic clock.
    group : str
        The same on all ranks that are to meet on this host, and different for other meetings.
    spans_hosts : bool
        Whether ranks of other hosts may be among them.
    """

    pid: int
    rank: int
    numbers: tuple[int, ...]
    call: str
    since_ns: int
    group: str
    spans_hosts: bool


@contextlib.contextmanager
def marked(job: Job, watch: Watch) -> Iterator[None]:
    """Mark this process as one that meets others, within the block.

    Costs 20 µs. Nothing is marked if the kernel gives no memory for it.
    """
    numbers = [watch.number(rank) for rank in range(job.world_size)]
    named = f"{job.token}\0{job.title}".encode(errors="replace")
    group = blake2b(named, digest_size=16).hexdigest()
    spans_hosts = job.meet is not None
    mark = Mark(
        os.getpid(),
        numbers[job.rank],
        tuple(numbers),
        watch.call,
        time.monotonic_ns(),
        group,
        spans_hosts,
    )
    fd = -1
    try:
        with contextlib.suppress(AttributeError, OSError):  # an observer knows less then
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            os.write(fd, json.dumps(mark._asdict()).encode())
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def read_mark(path: str) -> Mark | None:
    """Read the mark behind a descriptor in ``/proc``; None: it contains what no rank has written.

    Raises
    ------
    OSError
        It cannot be opened: the meeting has just ended.
    """
    try:
        said = _read(path)
        mark = Mark(
            int(said["pid"]),
            int(said["rank"]),
            tuple(int(number) for number in said["numbers"]),
            str(said["call"])[:40],
            int(said["since_ns"]),
            str(said["group"]),
            bool(said["spans_hosts"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return mark if mark.rank in mark.numbers else None


def _read(path: str) -> Any:
    with open(path, "rb") as file:
        return json.loads(file.read(_MOST_BYTES))


# --- waits in tables ------------------------------------------------------------------------------


class Wait(NamedTuple):
    """A wait of a process outside of a communicator's calls.

    Attributes
    ----------
    pid, rank : int
        The process, and its number.
    text : str
        Completes "rank 1 is ...".
    awaited : dict
        The processes for which it waits, by rank.
    awaits_other_hosts : bool
        Whether it waits for ranks of other hosts.
    since_ns : int
        When it began to wait, by the monotonic clock.
    """

    pid: int
    rank: int
    text: str
    awaited: Mapping[int, int]
    awaits_other_hosts: bool
    since_ns: int

    @property
    def pids(self) -> list[int]:
        """The process that waits, and those for which it does."""
        return [self.pid, *self.awaited.values()]


class WaitMark:
    """Marks a wait of this process, if it takes longer than 20 ms, until `close`.

    Parameters
    ----------
    rank : int
        The number of this process.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._since_ns = time.monotonic_ns()
        self._noted: tuple[object, ...] = ()
        self._fd = -1

    def note(
        self, text: str, awaited: Mapping[int, int], *, awaits_other_hosts: bool = False
    ) -> None:
        """Note for whom this process waits now; call it again and again. See `Wait`."""
        noted = text, awaited, awaits_other_hosts
        is_new = time.monotonic_ns() - self._since_ns < 1e9 * _MARKED_AFTER_S
        if is_new or noted == self._noted:
            return
        self._noted = noted
        wait = Wait(os.getpid(), self._rank, text, awaited, awaits_other_hosts, self._since_ns)
        data = json.dumps({**wait._asdict(), "awaited": [*awaited.items()]}).encode()
        with contextlib.suppress(AttributeError, OSError):  # an observer knows less then
            if self._fd < 0:
                self._fd = os.memfd_create(_WAIT_NAME, os.MFD_CLOEXEC)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, data, 0)

    def close(self) -> None:
        """End the mark."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_wait(path: str) -> Wait | None:
    """Read the mark of a wait, as `read_mark` reads that of a meeting."""
    try:
        said = _read(path)
        return Wait(
            int(said["pid"]),
            int(said["rank"]),
            str(said["text"])[:200],
            {int(rank): int(pid) for rank, pid in said["awaited"]},
            bool(said["awaits_other_hosts"]),
            int(said["since_ns"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
