"""What the ranks of one host have written into their segment: how it is read.

The ranks read it by `gpucoll.group.host.members.Members`, and `gpucoll.observe` from outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.errors import StateError
from gpucoll.rendezvous.job import Job
from gpucoll.transport.shared import layout, mapping, ordering
from gpucoll.transport.shared.layout import Record, SegmentLayout, Tuning
from gpucoll.wording import list_ranks

_lock = threading.RLock()
"""Held while a segment is read or unmapped. Reentrant: a garbage collection within may close
one."""


def words_at(address: int, count: int) -> npt.NDArray[np.int64]:
    """Return a view of int64 words at an address. The memory must outlive the view."""
    words: Any = (ctypes.c_int64 * count).from_address(address)
    return np.frombuffer(words, np.int64)


@dataclass
class SegmentView:
    """A segment, mapped into this process, and what its ranks have written into it.

    Methods that return words return views. Use a view only within `held`, or where the segment is
    known to stay mapped, and only after loading the flag that announces its words.
    """

    job: Job
    tuning: Tuning
    layout: SegmentLayout
    segment: mapping.Mapping

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
        raise NotImplementedError

    # --- words of the segment ---------------------------------------------------------------------

    # They are loaded and stored in order, and never after the segment was unmapped. A holder of a
    # `Work` may read some words long after `close`, or while another thread closes the
    # communicator. It then gets a StateError; reading the bare address would end the process.

    def at(self, offset: int) -> int:
        """Return the address of an offset in the segment; StateError if it is unmapped."""
        if not self.segment.is_mapped:
            raise StateError(f"the communicator of {self.who(self.rank)} is closed")
        return self.segment.address + offset

    def locked(self) -> contextlib.AbstractContextManager[object]:
        """Keep other threads from unmapping a segment within the block."""
        return _lock

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

    def read_reason(self, rank: int) -> str:
        """Return the exception that another rank has stored; empty: no exception made it leave."""
        with self.held():
            text = ctypes.string_at(self._reason_address(rank), layout.REASON_BYTES)
        return text.partition(b"\0")[0].decode(errors="replace")

    def _reason_address(self, rank: int) -> int:
        return self.at(self.layout.reasons + rank * layout.REASON_BYTES)


def _renew_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_in_child)
