"""What a segment says of itself, so that a process that is no rank can read it.

The event line has, at places that no version changes, a magic number, the version of the layout,
and where a text with the rest is. Rank 0 writes them before any other rank maps the segment.
"""

from __future__ import annotations

import json
import os
import struct
import time
from typing import Any

from gpucoll.rendezvous.job import Job
from gpucoll.transport.shared import MAX_RANKS, layout
from gpucoll.transport.shared.layout import SegmentLayout, Tuning
from gpucoll.version import __version__

__all__ = ["UnreadableError", "read_facts", "write_facts"]

_HEADER = struct.Struct("<qqqq")
_MOST_BYTES = 1 << 20
_MOST_RECORDS = 1 << 16


class UnreadableError(Exception):
    """A segment that this version cannot read, or that contains what no rank has written."""


def write_facts(fd: int, job: Job, place: SegmentLayout, pids: list[int]) -> None:
    """Write into a new segment what describes it."""
    facts = {
        "version": __version__,
        "ranks": place.world_size,
        "others": place.others,
        "total": job.total or job.world_size,
        "tuning": place.tuning.words(),
        "pids": pids,
        "numbers": [job.number(rank) for rank in range(place.ends)],
        "name": job.name,
        "host": job.host,
        "group": job.group,
        "made_ns": time.monotonic_ns(),
    }
    text = json.dumps(facts, separators=(",", ":")).encode()
    if len(text) > place.facts_bytes:  # a long name of the user's
        text = json.dumps({**facts, "name": ""}, separators=(",", ":")).encode()
    os.pwrite(fd, text, place.facts)
    header = _HEADER.pack(layout.MAGIC, layout.LAYOUT_VERSION, place.facts, len(text))
    os.pwrite(fd, header, layout.EVENT_MAGIC)


def read_facts(fd: int) -> tuple[Job, SegmentLayout, list[int], int]:
    """Return the job of a segment's rank 0, its layout, its processes, and when it was made.

    That time is by the monotonic clock, in nanoseconds.

    Raises
    ------
    UnreadableError
        It is of another version of gpucoll, is not ready yet, or was overwritten.
    """
    header = os.pread(fd, _HEADER.size, layout.EVENT_MAGIC)
    if len(header) < _HEADER.size or _HEADER.unpack(header)[0] != layout.MAGIC:
        raise UnreadableError("it has no description of itself (yet)")
    _, version, start, size_bytes = _HEADER.unpack(header)
    if not 0 < size_bytes <= _MOST_BYTES or start < 0:
        raise UnreadableError("its description was overwritten")
    try:
        facts = json.loads(os.pread(fd, size_bytes, start))
        if version != layout.LAYOUT_VERSION:
            raise UnreadableError(
                f"it was made by gpucoll {facts['version']} with layout {version}; this is gpucoll "
                f"{__version__} with layout {layout.LAYOUT_VERSION}: use that version's command"
            )
        return _checked(facts, os.fstat(fd).st_size)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UnreadableError(f"its description was overwritten: {error!r}") from None


def _checked(facts: dict[str, Any], size_bytes: int) -> tuple[Job, SegmentLayout, list[int], int]:
    """Return what the text of a segment says; ValueError if that cannot be."""
    ranks, others, total = (int(facts[name]) for name in ("ranks", "others", "total"))
    pids, numbers = ([int(each) for each in facts[name]] for name in ("pids", "numbers"))
    place = SegmentLayout(ranks, Tuning(*map(int, facts["tuning"])), others)
    if not 0 < ranks <= MAX_RANKS or others < 0 or (len(pids), len(numbers)) != (ranks, place.ends):
        raise ValueError("the number of ranks")
    tuning = place.tuning._replace(initial_sequence=0)
    records = tuning.enqueued_records
    if min(tuning) < 0 or records & (records - 1) or records > _MOST_RECORDS:
        raise ValueError("the tuning")
    if place.size_bytes != size_bytes:
        raise ValueError("the size")
    name, host, group = (str(facts[key]) for key in ("name", "host", "group"))
    part = Job(0, ranks, "", "", name=name, numbers=tuple(numbers), total=total)
    job = part._replace(host=host, group=group)
    return job, place, pids, int(facts["made_ns"])
