"""The group's shared things in this process: segment, arenas, and who is still alive."""

from __future__ import annotations

import ctypes
import os
import select
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.errors import ArgumentError
from gpucoll.group.host.introduction import check_introduction, introduction_of
from gpucoll.group.host.segment_room import check_room
from gpucoll.group.host.shared_words import SharedWords
from gpucoll.memory.arena import Arena, process_arena
from gpucoll.rendezvous import frames
from gpucoll.rendezvous.held_signals import held_signals
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.unix import Meeting, Watch, meet
from gpucoll.transport.shared import layout, mapping, peer_memory
from gpucoll.transport.shared.layout import Envelope, Record, SegmentLayout, Tuning
from gpucoll.version import __version__

_NO_DESCRIPTOR = 0xFFFFFFFF  # struct pollfd with descriptor -1, which poll(2) skips


def life_line() -> int:
    """Return a descriptor that peers can poll for the end of this process.

    A pidfd where the kernel has them (5.3); else the reading end of a pipe whose other end stays
    open here until the process is gone.
    """
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        reading, writing = os.pipe()
        _held_life_lines.append(writing)
        return reading


_held_life_lines: list[int] = []


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
    arena: Arena
    arena_addresses: npt.NDArray[np.int64]
    arena_bytes: int
    poll_table: npt.NDArray[np.int64]
    """``struct pollfd`` per rank: descriptor, events, and what poll(2) answers."""
    pid_table: npt.NDArray[np.int64]
    introductions: list[dict[str, Any]]

    @property
    def pids(self) -> list[int]:
        """Process numbers, by rank."""
        return [int(pid) for pid in self.pid_table]

    def status_address(self, rank: int) -> int:
        """Return the address of a rank's status line."""
        return self.at(self.status_offset(rank))

    def status_words(self, rank: int) -> npt.NDArray[np.int64]:
        """Return a rank's status line, as words."""
        return words_at(self.status_address(rank), layout.LINE_BYTES // 8)

    def event_words(self) -> npt.NDArray[np.int64]:
        """Return the event line, as words."""
        return words_at(self.at(0), layout.LINE_BYTES // 8)

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

    def enqueued_line(self, rank: int) -> npt.NDArray[np.int64]:
        """Return a rank's line of words about calls on GPU arrays."""
        return words_at(self.at(self.enqueued_offset(rank)), layout.LINE_BYTES // 8)

    def pieces_words(self, rank: int, sequence: int) -> npt.NDArray[np.int64]:
        """Return what a rank has posted of an all_to_all with counts, see `cpu.pieces`.

        That is bytes to each rank, then bytes from each, in the slot that `payload_slot_of` says.
        """
        turn = (sequence & 0x7FFFFFFF) // layout.RING
        place = (sequence & (layout.RING - 1)) * self.world_size + (rank + turn) % self.world_size
        address = self.at(self.layout.slots + place * self.layout.slot_stride)
        return words_at(address + layout.HEADER_BYTES, 2 * self.world_size)

    def mailbox_words(self, receiver: int, sender: int) -> npt.NDArray[np.int64]:
        """Return the mailbox between two ranks, as words."""
        address = self.at(self._mailbox(receiver, sender))
        return words_at(address, self.layout.mailbox_stride // 8)

    def _mailbox(self, receiver: int, sender: int) -> int:
        place = receiver * self.world_size + sender
        return self.layout.mailboxes + place * self.layout.mailbox_stride

    def taken(self, receiver: int, sender: int) -> int:
        """Return how many posts between two ranks were taken, after all that was read before."""
        return self.load_after(self._mailbox(receiver, sender) + layout.MAILBOX_TAIL)

    def has_message(self, receiver: int, sender: int) -> bool:
        """Return whether there is a message that the receiver has not taken."""
        return self.peek(receiver, sender) is not None

    def peek(self, receiver: int, sender: int) -> npt.NDArray[np.int64] | None:
        """Return the envelope of the next message between two ranks; None where there is none."""
        taken = self.taken(receiver, sender)
        post_bytes = layout.ENVELOPE_BYTES + self.layout.post_bytes
        start = layout.MAILBOX_POSTS + taken % layout.POSTS * post_bytes
        offset = self._mailbox(receiver, sender) + start
        with self.held():
            if self.load(offset + 8 * Envelope.NUMBER) != taken + 1:
                return None
            return words_at(self.at(offset), layout.ENVELOPE_BYTES // 8).copy()

    def bell_words(self, rank: int) -> npt.NDArray[np.int64]:
        """Return a rank's bell line, as words."""
        return words_at(
            self.at(self.layout.bells + rank * layout.LINE_BYTES), layout.LINE_BYTES // 8
        )

    def ended_ranks(self) -> list[int]:
        """Return the ranks whose process has ended."""
        poll = select.poll()
        ranks = {}
        for rank, word in enumerate(self.poll_table):
            fd = int(np.int32(word & 0xFFFFFFFF))
            if fd >= 0:
                ranks[fd] = rank
                poll.register(fd, select.POLLIN)
        return sorted(ranks[fd] for fd, _ in poll.poll(0))

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
        for rank, address in enumerate(self.arena_addresses):
            if rank != self.rank and address:
                _release_arena(int(address))
        for word in self.poll_table:
            if (fd := int(np.int32(word & 0xFFFFFFFF))) >= 0:
                os.close(fd)
        self.poll_table[:] = _NO_DESCRIPTOR
        self.unmap()


# Peers' arenas, by the identity of the memory: communicators of the same ranks share a mapping.
_mapped: dict[tuple[int, int], list[Any]] = {}


_mapped_lock = threading.Lock()  # communicators may be made and closed in several threads


def _map_arena(fd: int, size_bytes: int) -> int:
    status = os.fstat(fd)
    key = (status.st_dev, status.st_ino)
    with _mapped_lock:
        if key not in _mapped:
            _mapped[key] = [0, mapping.Mapping(fd, size_bytes, "a peer's arena")]
        entry = _mapped[key]
        entry[0] += 1
        address: int = entry[1].address
        return address


def _release_arena(address: int) -> None:
    with _mapped_lock:
        for key, entry in list(_mapped.items()):
            if entry[1].address == address:
                entry[0] -= 1
                if entry[0] == 0:
                    entry[1].unmap()
                    del _mapped[key]
                return


def _renew_in_child() -> None:
    global _mapped_lock
    _mapped_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_in_child)


def join(
    job: Job,
    tune: Any,
    timeout_s: float,
    facts: dict[str, Any] | None = None,
    same: dict[str, Any] | None = None,
    watch: Watch | None = None,
) -> Members:
    """Meet the ranks of `job` and map what they share.

    Parameters
    ----------
    job : Job
        Who this rank is, and where to meet.
    tune : callable
        Called on rank 0 with all introductions; returns the `Tuning` for all.
    timeout_s : float
        How long to wait for the others.
    facts : dict, optional
        What every rank is to know of this one, as JSON: into its introduction.
    same : dict, optional
        What must be equal on all ranks, by what errors call it.
    watch : Watch, optional
        What else than the meeting itself knows of ranks that can never come.

    Raises
    ------
    RendezvousError
        A rank did not come, or another version of gpucoll did.
    PeerLostError, AbortedError
        A rank is gone, or gave up.
    MemoryError
        There is no memory for the segment.
    """
    if job.world_size > layout.MAX_RANKS:
        raise ArgumentError(
            f"world_size is {job.world_size}, but the segment of one host allows "
            f"{layout.MAX_RANKS} ranks"
        )
    facts = facts or {}

    def decide(introductions: list[dict[str, Any]]) -> tuple[dict[str, Any], list[int]]:
        tuning: Tuning = tune(introductions)
        place = SegmentLayout(job.world_size, tuning)
        check_room(place)
        fd = mapping.create("gpucoll-segment", place.size_bytes, reserve=True)
        return {"tuning": tuning.words()}, [fd]

    with held_signals():
        arena = process_arena()
        introduction = introduction_of(job, arena, facts, same or {}, __version__)
        life = life_line()
        try:
            return meet(
                job,
                introduction,
                [arena.fd, life],
                check=lambda other, fds: check_introduction(other, fds, facts),
                decide=decide,
                settle=lambda meeting: _settle(meeting, arena),
                undo=lambda members: members.leave(),
                timeout_s=timeout_s,
                watch=watch,
            )
        finally:
            os.close(life)


def _settle(meeting: Meeting, arena: Arena) -> Members:
    """Map what the ranks share; close the descriptors that are not kept."""
    kept: list[int] = []
    try:
        return _map_members(meeting, arena, kept)
    finally:
        frames.close_all([fd for fd in meeting.fds if fd not in kept])


def _map_members(meeting: Meeting, arena: Arena, kept: list[int]) -> Members:
    job, tuning = meeting.job, Tuning(*meeting.decision["tuning"])
    place = SegmentLayout(job.world_size, tuning)
    segment = mapping.Mapping(meeting.shared_fds[0], place.size_bytes, "the segment")
    try:
        members = Members(
            job=job,
            tuning=tuning,
            layout=place,
            segment=segment,
            arena=arena,
            arena_addresses=np.zeros(job.world_size, np.int64),
            arena_bytes=arena.size_bytes,
            poll_table=np.full(job.world_size, _NO_DESCRIPTOR, np.int64),
            pid_table=np.array([member["pid"] for member in meeting.introductions], np.int64),
            introductions=meeting.introductions,
        )
    except BaseException:
        segment.unmap()
        raise
    members.arena_addresses[job.rank] = arena.mapping.address
    try:
        for rank, (arena_fd, life_fd) in enumerate(meeting.rank_fds):
            if rank != job.rank:
                size_bytes = meeting.introductions[rank]["arena_bytes"]
                members.arena_addresses[rank] = _map_arena(arena_fd, size_bytes)
                members.poll_table[rank] = life_fd | (select.POLLIN << 32)
                kept.append(life_fd)
        # Whoever does without single copies does so in every call, in messages too.
        can_copy = members.tuning.single_copy_min_bytes < layout.NEVER and all(
            peer_memory.is_readable(member["pid"], *member["probe"])
            for member in meeting.introductions
        )
        members.store(members.status_offset(job.rank) + layout.STATUS_COPIES, can_copy)
    except BaseException:
        members.close()
        raise
    return members
