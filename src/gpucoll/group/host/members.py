"""What the ranks of a group share, in this process: segment, arenas, and who is still alive."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.errors import StateError
from gpucoll.memory.arena import Arena
from gpucoll.memory.peer_processes import PeerProcess
from gpucoll.rendezvous.frames import close_all
from gpucoll.rendezvous.job import Job
from gpucoll.transport.shared import layout, mapping, ordering
from gpucoll.transport.shared.layout import Record, SegmentLayout, Tuning
from gpucoll.wording import list_ranks

_lock = threading.RLock()
"""Held while a segment is read or unmapped. Reentrant: a garbage collection within may close
one."""
_CUT = "..."
NO_DESCRIPTOR = 0xFFFFFFFF  # struct pollfd with descriptor -1, which poll(2) skips


def words_at(address: int, count: int) -> npt.NDArray[np.int64]:
    """Return a view of int64 words at an address. The memory must outlive the view."""
    words: Any = (ctypes.c_int64 * count).from_address(address)
    return np.frombuffer(words, np.int64)


@dataclass
class Members:
    """What the ranks of a group share, mapped into this process.

    Methods that return words return views. Use a view only within `held`, or where the segment is
    known to stay mapped, and only after loading the flag that announces its words.
    """

    job: Job
    tuning: Tuning
    layout: SegmentLayout
    segment: mapping.Mapping
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
    def rank(self) -> int:
        """This process's rank."""
        return self.job.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.job.world_size

    def number(self, rank: int) -> int:
        """Return the number by which errors name a rank."""
        return self.job.number(rank)

    def who(self, rank: int) -> str:
        """Return "rank 1 of 4"."""
        return self.job.who(rank)

    def spelled(self, ranks: Iterable[int]) -> str:
        """Return "ranks 1, 2"."""
        return list_ranks([self.number(rank) for rank in ranks])

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

    # --- words of the segment ---------------------------------------------------------------------

    # They are loaded and stored in order, and never after the segment was unmapped. A holder of a
    # `Work` may read some words long after `close`, or while another thread closes the
    # communicator. It then gets a StateError; reading the bare address would end the process.

    def at(self, offset: int) -> int:
        """Return the address of an offset in the segment; StateError if it is unmapped."""
        if not self.segment.is_mapped:
            raise StateError(f"the communicator of {self.who(self.rank)} is closed")
        return self.segment.address + offset

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the segment mapped within the block; StateError if it is unmapped already."""
        with _lock:
            self.at(0)
            yield

    def load(self, offset: int) -> int:
        """Load a flag; the data that it announces may be read afterwards."""
        with _lock:
            return ordering.load(self.at(offset))

    def load_after(self, offset: int) -> int:
        """Load a flag after all earlier reads."""
        with _lock:
            return ordering.load_after(self.at(offset))

    def store(self, offset: int, value: int) -> None:
        """Store a flag after all earlier writes."""
        with _lock:
            ordering.store(self.at(offset), value)

    def compare_exchange(self, offset: int, expected: int, desired: int) -> int:
        """Store a flag if it is `expected`, after all earlier writes; return what it was."""
        with _lock:
            return ordering.compare_exchange(self.at(offset), expected, desired)

    def unmap(self) -> None:
        """Unmap the segment."""
        with _lock:
            self.segment.unmap()

    def status_offset(self, rank: int) -> int:
        """Return the offset of a rank's status line."""
        return self.layout.status_lines + rank * layout.LINE_BYTES

    def enqueued_offset(self, rank: int) -> int:
        """Return the offset of a rank's line about calls on GPU arrays."""
        return self.layout.enqueued_lines + rank * layout.LINE_BYTES

    def abort_word(self) -> int:
        """Return the abort word: 0, or which rank gave up which call, as in its record."""
        return self.load(layout.EVENT_ABORT)

    def has_closed(self, rank: int) -> bool:
        """Return whether a rank has closed the communicator; if so, all its writes are visible."""
        return self.load(self.status_offset(rank) + layout.STATUS_CLOSED) != 0

    def header_word(self, rank: int, sequence: int) -> int:
        """Return the {sequence, digest} word in a rank's slot for a call: it follows the record."""
        return self.load(self.layout.header(rank, sequence) + layout.HEADER_WORD)

    def status_words(self, rank: int) -> npt.NDArray[np.int64]:
        """Return a rank's status line, as words."""
        return words_at(self.at(self.status_offset(rank)), layout.LINE_BYTES // 8)

    def record_words(self, rank: int, sequence: int) -> npt.NDArray[np.int64]:
        """Return the record that a rank has, or had, of a call."""
        place = rank * layout.RECORDS + (sequence & (layout.RECORDS - 1))
        address = self.at(self.layout.records + place * layout.RECORD_BYTES)
        return words_at(address, layout.RECORD_BYTES // 8)

    def all_records(self, rank: int) -> npt.NDArray[np.int64]:
        """Return all records of a rank, one per row."""
        count, words = layout.RECORDS, layout.RECORD_BYTES // 8
        place = self.layout.records + rank * count * layout.RECORD_BYTES
        return words_at(self.at(place), count * words).reshape(count, words)

    def all_enqueued(self, rank: int) -> npt.NDArray[np.int64]:
        """Return all records of a rank's calls on GPU arrays, one per row."""
        count, words = self.tuning.enqueued_records, layout.RECORD_BYTES // 8
        place = self.layout.enqueued + rank * count * layout.RECORD_BYTES
        return words_at(self.at(place), count * words).reshape(count, words)

    def enqueued_words(self, rank: int, sequence: int) -> npt.NDArray[np.int64]:
        """Return the record that a rank has, or had, of a call on GPU arrays."""
        address = self.at(self._enqueued_record(rank, sequence))
        return words_at(address, layout.RECORD_BYTES // 8)

    def _enqueued_record(self, rank: int, sequence: int) -> int:
        count = self.tuning.enqueued_records
        place = rank * count + (sequence & (count - 1))
        return self.layout.enqueued + place * layout.RECORD_BYTES

    def enqueued_header(self, rank: int, sequence: int) -> int:
        """Return the {sequence, digest} word in such a record: the last word written to it."""
        return self.load(self._enqueued_record(rank, sequence) + 8 * Record.header)

    def store_enqueued_header(self, rank: int, sequence: int, word: int) -> None:
        """Store that word of another host's call, after all other words of the record."""
        self.store(self._enqueued_record(rank, sequence) + 8 * Record.header, word)

    def pieces_words(self, rank: int, sequence: int) -> npt.NDArray[np.int64]:
        """Return the byte counts that a rank has posted for an all_to_all with counts.

        These are the bytes to each rank, then the bytes from each, stored as a payload by
        `gpucoll.backends.cpu.host.pieces`.
        """
        place = self.layout.payload(rank, sequence, 16 * self.world_size)
        return words_at(self.at(place), 2 * self.world_size)

    def bell_words(self, rank: int) -> npt.NDArray[np.int64]:
        """Return a rank's bell line, as words."""
        return words_at(
            self.at(self.layout.bells + rank * layout.LINE_BYTES), layout.LINE_BYTES // 8
        )

    # --- why a rank has left ----------------------------------------------------------------------

    def write_reason(self, error: BaseException) -> None:
        """Store why this rank leaves; the word that announces that it has left is stored later."""
        text = shown_reason(error).replace("\0", " ").encode(errors="backslashreplace")
        if len(text) >= layout.REASON_BYTES:
            room = layout.REASON_BYTES - 1 - len(_CUT)
            text = text[:room].decode(errors="ignore").encode() + _CUT.encode()
        with self.held():
            ctypes.memmove(self._reason_address(self.rank), text + b"\0", len(text) + 1)

    def read_reason(self, rank: int) -> str:
        """Return the exception that another rank has stored; empty: no exception made it leave."""
        with self.held():
            text = ctypes.string_at(self._reason_address(rank), layout.REASON_BYTES)
        return text.partition(b"\0")[0].decode(errors="replace")

    def _reason_address(self, rank: int) -> int:
        return self.at(self.layout.reasons + rank * layout.REASON_BYTES)

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


def _renew_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_in_child)
