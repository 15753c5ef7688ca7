"""Finds the segments of running jobs, and maps them for reading.

A segment is anonymous memory. Its ranks have a descriptor of it, and the kernel lets processes of
the same user open that through ``/proc``, for reading, without a signal and without stopping it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpucoll.errors import SharedMemoryError
from gpucoll.group.host.facts import UnreadableError, read_facts
from gpucoll.group.host.segment_view import SegmentView, words_at
from gpucoll.observe.joining import Joining, joining_of, launched_of
from gpucoll.rendezvous.marks import MARK_LINK, WAIT_LINK, Mark, Wait, read_mark, read_wait
from gpucoll.transport.shared import mapping

__all__ = ["Found", "Observed", "find"]

_LINK = "/memfd:gpucoll-segment"


@dataclass
class Observed(SegmentView):
    """A segment of other processes. Nothing is written to it."""

    processes: list[int] = field(default_factory=list)
    made_ns: int = 0
    """When it was made, by the monotonic clock."""
    path: str = ""
    """By which it can be opened, as long as that process has it."""
    identity: tuple[int, int] = (0, 0)
    """Device and inode: the same for whoever opens it, and of no other segment meanwhile."""

    @property
    def pids(self) -> list[int]:
        """Process numbers, by rank."""
        return self.processes

    def load(self, offset: int) -> int:
        """Load a word. Its data may be older or newer: whoever looks twice sees what moves."""
        return int(words_at(self.at(offset), 1)[0])

    def load_after(self, offset: int) -> int:
        """Load a word, as `load`."""
        return self.load(offset)

    @property
    def n_elsewhere(self) -> int:
        """The number of ranks on other hosts."""
        return max((self.job.total or self.world_size) - self.world_size, 0)


@dataclass
class Found:
    """The segments that were found, and those that could not be read, with the reason."""

    segments: list[Observed] = field(default_factory=list)
    unreadable: dict[int, str] = field(default_factory=dict)
    """By process, why a segment of it cannot be read."""
    joining: list[Joining] = field(default_factory=list)
    """Ranks that wait for others before they have a communicator."""
    waits: list[Wait] = field(default_factory=list)
    """Ranks that wait in tables."""

    @property
    def parts(self) -> list[Observed | Joining | Wait]:
        """Everything that jobs consist of."""
        return [*self.segments, *self.joining, *self.waits]

    def close(self) -> None:
        """Unmap everything."""
        for segment in self.segments:
            segment.segment.unmap()


def find(pids: Sequence[int]) -> Found:
    """Map the segments of these processes, each once; find the ranks that have none yet."""
    found, known, marks = Found(), set[tuple[int, int]](), list[Mark]()
    for pid in pids:
        for path, link in _paths(pid):
            try:
                if link.startswith(_LINK):
                    _map(path, known, found)
                elif link.startswith(WAIT_LINK):
                    if (wait := read_wait(path)) is not None and wait.pid == pid:
                        found.waits.append(wait)
                elif (mark := read_mark(path)) is not None and mark.pid == pid:
                    marks.append(mark)  # a forked child has its parent's descriptors
            except FileNotFoundError:  # closed meanwhile
                continue
            except (OSError, SharedMemoryError, UnreadableError) as error:
                found.unreadable[pid] = str(error)
    found.joining = joining_of(marks, found.segments, launched_of(pids))
    return found


def _paths(pid: int) -> Iterator[tuple[str, str]]:
    """Yield the paths by which what a rank shows can be opened, and the links that they are."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            path = f"{folder}/{name}"
            with contextlib.suppress(OSError):
                if (link := os.readlink(path)).startswith((_LINK, MARK_LINK, WAIT_LINK)):
                    yield path, link


def _map(path: str, known: set[tuple[int, int]], found: Found) -> None:
    # Meanwhile the process may have opened something else there: a pipe must not keep this waiting.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(_LINK):
            return
        status = os.fstat(fd)
        identity = status.st_dev, status.st_ino
        if identity in known:
            return
        known.add(identity)
        job, place, pids, made_ns = read_facts(fd)
        if not mapping.cannot_shrink(fd):  # a SIGBUS would end this process
            raise UnreadableError("its size is not sealed: gpucoll has not made it")
        memory = mapping.Mapping(fd, place.size_bytes, "the segment", writable=False)
        found.segments.append(
            Observed(job, place.tuning, place, memory, pids, made_ns, path, identity)
        )
    finally:
        os.close(fd)
