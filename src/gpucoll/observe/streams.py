"""How far the GPUs of ranks are with calls on GPU arrays, by what their monitors have noted."""

from __future__ import annotations

from typing import NamedTuple

from gpucoll.group.host.records import describe_enqueued, difference
from gpucoll.group.host.segment_view import SegmentView
from gpucoll.transport.shared import layout

__all__ = ["Pending", "is_behind", "pending_of", "rows_without"]

_LOW = 0xFFFFFFFF


class Pending(NamedTuple):
    """The oldest call that is not over on a rank's GPU.

    Attributes
    ----------
    sequence : int
        Its number among the calls on GPU arrays.
    called : str or None
        The call as its user would write it; None: its record was overwritten.
    since_ns : int
        Since when it is the oldest one, by the monotonic clock.
    has_begun : bool
        Whether the stream has reached it. If not, other work before it on the stream is not over.
    """

    sequence: int
    called: str | None
    since_ns: int
    has_begun: bool


def pending_of(segment: SegmentView, rank: int) -> Pending | None:
    """Return the call that a rank's GPU has not ended for long; None: there is none."""
    line = segment.enqueued_offset(rank)
    since_ns = segment.load(line + layout.ENQUEUED_PENDING_NS)
    if since_ns <= 0 or not segment.tuning.enqueued_records or segment.has_closed(rank):
        return None
    sequence = difference(segment.load(line + layout.ENQUEUED_PENDING) & _LOW, 0)
    try:
        called = describe_enqueued(segment, rank, sequence)
    except (ValueError, KeyError, IndexError, OverflowError):  # of no rank's making
        called = None
    return Pending(sequence, called, since_ns, segment.load(line + layout.ENQUEUED_BEGUN) != 0)


def rows_without(segment: SegmentView, sequence: int) -> list[int]:
    """Return the ranks that have not enqueued a call; further numbers are other hosts."""
    found = []
    for row in range(segment.layout.enqueued_rows):
        header = segment.enqueued_header(row, sequence)
        if not header or difference(header & _LOW, sequence) < 0:
            found.append(row)
    return found


def is_behind(other: Pending | None, pending: Pending) -> bool:
    """Return whether a rank's stream has not reached the call in which another rank's is."""
    if other is None:
        return False
    ahead = difference(pending.sequence, other.sequence)
    return ahead > 0 or (ahead == 0 and not other.has_begun)
