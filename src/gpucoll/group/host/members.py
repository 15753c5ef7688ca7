"""The group's shared things in this process: segment, arenas, and who is still alive."""

from __future__ import annotations

import ctypes
import os
import select
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.group.host.shared_words import SharedWords
from gpucoll.memory.arena import Arena
from gpucoll.memory.peer_processes import PeerProcess
from gpucoll.rendezvous.job import Job
from gpucoll.transport.shared import layout, mapping
from gpucoll.transport.shared.layout import Record, SegmentLayout, Tuning

NO_DESCRIPTOR = 0xFFFFFFFF  # struct pollfd with descriptor -1, which poll(2) skips


def words_at(address: int, count: int) -> npt.NDArray[np.int64]:
    """Return a view of int64 words at an address. Whoever owns the memory must outlive it."""
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_int64))
    return np.ctypeslib.as_array(pointer, (count,))


@dataclass
class Members(SharedWords):
    """What the ranks of a group share, mapped into this process.

    What returns words gives a view: it is for within `held`, or for who knows otherwise that the
    segment stays, and after the flag was loaded that says that they are there.
    """

    job: Job
    tuning: Tuning
    layout: SegmentLayout
    segment: mapping.Mapping
    segment_fd: int
    """Of the same memory: more of it is reserved through this when it is first used."""
    room_bytes: int
    """How much that may be before somebody looks what the host has."""
    arena: Arena
    arenas: npt.NDArray[np.int64]
    """By rank: address of the words that say where its arena is mapped (`PeerArena`)."""
    own_arena: npt.NDArray[np.int64]
    """Those of this rank."""
    peers: list[PeerProcess]
    poll_table: npt.NDArray[np.int64]
    """``struct pollfd`` per rank: descriptor, events, and what poll(2) answers.

    Behind them an empty one for each rank of another host, as in the next table.
    """
    pid_table: npt.NDArray[np.int64]
    introductions: list[dict[str, Any]]
    further_fds: list[int] = field(default_factory=list)
    """What else rank 0 made for all: for a group around this one, to which they belong."""

    @property
    def pids(self) -> list[int]:
        """Process numbers, by rank."""
        return [int(pid) for pid in self.pid_table]

    @property
    def allowed_cpus(self) -> list[frozenset[int]]:
        """The CPUs that each rank could use when the ranks met, by rank."""
        return [frozenset(member["cpus"]) for member in self.introductions]

    @property
    def segment_bytes(self) -> int:
        """How much memory the segment takes by now, for all ranks together."""
        with self.held():
            return os.fstat(self.segment_fd).st_blocks * 512

    def status_words(self, rank: int) -> npt.NDArray[np.int64]:
        """Return a rank's status line, as words."""
        return words_at(self.at(self.status_offset(rank)), layout.LINE_BYTES // 8)

    def record_words(self, rank: int, sequence: int) -> npt.NDArray[np.int64]:
        """Return the record that a rank has, or had, of a call."""
        place = rank * layout.RECORDS + (sequence & (layout.RECORDS - 1))
        address = self.at(self.layout.records + place * layout.RECORD_BYTES)
        return words_at(address, layout.RECORD_BYTES // 8)

    def all_records(self, rank: int) -> npt.NDArray[np.int64]:
        """Return all records of a rank, a row each."""
        count, words = layout.RECORDS, layout.RECORD_BYTES // 8
        place = self.layout.records + rank * count * layout.RECORD_BYTES
        return words_at(self.at(place), count * words).reshape(count, words)

    def all_enqueued(self, rank: int) -> npt.NDArray[np.int64]:
        """Return all records of a rank's calls on GPU arrays, a row each."""
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
        """Return the {sequence, digest} word in such a record: written behind all else in it."""
        return self.load(self._enqueued_record(rank, sequence) + 8 * Record.HEADER)

    def store_enqueued_header(self, rank: int, sequence: int, word: int) -> None:
        """Store that word, of another host's calls, behind all else in the record."""
        self.store(self._enqueued_record(rank, sequence) + 8 * Record.HEADER, word)

    def pieces_words(self, rank: int, sequence: int) -> npt.NDArray[np.int64]:
        """Return what a rank has posted of an all_to_all with counts.

        That is bytes to each rank, then bytes from each, as a payload; written by
        `gpucoll.backends.cpu.host.pieces`.
        """
        place = self.layout.payload(rank, sequence, 16 * self.world_size)
        return words_at(self.at(place), 2 * self.world_size)

    def bell_words(self, rank: int) -> npt.NDArray[np.int64]:
        """Return a rank's bell line, as words."""
        return words_at(
            self.at(self.layout.bells + rank * layout.LINE_BYTES), layout.LINE_BYTES // 8
        )

    def life_fds(self) -> list[int]:
        """Return, by rank, what tells when its process ends; below 0: nothing does."""
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
        """Return whether a rank's process has ended, or does so within this time."""
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
        """Say that this rank takes no part, as one that closes the communicator does, and close."""
        self.store(self.status_offset(self.rank) + layout.STATUS_CLOSED, 1)
        self.close()

    def close(self) -> None:
        """Unmap and close everything that belongs to this group alone."""
        self.poll_table[:] = NO_DESCRIPTOR
        while self.peers:
            self.peers.pop().release()
        self.unmap()
        os.close(self.segment_fd)
