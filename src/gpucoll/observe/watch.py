"""Watches a job: every call of its ranks on this host, with the times of its beginning and end.

While a `Watch` is open, ranks write a span of each call into memory that the watch has taken in
their segment. One word of the segment is written from outside, no other: until when somebody
watches. A watch that is killed leaves nothing but that time, which passes, and the memory, which
goes with the segment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpucoll.errors import SharedMemoryError
from gpucoll.group.host.segment_view import words_at
from gpucoll.observe.segments import Observed
from gpucoll.transport.shared import layout, mapping
from gpucoll.transport.shared.spans import Span

__all__ = ["CALL", "Calls", "Watch"]

LEASE_S = 3.0
"""How long ranks note their calls after a watch was last read."""
_PAGE_BYTES = 4096
_WORDS = layout.SPAN_BYTES // 8

CALL = np.dtype(
    [
        ("rank", np.int64),
        ("kind", np.int64),
        ("sequence", np.int64),
        ("collective", np.int64),
        ("operation", np.int64),
        ("dtype", np.int64),
        ("size_bytes", np.int64),
        ("count", np.int64),
        ("root", np.int64),
        ("begun_ns", np.int64),
        ("ended_ns", np.int64),
    ]
)
"""One call of one rank.

``rank`` is the place in the segment; `Observed.number` returns the rank in the communicator.
``kind`` is a `SpanKind`, ``collective`` a `gpucoll.collectives.Collective`, ``dtype`` a number for
`gpucoll.types.dtype_name`. ``size_bytes`` is the size of the rank's input. ``operation``, ``dtype``
and ``root`` are -1 if the call has none. Of a message, ``root`` is the place of the other rank and
``count`` is its tag; ``collective`` and ``sequence`` are 0. Times are of the monotonic clock of the
host.
"""


@dataclass(frozen=True)
class Calls:
    """The calls of a communicator's ranks on this host that ended since the last look.

    Attributes
    ----------
    segment : Observed
        The communicator.
    calls : array of `CALL`
        By rank, and for each rank in the order in which they ended.
    missed : array of int64
        By rank, how many more calls there were: the rank has overwritten them before this look.
    """

    segment: Observed
    calls: npt.NDArray[np.void]
    missed: npt.NDArray[np.int64]


class Watch:
    """Lets the ranks of segments note their calls, and reads them.

    Parameters
    ----------
    segments : sequence of Observed
        Kept mapped by the caller until the watch is closed.

    Raises
    ------
    SharedMemoryError
        There is no memory for the calls of a segment's ranks (128 KiB each), or this process may
        not write to it.
    """

    def __init__(self, segments: Sequence[Observed]) -> None:
        self._watched: list[_Watched] = []
        try:
            for segment in segments:
                self._watched.append(_Watched(segment))
        except BaseException:
            self.close()
            raise

    def read(self) -> list[Calls]:
        """Return the calls of each segment since the last look; watch on for `LEASE_S`.

        Copies at most 128 KiB for each rank. Two looks that are further apart than `LEASE_S` miss
        calls that nobody counts.
        """
        return [each.read() for each in self._watched]

    def close(self) -> None:
        """Stop watching. Ranks stop to note their calls when the time is over, at most 3 s."""
        while self._watched:
            self._watched.pop().close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Watched:
    """One segment."""

    def __init__(self, segment: Observed) -> None:
        self.segment = segment
        self._line = _writable_line(segment)
        place = segment.layout
        self._places = [place.spans + r * layout.SPANS_BYTES for r in range(segment.world_size)]
        self._seen = [segment.load(offset) for offset in self._places]
        self._renew()

    def _renew(self) -> None:
        until_ns = time.monotonic_ns() + int(LEASE_S * 1e9)
        words = words_at(self._line.address, _PAGE_BYTES // 8)
        place = layout.EVENT_WATCHED // 8
        if int(words[place]) < until_ns:  # two watches may store theirs in either order: no harm
            words[place] = until_ns

    def read(self) -> Calls:
        self._renew()
        found, missed = [], np.zeros(self.segment.world_size, np.int64)
        for rank, offset in enumerate(self._places):
            spans, self._seen[rank], missed[rank] = self._spans_of(offset, self._seen[rank])
            found.append(_calls_of(rank, spans))
        return Calls(self.segment, np.concatenate(found), missed)

    def _spans_of(self, offset: int, seen: int) -> tuple[npt.NDArray[np.int64], int, int]:
        """Return a rank's spans after the first `seen`, up to which they are, and how many lack."""
        written = self.segment.load(offset)
        first = max(seen, written - layout.SPANS)
        numbers = np.arange(first, written) + 1
        ring = words_at(self.segment.at(offset + layout.LINE_BYTES), layout.SPANS * _WORDS)
        rows = ring.reshape(layout.SPANS, _WORDS)
        places = (numbers - 1) % layout.SPANS
        spans = rows[places]  # a copy
        # A rank clears the number before it overwrites a span, and writes it last.
        is_whole = (spans[:, Span.number] == numbers) & (rows[places, Span.number] == numbers)
        end = len(numbers)
        while end and not is_whole[end - 1]:  # being written at this moment: the next look has it
            end -= 1
        whole = spans[:end][is_whole[:end]]
        upto = first + end
        if written - upto >= layout.SPANS // 2:  # nobody finishes these: a rank has ended in one
            upto = written
        return whole, upto, upto - seen - len(whole)

    def close(self) -> None:
        self._line.unmap()


def _writable_line(segment: Observed) -> mapping.Mapping:
    """Return a writable mapping of a segment's first page, whose spans have memory by then."""
    name = f"watching communicator {segment.job.name or segment.pids}"
    place = segment.layout
    try:
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SharedMemoryError(f"{name}: its memory cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != segment.identity:
            raise SharedMemoryError(f"{name}: it was closed meanwhile")
        os.posix_fallocate(fd, place.spans, segment.world_size * layout.SPANS_BYTES)
        return mapping.Mapping(fd, _PAGE_BYTES, name)
    except OSError as error:
        size_mib = segment.world_size * layout.SPANS_BYTES / (1 << 20)
        raise SharedMemoryError(
            f"{name}: no memory for its calls: {size_mib:.1f} MiB were refused ({error.strerror})"
        ) from None
    finally:
        os.close(fd)


def _calls_of(rank: int, spans: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    calls = np.zeros(len(spans), CALL)
    what = spans[:, Span.what]
    calls["rank"] = rank
    calls["kind"] = what & 0xFF
    calls["collective"] = what >> 8 & 0xFF
    calls["operation"] = (what >> 16 & 0xFF).astype(np.int8)
    calls["dtype"] = (what >> 24 & 0xFFFF).astype(np.int16)
    for name in ("sequence", "size_bytes", "count", "root", "begun_ns", "ended_ns"):
        calls[name] = spans[:, getattr(Span, name)]
    return calls
