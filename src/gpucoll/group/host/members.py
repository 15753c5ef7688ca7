"""What the ranks of a group share, in this process: segment, arenas, and who is still alive."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.group.host.segment_view import SegmentView
from gpucoll.memory.arena import Arena
from gpucoll.memory.peer_processes import PeerProcess
from gpucoll.rendezvous.frames import close_all
from gpucoll.transport.shared import layout, ordering
from gpucoll.transport.shared.layout import Record

_CUT = "..."
NO_DESCRIPTOR = 0xFFFFFFFF  # struct pollfd with descriptor -1, which poll(2) skips


@dataclass
class Members(SegmentView):
    """What the ranks of a group share, mapped into this process."""

    segment_fd: int
    """Descriptor of the segment. Parts that are first used later are reserved through it."""
    room_bytes: int
    """How many bytes may be reserved before a rank looks again at how much the host has left."""
    arena: Arena
    arenas: npt.NDArray[np.int64]
    """By rank, the address of the words that tell where its arena is mapped (`PeerArena`)."""
    own_arena: npt.NDArray[np.int64]
    """The words of this rank's arena."""
    peers: list[PeerProcess]
    poll_table: npt.NDArray[np.int64]
    """``struct pollfd`` per rank: descriptor, events, and the events that poll(2) returns.

    After them an empty one for each rank of another host, as in `pid_table`.
    """
    pid_table: npt.NDArray[np.int64]
    introductions: list[dict[str, Any]]
    further_fds: list[int] = field(default_factory=list)
    """Further descriptors that rank 0 made for all ranks; they belong to a group around this
    one."""

    @property
    def pids(self) -> list[int]:
        """Process numbers, by rank."""
        return [int(pid) for pid in self.pid_table]

    @property
    def allowed_cpus(self) -> list[frozenset[int]]:
        """By rank, the CPUs that it could use when the ranks met."""
        return [frozenset(member["cpus"]) for member in self.introductions]

    @property
    def segment_bytes(self) -> int:
        """How much memory the segment takes by now, for all ranks together."""
        with self.held():
            return os.fstat(self.segment_fd).st_blocks * 512

    def store(self, offset: int, value: int) -> None:
        """Store a flag after all earlier writes."""
        with self.locked():
            ordering.store(self.at(offset), value)

    def compare_exchange(self, offset: int, expected: int, desired: int) -> int:
        """Store a flag if it is `expected`, after all earlier writes; return what it was."""
        with self.locked():
            return ordering.compare_exchange(self.at(offset), expected, desired)

    @contextlib.contextmanager
    def abroad(self) -> Iterator[None]:
        """Note, for those that look at the job from outside, that this rank waits for other hosts.

        The note stays where the wait fails: it is the last that this rank did.
        """
        self._note_abroad(time.monotonic_ns())
        yield
        self._note_abroad(0)

    def _note_abroad(self, since_ns: int) -> None:
        with self.held():
            self.status_words(self.rank)[layout.STATUS_ABROAD // 8] = since_ns

    def unmap(self) -> None:
        """Unmap the segment."""
        with self.locked():
            self.segment.unmap()

    def store_enqueued_header(self, rank: int, sequence: int, word: int) -> None:
        """Store that word of another host's call, after all other words of the record."""
        self.store(self._enqueued_record(rank, sequence) + 8 * Record.header, word)

    # --- why a rank has left ----------------------------------------------------------------------

    def write_reason(self, error: BaseException) -> None:
        """Store why this rank leaves; the word that announces that it has left is stored later."""
        text = shown_reason(error).replace("\0", " ").encode(errors="backslashreplace")
        if len(text) >= layout.REASON_BYTES:
            room = layout.REASON_BYTES - 1 - len(_CUT)
            text = text[:room].decode(errors="ignore").encode() + _CUT.encode()
        with self.held():
            ctypes.memmove(self._reason_address(self.rank), text + b"\0", len(text) + 1)

    # --- who is alive -----------------------------------------------------------------------------

    def life_fds(self) -> list[int]:
        """Return, by rank, the descriptor that shows the end of its process; below 0: none does."""
        return [int(np.int32(word & 0xFFFFFFFF)) for word in self.poll_table[: self.world_size]]

    def ended_ranks(self) -> list[int]:
        """Return the ranks whose process has ended."""
        poll = select.poll()
        fds = self.life_fds()
        for fd in fds:
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        ended = {fd for fd, _ in poll.poll(0)}
        return [rank for rank, fd in enumerate(fds) if fd in ended]

    def ends_within(self, rank: int, timeout_s: float) -> bool:
        """Return whether a rank's process has ended, or ends within `timeout_s`."""
        fd = int(np.int32(self.poll_table[rank] & 0xFFFFFFFF))
        if fd < 0:
            return False
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def gone_ranks(self) -> list[int]:
        """Return the ranks that will never take part again: ended or closed."""
        ended = self.ended_ranks()
        ranks = (rank for rank in range(self.world_size) if rank != self.rank)
        return [rank for rank in ranks if rank in ended or self.has_closed(rank)]

    def leave(self) -> None:
        """Report that this rank takes no part, as if it had closed the communicator, and close.

        The further descriptors, which nobody has taken over, are closed, too.
        """
        self.store(self.status_offset(self.rank) + layout.STATUS_CLOSED, 1)
        close_all(self.further_fds)
        self.close()

    def close(self) -> None:
        """Unmap and close everything that belongs to this group alone."""
        self.poll_table[:] = NO_DESCRIPTOR
        while self.peers:
            self.peers.pop().release()
        self.unmap()
        os.close(self.segment_fd)


def shown_reason(error: BaseException) -> str:
    """Return an exception's class and the first line of its text, as a traceback ends."""
    try:
        lines = str(error).splitlines()
    except Exception:  # its __str__ fails
        lines = []
    name = type(error).__qualname__
    return f"{name}: {lines[0].strip()}" if lines and lines[0].strip() else name
