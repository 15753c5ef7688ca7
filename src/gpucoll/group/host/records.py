"""Decode the call records in the segment into readable descriptions of the user's calls."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gpucoll.collectives import Collective
from gpucoll.group.host.segment_view import SegmentView
from gpucoll.transport.shared import layout, ordering
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import Record, RecordState
from gpucoll.transport.shared.words import Call
from gpucoll.types import COMPRESSIONS, dtype_name, operation_name


def difference(left: int, right: int) -> int:
    """Return ``left - right`` of two 32-bit sequence numbers that may have wrapped."""
    return int(struct.unpack("<i", struct.pack("<I", (left - right) & 0xFFFFFFFF))[0])


def last_completed(members: SegmentView, begun: int) -> int:
    """Return the number of the last call up to `begun` that this rank has completed."""
    with members.held():
        words = members.all_records(members.rank)
        done = words[words[:, Record.state] == RecordState.DONE, Record.sequence].tolist()
    behind = [difference(begun, number) for number in done]
    least = min((number for number in behind if number >= 0), default=None)
    return members.tuning.initial_sequence if least is None else difference(begun, least)


def describe_call(members: SegmentView, rank: int, sequence: int) -> str | None:
    """Return what a rank called under this sequence number; None: it has no record of that call."""
    with members.held():
        members.header_word(rank, sequence)  # loaded first: it is stored after the record
        return describe_record(members.record_words(rank, sequence), sequence)


def describe_enqueued(members: SegmentView, rank: int, sequence: int) -> str | None:
    """Return what a rank called on GPU arrays under this number; None: it has no such record."""
    with members.held():
        if difference(members.enqueued_header(rank, sequence) & 0xFFFFFFFF, sequence) != 0:
            return None
        return describe_record(members.enqueued_words(rank, sequence), sequence)


def describe_record(words: npt.NDArray[np.int64], sequence: int) -> str | None:
    """Return a recorded call as its user would write it; None: the record is of another call."""
    record = [int(word) for word in words]
    if difference(record[Record.sequence], sequence) != 0 or not record[Record.collective]:
        return None
    collective = Collective(record[Record.collective])
    if collective in _INTERNAL:
        return _INTERNAL[collective](record)
    parts = []
    if collective.is_list:
        parts.append(f"a list of {record[Record.dimensions]} arrays")
    if operation := operation_name(record[Record.operation], record[Record.parameter]):
        parts.append(f"op={operation}")
    if dtype := dtype_name(record[Record.dtype]):
        size = (
            f"{record[Record.count]} elements" if collective.is_list else f"shape {_shape(record)}"
        )
        parts.append(f"{dtype}, {size}")
    if collective == Collective.COMPRESSED_ALL_REDUCE:
        parts.append(f"compression={COMPRESSIONS[record[Record.parameter]]}")
    if n_counts := record[Record.n_counts]:
        counts = record[Record.counts : Record.counts + min(n_counts, layout.SHOWN_COUNTS)]
        dots = ", ..." if n_counts > layout.SHOWN_COUNTS else ""
        name = "send_counts" if collective.is_exchange else "counts"
        parts.append(f"{name}=[{', '.join(map(str, counts))}{dots}]")
    if record[Record.root] >= 0:
        parts.append(f"root={record[Record.root]}")
    return f"{collective.spelled}({', '.join(parts)})"


def describe_block(block: CallBlock) -> str:
    """Return a prepared call as its user would write it; it need not have been made yet."""
    record = record_of_block(block)
    return describe_record(record, 0) or Collective(int(record[Record.collective])).spelled


def record_of_block(block: CallBlock) -> npt.NDArray[np.int64]:
    """Return the record, numbered 0, that a prepared call would have."""
    call, record = block.words, np.zeros(layout.RECORD_BYTES // 8, np.int64)
    for field, shown in _SHOWN_OF_CALL.items():
        record[field] = call[shown]
    n_shown = min(int(call[Call.n_dimensions]), layout.SHOWN_DIMENSIONS)
    place, end = Record.dimensions, Record.dimensions + n_shown
    record[place:end] = call[Call.dimensions : Call.dimensions + n_shown]
    record[Record.n_counts] = n_counts = int(call[Call.n_counts])
    for number in range(min(n_counts, layout.SHOWN_COUNTS)):
        record[Record.counts + number] = ordering.load(int(call[Call.counts]) + 8 * number)
    return record


_SHOWN_OF_CALL = {
    Record.collective: Call.collective,
    Record.operation: Call.operation,
    Record.dtype: Call.dtype,
    Record.root: Call.shown_root,
    Record.count: Call.count,
    Record.size_bytes: Call.size_bytes,
    Record.parameter: Call.parameter_bits,
    Record.n_dimensions: Call.n_dimensions,
}


def _shape(record: list[int]) -> str:
    n_dimensions = record[Record.n_dimensions]
    shown = min(n_dimensions, layout.SHOWN_DIMENSIONS)
    shape = record[Record.dimensions : Record.dimensions + shown]
    dots = ", ..." if n_dimensions > shown else ""
    return f"({', '.join(map(str, shape))}{',' if n_dimensions == 1 else ''}{dots})"


def _describe_counts(record: list[int]) -> str:
    """Return the call whose first part exchanges counts; the root in its record names the call."""
    collective = Collective(record[Record.root])
    name = "recv_counts" if collective.is_exchange else "counts"
    return f'{collective.spelled}({name}="auto")'


_INTERNAL: dict[Collective, Callable[[list[int]], str]] = {
    Collective.COUNTS: _describe_counts,
    Collective.CONNECT: lambda _: "a collective on GPU arrays (it connects the GPUs first)",
    Collective.UNFIT: lambda _: "nothing: its arguments do not fit the counts that it received",
}
"""Parts of calls that are not methods of a communicator."""
