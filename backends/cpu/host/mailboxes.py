"""Mailboxes, and the table of pending messages that uses them.

A mailbox is two rings of records for a pair of ranks, written by one and read by the other. A
message begins with a record that has an envelope. Data that is very small lies in the envelope.
Larger data follows in the record and, if it is longer still, in further records, its parts.
Otherwise the envelope gives the place of the data in the sender's arena or process, and the sender
waits until the message is acknowledged. The small ring is used until it is full, and again when the
large ring has been emptied. A rank that changes a mailbox rings the other rank's bell, which costs
a system call only if that rank sleeps.

The table (`words.TransferTable`) contains the rows of sends, receives and probes
(`words.Transfer`). Only a thread that holds the table's lock may touch the table's content. Any
thread may check whether a row is over.
"""

from __future__ import annotations

from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import (
    call_copy,
    call_loop,
    exchange64,
    load64_acquire,
    store64,
    store64_release,
)
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import ring
from gpucoll.transport.shared.layout import Envelope, Way
from gpucoll.transport.shared.room import reserve
from gpucoll.transport.shared.steps import LINE
from gpucoll.transport.shared.words import (
    Context,
    Kind,
    LinkedList,
    Mailbox,
    Progress,
    Status,
    Transfer,
    TransferTable,
)

ANY = -1


@inline
def try_lock(table: TransferTable) -> bool:
    """Take the table's lock, unless another thread has it; return whether it was taken."""
    return exchange64(table.at.lock, 1) == 0


@inline
def unlock(table: TransferTable) -> None:
    """Release the table's lock."""
    store64_release(table.at.lock, 0)


@inline
def finish(table: TransferTable, row: Transfer, state: int) -> None:
    """Note that a row is over: from here on its owner may read it and reuse it."""
    table.pending -= 1
    table.finished += 1
    if row.begun_ns != 0 and state == Progress.DONE and row.kind != Kind.PROBE:
        context = table.context
        call_loop(context.note_message, context, row)
    store64_release(row.at.state, state)


@inline
def append(items: LinkedList, item: int, next_field: int) -> None:
    """Append an item, of which this field names the next, to a list."""
    Words(item)[next_field] = 0
    if items.first == 0:
        items.first = item
    else:
        Words(items.last)[next_field] = item
    items.last = item


@inline
def remove(items: LinkedList, before: int, item: int, next_field: int) -> None:
    """Remove an item from a list; `before` is the one before it, or 0."""
    after = Words(item)[next_field]
    if before == 0:
        items.first = after
    else:
        Words(before)[next_field] = after
    if items.last == item:
        items.last = before


ENVELOPE_BYTES, SHAPE_BYTES = layout.ENVELOPE_BYTES, layout.SHAPE_BYTES
POST_BYTES, SMALLEST_BYTES = layout.POST_BYTES, layout.SMALLEST_BYTES
_TAIL, _MATCHED = layout.MAILBOX_TAIL, layout.MAILBOX_MATCHED
_MATCHED_COUNT = layout.MAILBOX_MATCHED_COUNT
_SMALL, _LARGE = layout.MAILBOX_SMALL, layout.MAILBOX_LARGE
_MODE_SHIFT, _DIMENSIONS_SHIFT, _ACKNOWLEDGEMENT_SHIFT, _DESCRIPTION_SHIFT = 8, 16, 24, 40
_DIMENSIONS_BASE = 16  # keeps the codes for numbers from being negative
MANY_DIMENSIONS = layout.MESSAGE_DIMENSIONS + 1
"""Stands for any number of dimensions for which an envelope has no room."""
ASKED = 1
"""In `needs_room`: no memory was available, and the send that needs it is not noted yet."""


# --- both sides -----------------------------------------------------------------------------------


@inline
def area_of(context: Context, receiver: int, sender: int) -> int:
    """Return the address of a mailbox."""
    place = receiver * context.world_size + sender
    return context.mailboxes + place * context.mailbox_stride


@inline
def opened_word(context: Context, receiver: int, sender: int) -> int:
    """Return the address of the word that shows whether a mailbox is used."""
    place = receiver * context.world_size + sender
    return context.opened + 8 * place


@inline
def _ring_start(area: int, which: int) -> int:
    return area + _LARGE if which else area + _SMALL


@inline
def _ring_bytes(context: Context, which: int) -> int:
    return context.large_ring_bytes if which else _LARGE - _SMALL


@inline
def _round_up(size_bytes: int) -> int:
    return (size_bytes + ENVELOPE_BYTES - 1) & -ENVELOPE_BYTES


@inline
def pack(way: int, mode: int, dimensions: int, acknowledgement: int, description_bytes: int) -> int:
    """Return a record's word `Envelope.packed`."""
    most = min(dimensions, MANY_DIMENSIONS) + _DIMENSIONS_BASE
    return (
        way
        | (mode << _MODE_SHIFT)
        | (most << _DIMENSIONS_SHIFT)
        | (acknowledgement << _ACKNOWLEDGEMENT_SHIFT)
        | (description_bytes << _DESCRIPTION_SHIFT)
    )


@inline
def way_of(record: Envelope) -> int:
    """Return the `Way` of a record."""
    return record.packed & 0xFF


@inline
def mode_of(record: Envelope) -> int:
    """Return the `Mode` of a message."""
    return (record.packed >> _MODE_SHIFT) & 0xFF


@inline
def dimensions_of(record: Envelope) -> int:
    """Return a message's number of dimensions, or the code for a number."""
    return ((record.packed >> _DIMENSIONS_SHIFT) & 0xFF) - _DIMENSIONS_BASE


@inline
def acknowledgement_of(record: Envelope) -> int:
    """Return 1 + the index of the word that acknowledges a message; 0: none does."""
    return (record.packed >> _ACKNOWLEDGEMENT_SHIFT) & 0xFFFF


@inline
def description_bytes_of(record: Envelope) -> int:
    """Return the size of a message's description."""
    return record.packed >> _DESCRIPTION_SHIFT


@inline
def extra_bytes(dimensions: int, description_bytes: int) -> int:
    """Return the size of shape and description that follow a message's envelope."""
    if dimensions <= 1 and description_bytes == 0:
        return 0
    return SHAPE_BYTES + _round_up(description_bytes)


@inline
def record_bytes(extra: int, data_bytes: int) -> int:
    """Return the size of a record that contains so much data."""
    if extra == 0 and data_bytes <= SMALLEST_BYTES:
        return ENVELOPE_BYTES
    return ENVELOPE_BYTES + extra + _round_up(data_bytes)


@inline
def data_place(record: Envelope, extra: int, size_bytes: int) -> int:
    """Return the address of a message's data in its record."""
    if extra == 0 and size_bytes <= SMALLEST_BYTES:
        return record.at.first_length
    return record.address + ENVELOPE_BYTES + extra


@inline
def ring_bell(context: Context, rank: int) -> None:
    """Wake a rank that sleeps until one of its mailboxes changes."""
    ring(context.bells + rank * LINE)


@inline
def copy(context: Context, destination: int, source: int, size_bytes: int) -> None:
    """Copy between private memory and a record, or out of an arena."""
    call_copy(context.copy_plain, destination, source, size_bytes, 0)


# --- writing --------------------------------------------------------------------------------------


@inline
def open_mailbox(table: TransferTable, words: Mailbox, receiver: int) -> bool:
    """Take memory for the mailbox to a rank; return whether it is available."""
    context = table.context
    area = area_of(context, receiver, context.rank)
    if reserve(context, area, _LARGE) != Status.OK:
        table.needs_room = Transfer(ASKED)
        return False
    words.out_area = area
    exchange64(opened_word(context, receiver, context.rank), 1)
    return True


@inline
def matched_bytes(words: Mailbox) -> int:
    """Read how much of this rank's messages was matched; return it."""
    matched = load64_acquire(words.out_area + _MATCHED)
    words.out_matched = matched
    return matched


@inline
def _used_bytes(words: Mailbox) -> int:
    """Return how much of the ring in use may not have been taken yet."""
    return words.out_written - max(words.out_tail, words.out_base)


@inline
def _look_at_tail(words: Mailbox) -> None:
    words.out_tail = load64_acquire(words.out_area + _TAIL)


@inline
def publish(
    context: Context, words: Mailbox, receiver: int, record: Envelope, size_bytes: int, number: int
) -> None:
    """Give a record to the receiver, after marking the next place as not written."""
    which = words.out_ring
    start, ring_size = _ring_start(words.out_area, which), _ring_bytes(context, which)
    offset = record.address - start + size_bytes
    if offset == ring_size:
        offset = 0
    words.out_offset = offset
    words.out_written += size_bytes
    store64(start + offset, 0)
    exchange64(record.address, number)
    ring_bell(context, receiver)


@inline
def _go_to_start(words: Mailbox, record: Envelope, skipped: int) -> None:
    """Write a record that sends the reader to the start of this ring."""
    start = _ring_start(words.out_area, words.out_ring)
    store64(start, 0)
    record.packed = Way.TO_START
    words.out_offset = 0
    words.out_written += skipped
    store64_release(record.address, 1)  # the bell is rung by the record that follows


@inline
def _go_to_other(context: Context, words: Mailbox, record: Envelope) -> None:
    """Write a record that sends the reader to the other ring; older records will still be taken."""
    which = words.out_ring
    there = words.out_other
    store64(_ring_start(words.out_area, 1 - which) + there, 0)
    record.packed = Way.TO_OTHER
    after = words.out_offset + ENVELOPE_BYTES
    words.out_other = 0 if after == _ring_bytes(context, which) else after
    words.out_written += ENVELOPE_BYTES
    # One place less: a record like this one may still be where the other ring was left.
    words.out_base = words.out_written - ENVELOPE_BYTES
    words.out_offset = there
    words.out_ring = 1 - which
    store64_release(record.address, 1)


@inline
def _skipped_bytes(
    context: Context, words: Mailbox, which: int, ring_size: int, size_bytes: int, is_part: int
) -> int:
    """Return how much is skipped at the end of the ring, so that a record is in one piece.

    Parts of a long message return to the start earlier if the receiver keeps up, which keeps them
    in caches.
    """
    offset = words.out_offset
    if offset + size_bytes > ring_size:
        return ring_size - offset
    if is_part and which and offset >= context.streamed_bytes:
        _look_at_tail(words)
        if _used_bytes(words) + size_bytes + ENVELOPE_BYTES <= offset:
            return ring_size - offset
    return 0


@inline
def _may_go_back(words: Mailbox, size_bytes: int) -> bool:
    """Return whether the small ring can be used again: everything ever written was taken."""
    is_small = size_bytes <= (_LARGE - _SMALL) // 2
    return is_small and words.out_tail == words.out_written


@inline
def _has_large(table: TransferTable, words: Mailbox) -> bool:
    """Take memory for the large ring unless that was done; return whether it is available."""
    if words.out_has_large == 0:
        context, large = table.context, _ring_start(words.out_area, 1)
        if reserve(context, large, context.large_ring_bytes) != Status.OK:
            table.needs_room = Transfer(ASKED)
            return False
        words.out_has_large = 1
    return True


@inline
def place_record(table: TransferTable, words: Mailbox, size_bytes: int, is_part: int) -> Envelope:
    """Return the place for a record of this size; 0: there is no room for it now."""
    context = table.context
    for _ in range(3):
        which = words.out_ring
        ring_size = _ring_bytes(context, which)
        skipped = _skipped_bytes(context, words, which, ring_size, size_bytes, is_part)
        # One place more: the record after this one must be marked as not written.
        needed = skipped + size_bytes + ENVELOPE_BYTES
        if _used_bytes(words) + needed > ring_size or (skipped and which):
            _look_at_tail(words)
        record = Envelope(_ring_start(words.out_area, which) + words.out_offset)
        if skipped and which and _may_go_back(words, size_bytes):
            _go_to_other(context, words, record)
        elif _used_bytes(words) + needed <= ring_size:
            if not skipped:
                return record
            _go_to_start(words, record, skipped)
        elif which:
            return Envelope(0)
        elif _has_large(table, words):
            _go_to_other(context, words, record)
        else:
            return Envelope(0)
    return Envelope(0)


# --- taking ---------------------------------------------------------------------------------------


@inline
def _open_incoming(context: Context, words: Mailbox, sender: int) -> bool:
    """Check whether a rank has begun to send; return whether it has."""
    me = context.rank
    if load64_acquire(opened_word(context, me, sender)) == 0:
        return False
    words.in_area = area_of(context, me, sender)
    return True


@inline
def _skip(words: Mailbox, offset: int, taken: int) -> None:
    words.in_offset = offset
    words.in_taken += taken


@inline
def written_record(table: TransferTable, words: Mailbox, sender: int) -> Envelope:
    """Return the next record of a rank that was not taken yet; 0: none is written."""
    context = table.context
    if words.in_area == 0 and not _open_incoming(context, words, sender):
        return Envelope(0)
    while True:
        which, offset = words.in_ring, words.in_offset
        record = Envelope(_ring_start(words.in_area, which) + offset)
        if load64_acquire(record.address) == 0:
            return Envelope(0)
        way = way_of(record)
        if way < Way.TO_START:
            return record
        if way == Way.TO_START:
            _skip(words, 0, _ring_bytes(context, which) - offset)
            continue
        after = offset + ENVELOPE_BYTES
        other = words.in_other
        words.in_other = 0 if after == _ring_bytes(context, which) else after
        _skip(words, other, ENVELOPE_BYTES)
        words.in_ring = 1 - which


@inline
def give_back(context: Context, words: Mailbox, sender: int, size_bytes: int) -> None:
    """Return the taken record's place to its sender."""
    offset = words.in_offset + size_bytes
    if offset == _ring_bytes(context, words.in_ring):
        offset = 0
    _skip(words, offset, size_bytes)
    exchange64(words.in_area + _TAIL, words.in_taken)
    ring_bell(context, sender)


@inline
def note_matched(words: Mailbox, cost: int) -> None:
    """Report to the sender that a receive matched a message that took so much room."""
    matched, count = words.in_matched + cost, words.in_count + 1
    words.in_matched = matched
    words.in_count = count
    store64(words.in_area + _MATCHED_COUNT, count)
    store64_release(words.in_area + _MATCHED, matched)
