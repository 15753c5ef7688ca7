"""The first and last steps of every compiled collective: sequence, record, header, arrivals.

A call takes the next sequence number. Its slot in the ring is free once every rank has finished the
call ``RING`` numbers before. This needs no check of its own: a rank that has posted a call has
finished the one ``AHEAD`` numbers before, and within each ``RING - AHEAD`` calls a rank sees every
header, either in a call in which all wait for all or in `verify` (docs/decisions/0028 and 0031, and
as a model docs/models/calls.pml).
"""

from __future__ import annotations

import numpy as np

from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import (
    call_loop,
    load64,
    signed32,
    store32_release,
    store64,
    take_line,
)
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import (
    behind,
    event_pending,
    signal,
    signal_header,
    wait,
    wait_header,
)
from gpucoll.transport.shared.layout import Record, RecordState
from gpucoll.transport.shared.words import Call, Context, Status

AHEAD = layout.AHEAD
LINE, RING, RECORDS, RECORD_BYTES = (
    layout.LINE_BYTES,
    layout.RING,
    layout.RECORDS,
    layout.RECORD_BYTES,
)
HEADER_BYTES, INLINE_BYTES, INLINE_OFFSET = (
    layout.HEADER_BYTES,
    layout.INLINE_BYTES,
    layout.INLINE_OFFSET,
)
_SLOT_BYTES, SMALL_BYTES = layout.SLOT_BYTES, layout.SMALL_BYTES
HEADER_SOURCE, HEADER_DESTINATION = layout.HEADER_SOURCE, layout.HEADER_DESTINATION
HEADER_ADDRESS = layout.HEADER_ADDRESS
NOT_SHARED, STATUS_DONE = layout.NOT_SHARED, layout.STATUS_DONE
EVENT_WATCHED = layout.EVENT_WATCHED

SHOWN_DIMENSIONS, SHOWN_COUNTS = layout.SHOWN_DIMENSIONS, layout.SHOWN_COUNTS


@inline
def slot_of(context: Context, sequence: int, rank: int) -> int:
    """Return the address of the slot of `rank` for the call numbered `sequence`."""
    place = (sequence & (RING - 1)) * context.world_size + rank
    return context.slots + place * _SLOT_BYTES


@inline
def _payload_column(context: Context, sequence: int, rank: int) -> int:
    """Return the rank in whose place `rank`'s payload lies: another one in each turn of the ring.

    So a rank writes to lines that it was the last to read: an all_reduce of 4 to 32 KiB between two
    ranks takes 15 to 20 % less time. The place is the same in every kind of call, because a rank
    that makes another call than the others must not write where one of them does.
    """
    world_size = np.uint64(context.world_size)
    turn = np.uint64((sequence & 0x7FFFFFFF) // RING)
    return int((np.uint64(rank) + turn) % world_size)


@inline
def payload_of(context: Context, sequence: int, rank: int, size_bytes: int) -> int:
    """Return the address of `rank`'s payload; a very small one is next to its header word."""
    if size_bytes <= INLINE_BYTES:
        return slot_of(context, sequence, rank) + INLINE_OFFSET
    column = _payload_column(context, sequence, rank)
    if size_bytes <= SMALL_BYTES:
        return slot_of(context, sequence, column) + HEADER_BYTES
    place = (sequence & (RING - 1)) * context.world_size + column
    return context.payloads + place * context.payload_stride


@inline
def make_ready(context: Context, size_bytes: int, most_bytes: int) -> int:
    """Ensure memory for a call of this size; return OK, or NO_ROOM if it has not begun.

    Inputs of up to `most_bytes` go through payloads, larger ones through stages.
    """
    if size_bytes <= context.ready_bytes:
        return Status.OK
    payload_bytes = size_bytes if size_bytes <= most_bytes else 0
    return call_loop(context.make_ready, context, payload_bytes)


@inline
def header_word(call: Call, sequence: int) -> int:
    """Return the {sequence, digest} word of this call."""
    return (call.digest << 32) | (sequence & 0xFFFFFFFF)


@inline
def record_of(context: Context, sequence: int) -> Record:
    """Return this rank's record of the call numbered `sequence`."""
    place = context.rank * RECORDS + (sequence & (RECORDS - 1))
    return Record(context.records + place * RECORD_BYTES)


@inline
def fill_record(record: Record, call: Call, sequence: int) -> None:
    """Record in the segment what this rank is about to do; errors show it."""
    record.state = RecordState.STARTED
    record.collective = call.collective
    record.operation = call.operation
    record.dtype = call.dtype
    record.root = call.shown_root
    record.count = call.count
    record.size_bytes = call.size_bytes
    record.parameter = call.parameter_bits
    for place in range(SHOWN_DIMENSIONS + 1):
        Words(record.at.n_dimensions)[place] = Words(call.at.n_dimensions)[place]
    record.n_counts = call.n_counts
    for place in range(min(call.n_counts, SHOWN_COUNTS)):
        record.counts[place] = call.counts[place]
    record.sequence = sequence
    record.begun_ns = 0


@inline
def note_begin(context: Context, record: Record) -> None:
    """Note when the call began, if somebody watches the job; see `spans`."""
    if load64(context.event_line + EVENT_WATCHED) != 0:
        call_loop(context.note_arrival, context, record)


@inline
def wait_all_done(context: Context, sequence: int) -> int:
    """Wait until every rank has finished the call numbered `sequence`; return a status."""
    lines = context.status_lines
    me, world_size = context.rank, context.world_size
    for step in range(1, world_size):
        rank = (me + step) % world_size
        status = wait(context, lines + rank * LINE + STATUS_DONE, sequence)
        if status != Status.OK:
            return status
    return Status.OK


@inline
def verify(context: Context) -> int:
    """Compare the signatures of earlier calls that this rank left before all had arrived.

    If all ranks have arrived in the calling call, every rank has posted its headers of these calls.
    Otherwise this waits for the headers.
    """
    me, world_size = context.rank, context.world_size
    verified = context.verified
    calls = signed32(context.sequence - verified)
    for place in range(1, calls):
        sequence = verified + place
        word = load64(slot_of(context, sequence, me))
        for step in range(1, world_size):
            rank = (me + step) % world_size
            status = wait_header(context, slot_of(context, sequence, rank), word)
            if status != Status.OK:
                context.mismatched = sequence
                return status
    context.verified = context.sequence - 1
    return Status.OK


@inline
def begin(context: Context, call: Call) -> int:
    """Take the next sequence number and record the call; wait until its slot is free.

    Verifying one call later would be too late: a rank that has posted a call may have finished only
    the calls up to ``AHEAD`` numbers before it.
    """
    if event_pending(context):
        return Status.EVENT
    sequence = signed32(context.sequence + 1)
    context.sequence = sequence
    context.start_ns = 0
    record = record_of(context, sequence)
    fill_record(record, call, sequence)
    note_begin(context, record)
    if behind(context.verified, sequence - (RING - AHEAD)):
        return verify(context)
    return Status.OK


@inline
def begin_ahead(context: Context, call: Call) -> int:
    """Take the next sequence number and record a call that is posted before others have ended.

    Unlike `begin`, it never waits: it returns NOT_RUN if it would have to.
    """
    sequence = signed32(context.sequence + 1)
    if event_pending(context) or behind(context.verified, sequence - (RING - AHEAD)):
        return Status.NOT_RUN
    context.sequence = sequence
    record = record_of(context, sequence)
    fill_record(record, call, sequence)
    note_begin(context, record)
    return Status.OK


@inline
def goes_ahead(context: Context) -> None:
    """Record, before the header is posted, that this rank may end the call before all have arrived.

    If the ranks' calls differ, some ranks find that out in a later call. Then a rank cannot tell
    which of its calls the others have made, and the communicator is broken.
    """
    record_of(context, context.sequence).state = RecordState.GOES_AHEAD


@inline
def post(context: Context, call: Call, source: int, destination: int) -> None:
    """Announce to every rank that this one has arrived, and where in its arena its buffers are."""
    sequence = context.sequence
    slot = slot_of(context, sequence, context.rank)
    store64(slot + HEADER_SOURCE, source)
    store64(slot + HEADER_DESTINATION, destination)
    signal_header(slot, header_word(call, sequence))


@inline
def wait_all_arrived(context: Context, call: Call) -> int:
    """Wait for every rank's header and compare signatures; return a status."""
    sequence = context.sequence
    word = header_word(call, sequence)
    me, world_size = context.rank, context.world_size
    status: int = Status.OK
    for step in range(1, world_size):
        rank = (me + step) % world_size
        seen = wait_header(context, slot_of(context, sequence, rank), word)
        if seen == Status.MISMATCH:
            context.mismatched = sequence
            status = seen  # go on: the error names every odd rank, so all must have arrived
        elif seen != Status.OK:
            return seen
    if status == Status.OK and context.verified != sequence - 1:
        status = verify(context)
    if status == Status.OK:
        context.verified = sequence
    return status


@inline
def wait_arrived(context: Context, call: Call, rank: int) -> int:
    """Wait for one rank's header and compare its signature; return a status.

    If a call waits only for some ranks, `verify` compares the others' signatures in a later call.
    After a mismatch this waits until all have arrived, because the error names every odd rank.
    """
    sequence = context.sequence
    slot, word = slot_of(context, sequence, rank), header_word(call, sequence)
    status = wait_header(context, slot, word)
    return wait_all_arrived(context, call) if status == Status.MISMATCH else status


@inline
def signal_done(context: Context) -> None:
    """Announce to every rank that this one no longer touches others' memory for this call.

    It is for calls that read or write other ranks' arrays in place, before `wait_all_done`.
    """
    line = context.status_lines + context.rank * LINE
    signal(line + STATUS_DONE, context.sequence)


@inline
def close_record(context: Context) -> None:
    """Record that the call is over; take the cache line of the next call's header.

    Other ranks have read that line: without this the next call waits for it, which is a quarter of
    a barrier's time. No rank waits for the done word of a call that has not signalled it
    (`signal_done`). The word is set all the same: it tells which ranks are late, and an old value
    would look as if it were ahead.
    """
    sequence = context.sequence
    line = context.status_lines + context.rank * LINE
    store32_release(line + STATUS_DONE, sequence)
    record = record_of(context, sequence)
    record.state = RecordState.DONE
    if record.begun_ns != 0:
        call_loop(context.note_end, context, record)
    take_line(slot_of(context, sequence + 1, context.rank))


@inline
def arena_offset(context: Context, address: int, size_bytes: int) -> int:
    """Return the offset of a buffer in this rank's arena, or NOT_SHARED."""
    offset = address - context.arena_base
    if offset < 0 or offset + size_bytes > context.arena_bytes:
        return NOT_SHARED
    return offset


@inline
def posted_source(context: Context, rank: int) -> int:
    """Return the arena offset of the input that `rank` has posted for this call."""
    return load64(slot_of(context, context.sequence, rank) + HEADER_SOURCE)


@inline
def posted_address(context: Context, rank: int) -> int:
    """Return the address that `rank` has posted for a larger input, in its own process."""
    return load64(slot_of(context, context.sequence, rank) + HEADER_ADDRESS)


@inline
def posted_destination(context: Context, rank: int) -> int:
    """Return the arena offset of the output that `rank` has posted for this call."""
    return load64(slot_of(context, context.sequence, rank) + HEADER_DESTINATION)
