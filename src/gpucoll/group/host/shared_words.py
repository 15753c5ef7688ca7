"""Words of the segment, for Python: in order, and never after the segment was let go of.

Some are asked for long after `close`, by who kept a `Work`, or while another thread closes: then
there is a StateError, where the bare address would end the process.
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
"""Held while a segment is read, or unmapped. A garbage collection may close one under it."""


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
        """Return what errors call a rank."""
        return self.job.number(rank)

    def who(self, rank: int) -> str:
        """Return "rank 1 of 4"."""
        return self.job.who(rank)

    def spelled(self, ranks: Iterable[int]) -> str:
        """Return "ranks 1, 2"."""
        return list_ranks([self.number(rank) for rank in ranks])

    def at(self, offset: int) -> int:
        """Return the address of an offset in the segment; StateError where it is unmapped."""
        if not self.segment.is_mapped:
            raise StateError(f"the communicator of {self.who(self.rank)} is closed")
        return self.segment.address + offset

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the segment mapped within the block; StateError where it is not any more."""
        with _lock:
            self.at(0)
            yield

    def load(self, offset: int) -> int:
        """Load a flag; what belongs to it may be read afterwards."""
        with _lock:
            return ordering.load(self.at(offset))

    def load_after(self, offset: int) -> int:
        """Load a flag after all that was read before."""
        with _lock:
            return ordering.load_after(self.at(offset))

    def store(self, offset: int, value: int) -> None:
        """Store a flag after all that was written before."""
        with _lock:
            ordering.store(self.at(offset), value)

    def compare_exchange(self, offset: int, expected: int, desired: int) -> int:
        """Store a flag where `expected` is, after all that was written before; return what was."""
        with _lock:
            return ordering.compare_exchange(self.at(offset), expected, desired)

    def unmap(self) -> None:
        """Let go of the segment."""
        with _lock:
            self.segment.unmap()

    # --- where flags are --------------------------------------------------------------------------

    def status_offset(self, rank: int) -> int:
        """Return where a rank's status line is."""
        return self.layout.status_lines + rank * layout.LINE_BYTES

    def enqueued_offset(self, rank: int) -> int:
        """Return where a rank's line about calls on GPU arrays is."""
        return self.layout.enqueued_lines + rank * layout.LINE_BYTES

    # --- flags ------------------------------------------------------------------------------------

    def abort_word(self) -> int:
        """Return the abort word: 0, or who gave up what, which is in that rank's record."""
        return self.load(layout.EVENT_ABORT)

    def has_closed(self, rank: int) -> bool:
        """Return whether a rank has closed the communicator; all that it did is seen then."""
        return self.load(self.status_offset(rank) + layout.STATUS_CLOSED) != 0

    def header_word(self, rank: int, sequence: int) -> int:
        """Return the {sequence, digest} word in a rank's slot for a call: behind its record."""
        return self.load(self.layout.header(rank, sequence) + layout.HEADER_WORD)


def _renew_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_in_child)
