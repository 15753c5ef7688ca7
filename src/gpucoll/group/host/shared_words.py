"""Load and store words of the segment from Python, in order, and never after it was unmapped.

A holder of a `Work` may read some words long after `close`, or while another thread closes the
communicator. It then gets a StateError; reading the bare address would end the process.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator

from gpucoll.errors import StateError
from gpucoll.rendezvous.job import Job
from gpucoll.transport.shared import layout, mapping, ordering
from gpucoll.transport.shared.layout import SegmentLayout
from gpucoll.wording import list_ranks

_lock = threading.RLock()
"""Held while a segment is read or unmapped. Reentrant: a garbage collection within may close
one."""


class SharedWords:
    """The part of `Members` that loads and stores flags of the segment, by their offset."""

    job: Job
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

    # --- where flags are --------------------------------------------------------------------------

    def status_offset(self, rank: int) -> int:
        """Return the offset of a rank's status line."""
        return self.layout.status_lines + rank * layout.LINE_BYTES

    def enqueued_offset(self, rank: int) -> int:
        """Return the offset of a rank's line about calls on GPU arrays."""
        return self.layout.enqueued_lines + rank * layout.LINE_BYTES

    # --- flags ------------------------------------------------------------------------------------

    def abort_word(self) -> int:
        """Return the abort word: 0, or which rank gave up which call, as in its record."""
        return self.load(layout.EVENT_ABORT)

    def has_closed(self, rank: int) -> bool:
        """Return whether a rank has closed the communicator; if so, all its writes are visible."""
        return self.load(self.status_offset(rank) + layout.STATUS_CLOSED) != 0

    def header_word(self, rank: int, sequence: int) -> int:
        """Return the {sequence, digest} word in a rank's slot for a call: it follows the record."""
        return self.load(self.layout.header(rank, sequence) + layout.HEADER_WORD)


def _renew_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_in_child)
