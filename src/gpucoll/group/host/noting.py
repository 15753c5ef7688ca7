"""Notes spans of calls that no compiled loop ends: large ones of several hosts, those on GPUs."""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt

from gpucoll.errors import StateError
from gpucoll.group.host.members import Members
from gpucoll.group.host.records import difference, record_of_block
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import Record
from gpucoll.transport.shared.spans import SpanKind, note_span

__all__ = ["is_watched", "note_block", "note_enqueued"]

Words = npt.NDArray[np.int64]


def is_watched(members: Members) -> bool:
    """Return whether somebody watches the job."""
    return members.load(layout.EVENT_WATCHED) != 0


def note_block(
    members: Members, context: Words, block: CallBlock, sequence: int, begun_ns: int
) -> None:
    """Note that a call of several hosts is over, unless another thread has closed its group."""
    record = record_of_block(block)
    with contextlib.suppress(StateError), members.held():
        _note(context, record, SpanKind.SEVERAL_HOSTS, sequence, begun_ns)


def note_enqueued(members: Members, context: Words, sequence: int) -> None:
    """Note that a call on GPU arrays is over, if its beginning was noted."""
    if not is_watched(members):
        return
    with members.held():
        record = members.enqueued_words(members.rank, sequence)
        begun_ns = int(record[Record.begun_ns])
        if begun_ns and difference(int(record[Record.sequence]), sequence) == 0:
            record[Record.begun_ns] = 0
            _note(context, record, SpanKind.GPU, sequence, begun_ns)


def _note(context: Words, record: Words, kind: SpanKind, sequence: int, begun_ns: int) -> None:
    note_span.ctypes(context.ctypes.data, record.ctypes.data, int(kind), sequence, begun_ns)
