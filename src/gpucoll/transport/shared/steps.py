"""The first and last steps of every compiled collective: sequence, record, header, arrivals.

A call takes the next sequence number. Its slot in the ring is free once every rank has finished the
call ``RING`` numbers before. This needs no check of its own: a rank that has posted a call has
finished the one ``AHEAD`` numbers before, and within each ``RING - AHEAD`` calls a rank sees every
header, either in a call in which all wait for all or in `verify` (docs/decisions/0028 and 0031, and
as a model docs/models/calls.pml).
"""

from __future__ import annotations

import numpy as np

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import (
    call_loop,
    get,
    load64,
    put,
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
OK, EVENT, MISMATCH = int(Status.OK), int(Status.EVENT), int(Status.MISMATCH)
NOT_RUN = int(Status.NOT_RUN)
STARTED, DONE = int(RecordState.STARTED), int(RecordState.DONE)
_GOES_AHEAD = int(RecordState.GOES_AHEAD)

RANK, WORLD_SIZE, SEQUENCE = int(Context.RANK), int(Context.WORLD_SIZE), int(Context.SEQUENCE)
VERIFIED, START_NS, PATH = int(Context.VERIFIED), int(Context.START_NS), int(Context.PATH)
MISMATCHED = int(Context.MISMATCHED)
STATUS_LINES, RECORD_LINES = int(Context.STATUS_LINES), int(Context.RECORDS)
_SLOTS = int(Context.SLOTS)
_PAYLOADS, _PAYLOAD_STRIDE = int(Context.PAYLOADS), int(Context.PAYLOAD_STRIDE)
READY_BYTES, _MAKE_READY = int(Context.READY_BYTES), int(Context.MAKE_READY)
ARENA_BASE, ARENA_BYTES = int(Context.ARENA_BASE), int(Context.ARENA_BYTES)
COLLECTIVE, DIGEST, SIZE_BYTES = int(Call.COLLECTIVE), int(Call.DIGEST), int(Call.SIZE_BYTES)
SOURCE, DESTINATION, ROOT = int(Call.SOURCE), int(Call.DESTINATION), int(Call.ROOT)
OPERATION, DTYPE, COUNT = int(Call.OPERATION), int(Call.DTYPE), int(Call.COUNT)
PARAMETER_BITS, DIMENSIONS = int(Call.PARAMETER_BITS), int(Call.DIMENSIONS)
KERNEL, PARAMETER, PART_BYTES = int(Call.KERNEL), int(Call.PARAMETER), int(Call.PART_BYTES)
N_COUNTS, COUNTS = int(Call.N_COUNTS), int(Call.COUNTS)
ITEM_BYTES, IDENTITY = int(Call.ITEM_BYTES), int(Call.IDENTITY)
LARGEST_BYTES = int(Call.LARGEST_BYTES)
SHOWN_DIMENSIONS, SHOWN_COUNTS = layout.SHOWN_DIMENSIONS, layout.SHOWN_COUNTS

_R_SEQUENCE, _R_COLLECTIVE = int(Record.SEQUENCE), int(Record.COLLECTIVE)
_SHOWN_ROOT = int(Call.SHOWN_ROOT)
_R_OPERATION, _R_DTYPE, _R_ROOT = int(Record.OPERATION), int(Record.DTYPE), int(Record.ROOT)
_R_COUNT, _R_SIZE_BYTES, _R_STATE = int(Record.COUNT), int(Record.SIZE_BYTES), int(Record.STATE)
_R_PARAMETER, _R_DIMENSIONS = int(Record.PARAMETER), int(Record.DIMENSIONS)
_R_N_COUNTS, _R_COUNTS = int(Record.N_COUNTS), int(Record.COUNTS)


@inline
def slot_of(context, sequence, rank):
    """Return the address of the slot of `rank` for the call numbered `sequence`."""
    place = (sequence & (RING - 1)) * get(context, WORLD_SIZE) + rank
    return get(context, _SLOTS) + place * _SLOT_BYTES


@inline
def _payload_column(context, sequence, rank):
    """Return the rank in whose place `rank`'s payload lies: another one in each turn of the ring.

    So a rank writes to lines that it was the last to read: an all_reduce of 4 to 32 KiB between two
    ranks takes 15 to 20 % less time. The place is the same in every kind of call, because a rank
    that makes another call than the others must not write where one of them does.
    """
    world_size = np.uint64(get(context, WORLD_SIZE))
    turn = np.uint64((sequence & 0x7FFFFFFF) // RING)
    return np.int64((np.uint64(rank) + turn) % world_size)


@inline
def payload_of(context, sequence, rank, size_bytes):
    """Return the address of `rank`'s payload; a very small one is next to its header word."""
    if size_bytes <= INLINE_BYTES:
        return slot_of(context, sequence, rank) + INLINE_OFFSET
    column = _payload_column(context, sequence, rank)
    if size_bytes <= SMALL_BYTES:
        return slot_of(context, sequence, column) + HEADER_BYTES
    place = (sequence & (RING - 1)) * get(context, WORLD_SIZE) + column
    return get(context, _PAYLOADS) + place * get(context, _PAYLOAD_STRIDE)


@inline
def make_ready(context, size_bytes, most_bytes):
    """Ensure memory for a call of this size; return OK, or NO_ROOM if it has not begun.

    Inputs of up to `most_bytes` go through payloads, larger ones through stages.
    """
    if size_bytes <= get(context, READY_BYTES):
        return OK
    payload_bytes = size_bytes if size_bytes <= most_bytes else 0
    return call_loop(get(context, _MAKE_READY), context, payload_bytes)


@inline
def header_word(call, sequence):
    """Return the {sequence, digest} word of this call."""
    return (get(call, DIGEST) << 32) | (sequence & 0xFFFFFFFF)


@inline
def record_of(context, sequence):
    """Return the address of this rank's record of the call numbered `sequence`."""
    place = get(context, RANK) * RECORDS + (sequence & (RECORDS - 1))
    return get(context, RECORD_LINES) + place * RECORD_BYTES


@inline
def fill_record(record, call, sequence):
    """Record in the segment what this rank is about to do; errors show it."""
    put(record, _R_STATE, STARTED)
    put(record, _R_COLLECTIVE, get(call, COLLECTIVE))
    put(record, _R_OPERATION, get(call, OPERATION))
    put(record, _R_DTYPE, get(call, DTYPE))
    put(record, _R_ROOT, get(call, _SHOWN_ROOT))
    put(record, _R_COUNT, get(call, COUNT))
    put(record, _R_SIZE_BYTES, get(call, SIZE_BYTES))
    put(record, _R_PARAMETER, get(call, PARAMETER_BITS))
    for place in range(SHOWN_DIMENSIONS + 1):
        put(record, _R_DIMENSIONS + place, get(call, DIMENSIONS + place))
    put(record, _R_N_COUNTS, get(call, N_COUNTS))
    for place in range(min(get(call, N_COUNTS), SHOWN_COUNTS)):
        put(record, _R_COUNTS + place, get(get(call, COUNTS), place))
    put(record, _R_SEQUENCE, sequence)


@inline
def wait_all_done(context, sequence):
    """Wait until every rank has finished the call numbered `sequence`; return a status."""
    lines = get(context, STATUS_LINES)
    me, world_size = get(context, RANK), get(context, WORLD_SIZE)
    for step in range(1, world_size):
        rank = (me + step) % world_size
        status = wait(context, lines + rank * LINE + STATUS_DONE, sequence, rank)
        if status != OK:
            return status
    return OK


@inline
def verify(context):
    """Compare the signatures of earlier calls that this rank left before all had arrived.

    If all ranks have arrived in the calling call, every rank has posted its headers of these calls.
    Otherwise this waits for the headers.
    """
    me, world_size = get(context, RANK), get(context, WORLD_SIZE)
    verified = get(context, VERIFIED)
    calls = signed32(get(context, SEQUENCE) - verified)
    for place in range(1, calls):
        sequence = verified + place
        word = load64(slot_of(context, sequence, me))
        for step in range(1, world_size):
            rank = (me + step) % world_size
            status = wait_header(context, slot_of(context, sequence, rank), word, rank)
            if status != OK:
                put(context, MISMATCHED, sequence)
                return status
    put(context, VERIFIED, get(context, SEQUENCE) - 1)
    return OK


@inline
def begin(context, call):
    """Take the next sequence number and record the call; wait until its slot is free.

    Verifying one call later would be too late: a rank that has posted a call may have finished only
    the calls up to ``AHEAD`` numbers before it.
    """
    if event_pending(context):
        return EVENT
    sequence = signed32(get(context, SEQUENCE) + 1)
    put(context, SEQUENCE, sequence)
    put(context, START_NS, 0)
    fill_record(record_of(context, sequence), call, sequence)
    if behind(get(context, VERIFIED), sequence - (RING - AHEAD)):
        return verify(context)
    return OK


@inline
def begin_ahead(context, call):
    """Take the next sequence number and record a call that is posted before others have ended.

    Unlike `begin`, it never waits: it returns NOT_RUN if it would have to.
    """
    sequence = signed32(get(context, SEQUENCE) + 1)
    if event_pending(context) or behind(get(context, VERIFIED), sequence - (RING - AHEAD)):
        return NOT_RUN
    put(context, SEQUENCE, sequence)
    fill_record(record_of(context, sequence), call, sequence)
    return OK


@inline
def goes_ahead(context):
    """Record, before the header is posted, that this rank may end the call before all have arrived.

    If the ranks' calls differ, some ranks find that out in a later call. Then a rank cannot tell
    which of its calls the others have made, and the communicator is broken.
    """
    put(record_of(context, get(context, SEQUENCE)), _R_STATE, _GOES_AHEAD)


@inline
def post(context, call, source, destination):
    """Announce to every rank that this one has arrived, and where in its arena its buffers are."""
    sequence = get(context, SEQUENCE)
    slot = slot_of(context, sequence, get(context, RANK))
    store64(slot + HEADER_SOURCE, source)
    store64(slot + HEADER_DESTINATION, destination)
    signal_header(slot, header_word(call, sequence))


@inline
def wait_all_arrived(context, call):
    """Wait for every rank's header and compare signatures; return a status."""
    sequence = get(context, SEQUENCE)
    word = header_word(call, sequence)
    me, world_size = get(context, RANK), get(context, WORLD_SIZE)
    status = OK
    for step in range(1, world_size):
        rank = (me + step) % world_size
        seen = wait_header(context, slot_of(context, sequence, rank), word, rank)
        if seen == MISMATCH:
            put(context, MISMATCHED, sequence)
            status = seen  # go on: the error names every odd rank, so all must have arrived
        elif seen != OK:
            return seen
    if status == OK and get(context, VERIFIED) != sequence - 1:
        status = verify(context)
    if status == OK:
        put(context, VERIFIED, sequence)
    return status


@inline
def wait_arrived(context, call, rank):
    """Wait for one rank's header and compare its signature; return a status.

    If a call waits only for some ranks, `verify` compares the others' signatures in a later call.
    After a mismatch this waits until all have arrived, because the error names every odd rank.
    """
    sequence = get(context, SEQUENCE)
    slot, word = slot_of(context, sequence, rank), header_word(call, sequence)
    status = wait_header(context, slot, word, rank)
    return wait_all_arrived(context, call) if status == MISMATCH else status


@inline
def signal_done(context):
    """Announce to every rank that this one no longer touches others' memory for this call.

    It is for calls that read or write other ranks' arrays in place, before `wait_all_done`.
    """
    line = get(context, STATUS_LINES) + get(context, RANK) * LINE
    signal(line + STATUS_DONE, get(context, SEQUENCE))


@inline
def close_record(context):
    """Record that the call is over; take the cache line of the next call's header.

    Other ranks have read that line: without this the next call waits for it, which is a quarter of
    a barrier's time. No rank waits for the done word of a call that has not signalled it
    (`signal_done`). The word is set all the same: it tells which ranks are late, and an old value
    would look as if it were ahead.
    """
    sequence = get(context, SEQUENCE)
    line = get(context, STATUS_LINES) + get(context, RANK) * LINE
    store32_release(line + STATUS_DONE, sequence)
    put(record_of(context, sequence), _R_STATE, DONE)
    take_line(slot_of(context, sequence + 1, get(context, RANK)))


@inline
def arena_offset(context, address, size_bytes):
    """Return the offset of a buffer in this rank's arena, or NOT_SHARED."""
    offset = address - get(context, ARENA_BASE)
    if offset < 0 or offset + size_bytes > get(context, ARENA_BYTES):
        return NOT_SHARED
    return offset


@inline
def posted_source(context, rank):
    """Return the arena offset of the input that `rank` has posted for this call."""
    return load64(slot_of(context, get(context, SEQUENCE), rank) + HEADER_SOURCE)


@inline
def posted_address(context, rank):
    """Return the address that `rank` has posted for a larger input, in its own process."""
    return load64(slot_of(context, get(context, SEQUENCE), rank) + HEADER_ADDRESS)


@inline
def posted_destination(context, rank):
    """Return the arena offset of the output that `rank` has posted for this call."""
    return load64(slot_of(context, get(context, SEQUENCE), rank) + HEADER_DESTINATION)
