"""Marks of processes that meet others: they show an observer who waits, in which call, since when.

Before the ranks have met there is no segment to read. So a process has, for the length of a
meeting, a descriptor of a little anonymous memory with a text. Processes of the same user can open
it through ``/proc``. The text has a digest of the meeting's token, never the token itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from gpucoll.hashing import blake2b
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting import Watch

__all__ = ["MARK_LINK", "Mark", "marked", "read_mark"]

_NAME = "gpucoll-meeting"
MARK_LINK = f"/memfd:{_NAME}"
"""How the link of such a descriptor in ``/proc/PID/fd`` begins."""
_MOST_BYTES = 1 << 20


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
    group = blake2b(f"{job.token}\0{job.title}".encode(), digest_size=16).hexdigest()
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
    with open(path, "rb") as file:
        data = file.read(_MOST_BYTES)
    try:
        said = json.loads(data)
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
