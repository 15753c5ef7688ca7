"""Mailboxes: two rings of records for each pair of ranks, written by one and read by the other.

A message begins with a record that has an envelope. Data that is very small lies in the envelope.
Larger data follows in the record and, if it is longer still, in further records, its parts.
Otherwise the envelope gives the place of the data in the sender's arena or process, and the sender
waits until the message is acknowledged. The small ring is used until it is full, and again when the
large ring has been emptied. A rank that changes a mailbox rings the other rank's bell, which costs
a system call only if that rank sleeps.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.transfers import CONTEXT, NEEDS_ROOM, PEERS
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import (
    call_copy,
    exchange64,
    get,
    load64_acquire,
    put,
    store64,
    store64_release,
    take_line,
)
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import ring
from gpucoll.transport.shared.layout import Envelope, Way
from gpucoll.transport.shared.room import reserve
from gpucoll.transport.shared.steps import LINE, OK, RANK, WORLD_SIZE
from gpucoll.transport.shared.words import MAILBOX_WORDS, Context, Mailbox

E_SIZE_BYTES, E_TAG, E_DTYPE = int(Envelope.SIZE_BYTES), int(Envelope.TAG), int(Envelope.DTYPE)
E_PACKED, E_PLACE, E_FIRST_LENGTH = (
    int(Envelope.PACKED),
    int(Envelope.PLACE),
    int(Envelope.FIRST_LENGTH),
)
ENVELOPE_BYTES, SHAPE_BYTES = layout.ENVELOPE_BYTES, layout.SHAPE_BYTES
POSTED, IN_ARENA, IN_PROCESS = int(Way.POSTED), int(Way.IN_ARENA), int(Way.IN_PROCESS)
ON_ANOTHER_HOST = int(Way.ON_ANOTHER_HOST)
PART, TO_START, TO_OTHER = int(Way.PART), int(Way.TO_START), int(Way.TO_OTHER)
POST_BYTES, SMALLEST_BYTES = layout.POST_BYTES, layout.SMALLEST_BYTES
EAGER_BYTES = int(Context.EAGER_BYTES)

OUT_AREA, OUT_RING = int(Mailbox.OUT_AREA), int(Mailbox.OUT_RING)
OUT_OFFSET, OUT_OTHER = int(Mailbox.OUT_OFFSET), int(Mailbox.OUT_OTHER)
OUT_WRITTEN, OUT_BASE = int(Mailbox.OUT_WRITTEN), int(Mailbox.OUT_BASE)
OUT_TAIL, OUT_SENT = int(Mailbox.OUT_TAIL), int(Mailbox.OUT_SENT)
OUT_MATCHED, OUT_NUMBER = int(Mailbox.OUT_MATCHED), int(Mailbox.OUT_NUMBER)
OUT_WAITING, OUT_TURN = int(Mailbox.OUT_WAITING), int(Mailbox.OUT_TURN)
OUT_HAS_LARGE = int(Mailbox.OUT_HAS_LARGE)
IN_AREA, IN_RING = int(Mailbox.IN_AREA), int(Mailbox.IN_RING)
IN_OFFSET, IN_OTHER = int(Mailbox.IN_OFFSET), int(Mailbox.IN_OTHER)
IN_TAKEN, IN_MATCHED = int(Mailbox.IN_TAKEN), int(Mailbox.IN_MATCHED)
IN_NUMBER, IN_WANTED = int(Mailbox.IN_NUMBER), int(Mailbox.IN_WANTED)
IN_TARGET, IN_TARGET_IS_HELD = int(Mailbox.IN_TARGET), int(Mailbox.IN_TARGET_IS_HELD)

_MAILBOXES, _MAILBOX_STRIDE = int(Context.MAILBOXES), int(Context.MAILBOX_STRIDE)
_OPENED, _BELLS = int(Context.OPENED), int(Context.BELLS)
_LARGE_RING_BYTES = int(Context.LARGE_RING_BYTES)
_COPY_PLAIN, _COPY_POSTED = int(Context.COPY_PLAIN), int(Context.COPY_POSTED)
_PREFETCH_BYTES = int(Context.PREFETCH_BYTES)
IN_COUNT = int(Mailbox.IN_COUNT)
_TAIL, _MATCHED = layout.MAILBOX_TAIL, layout.MAILBOX_MATCHED
_MATCHED_COUNT = layout.MAILBOX_MATCHED_COUNT
_SMALL, _LARGE = layout.MAILBOX_SMALL, layout.MAILBOX_LARGE
_STREAMED_BYTES = layout.STREAMED_BYTES
_MODE_SHIFT, _DIMENSIONS_SHIFT, _ACKNOWLEDGEMENT_SHIFT, _DESCRIPTION_SHIFT = 8, 16, 24, 40
_DIMENSIONS_BASE = 16  # keeps the codes for numbers from being negative
MANY_DIMENSIONS = layout.MESSAGE_DIMENSIONS + 1
"""Stands for any number of dimensions for which an envelope has no room."""
ASKED = 1
"""In `NEEDS_ROOM`: no memory was available, and the send that needs it is not noted yet."""


# --- both sides -----------------------------------------------------------------------------------


@inline
def mailbox_words(table, rank):
    """Return the address of this rank's words about the mailboxes to and from another rank."""
    return get(table, PEERS) + rank * (8 * MAILBOX_WORDS)


@inline
def _area_of(context, receiver, sender):
    place = receiver * get(context, WORLD_SIZE) + sender
    return get(context, _MAILBOXES) + place * get(context, _MAILBOX_STRIDE)


@inline
def _opened_word(context, receiver, sender):
    place = receiver * get(context, WORLD_SIZE) + sender
    return get(context, _OPENED) + 8 * place


@inline
def _ring_start(area, which):
    return area + _LARGE if which else area + _SMALL


@inline
def _ring_bytes(context, which):
    return get(context, _LARGE_RING_BYTES) if which else _LARGE - _SMALL


@inline
def _round_up(size_bytes):
    return (size_bytes + ENVELOPE_BYTES - 1) & -ENVELOPE_BYTES


@inline
def pack(way, mode, dimensions, acknowledgement, description_bytes):
    """Return a record's word `PACKED`."""
    most = min(dimensions, MANY_DIMENSIONS) + _DIMENSIONS_BASE
    return (
        way
        | (mode << _MODE_SHIFT)
        | (most << _DIMENSIONS_SHIFT)
        | (acknowledgement << _ACKNOWLEDGEMENT_SHIFT)
        | (description_bytes << _DESCRIPTION_SHIFT)
    )


@inline
def way_of(record):
    """Return the `Way` of a record."""
    return get(record, E_PACKED) & 0xFF


@inline
def mode_of(record):
    """Return the `Mode` of a message."""
    return (get(record, E_PACKED) >> _MODE_SHIFT) & 0xFF


@inline
def dimensions_of(record):
    """Return a message's number of dimensions, or the code for a number."""
    return ((get(record, E_PACKED) >> _DIMENSIONS_SHIFT) & 0xFF) - _DIMENSIONS_BASE


@inline
def acknowledgement_of(record):
    """Return 1 + the index of the word that acknowledges a message; 0: none does."""
    return (get(record, E_PACKED) >> _ACKNOWLEDGEMENT_SHIFT) & 0xFFFF


@inline
def description_bytes_of(record):
    """Return the size of a message's description."""
    return get(record, E_PACKED) >> _DESCRIPTION_SHIFT


@inline
def extra_bytes(dimensions, description_bytes):
    """Return the size of shape and description that follow a message's envelope."""
    if dimensions <= 1 and description_bytes == 0:
        return 0
    return SHAPE_BYTES + _round_up(description_bytes)


@inline
def record_bytes(extra, data_bytes):
    """Return the size of a record that contains so much data."""
    if extra == 0 and data_bytes <= SMALLEST_BYTES:
        return ENVELOPE_BYTES
    return ENVELOPE_BYTES + extra + _round_up(data_bytes)


@inline
def data_place(record, extra, size_bytes):
    """Return the address of a message's data in its record."""
    if extra == 0 and size_bytes <= SMALLEST_BYTES:
        return record + 8 * E_FIRST_LENGTH
    return record + ENVELOPE_BYTES + extra


@inline
def ring_bell(context, rank):
    """Wake a rank that sleeps until one of its mailboxes changes."""
    ring(get(context, _BELLS) + rank * LINE)


@inline
def copy(context, destination, source, size_bytes):
    """Copy between private memory and a record, or out of an arena."""
    call_copy(get(context, _COPY_PLAIN), destination, source, size_bytes, 0)


@inline
def copy_posted(context, destination, source, size_bytes):
    """Copy into a record, taking its cache lines back from the rank that read them."""
    ahead = get(context, _PREFETCH_BYTES)
    call_copy(get(context, _COPY_POSTED), destination, source, size_bytes, ahead)


# --- writing --------------------------------------------------------------------------------------


@inline
def open_mailbox(table, words, receiver):
    """Take memory for the mailbox to a rank; return whether it is available."""
    context = get(table, CONTEXT)
    area = _area_of(context, receiver, get(context, RANK))
    if reserve(context, area, _LARGE) != OK:
        put(table, NEEDS_ROOM, ASKED)
        return False
    put(words, OUT_AREA, area)
    exchange64(_opened_word(context, receiver, get(context, RANK)), 1)
    return True


@inline
def matched_bytes(words):
    """Read how much of this rank's messages was matched; return it."""
    matched = load64_acquire(get(words, OUT_AREA) + _MATCHED)
    put(words, OUT_MATCHED, matched)
    return matched


@inline
def _used_bytes(words):
    """Return how much of the ring in use may not have been taken yet."""
    return get(words, OUT_WRITTEN) - max(get(words, OUT_TAIL), get(words, OUT_BASE))


@inline
def _look_at_tail(words):
    put(words, OUT_TAIL, load64_acquire(get(words, OUT_AREA) + _TAIL))


@inline
def publish(context, words, receiver, record, size_bytes, number):
    """Give a record to the receiver, after marking the next place as not written."""
    which = get(words, OUT_RING)
    start, ring_size = _ring_start(get(words, OUT_AREA), which), _ring_bytes(context, which)
    offset = record - start + size_bytes
    if offset == ring_size:
        offset = 0
    put(words, OUT_OFFSET, offset)
    put(words, OUT_WRITTEN, get(words, OUT_WRITTEN) + size_bytes)
    store64(start + offset, 0)
    exchange64(record, number)
    ring_bell(context, receiver)


@inline
def _go_to_start(context, words, record, skipped):
    """Write a record that sends the reader to the start of this ring."""
    start = _ring_start(get(words, OUT_AREA), get(words, OUT_RING))
    store64(start, 0)
    put(record, E_PACKED, TO_START)
    put(words, OUT_OFFSET, 0)
    put(words, OUT_WRITTEN, get(words, OUT_WRITTEN) + skipped)
    store64_release(record, 1)  # the bell is rung by the record that follows


@inline
def _go_to_other(context, words, record):
    """Write a record that sends the reader to the other ring; older records will still be taken."""
    which = get(words, OUT_RING)
    there = get(words, OUT_OTHER)
    store64(_ring_start(get(words, OUT_AREA), 1 - which) + there, 0)
    put(record, E_PACKED, TO_OTHER)
    after = get(words, OUT_OFFSET) + ENVELOPE_BYTES
    put(words, OUT_OTHER, 0 if after == _ring_bytes(context, which) else after)
    put(words, OUT_WRITTEN, get(words, OUT_WRITTEN) + ENVELOPE_BYTES)
    # One place less: a record like this one may still be where the other ring was left.
    put(words, OUT_BASE, get(words, OUT_WRITTEN) - ENVELOPE_BYTES)
    put(words, OUT_OFFSET, there)
    put(words, OUT_RING, 1 - which)
    store64_release(record, 1)


@inline
def _skipped_bytes(words, which, ring_size, size_bytes, is_part):
    """Return how much is skipped at the end of the ring, so that a record is in one piece.

    Parts of a long message return to the start earlier if the receiver keeps up, which keeps them
    in caches.
    """
    offset = get(words, OUT_OFFSET)
    if offset + size_bytes > ring_size:
        return ring_size - offset
    if is_part and which and offset >= _STREAMED_BYTES:
        _look_at_tail(words)
        if _used_bytes(words) + size_bytes + ENVELOPE_BYTES <= offset:
            return ring_size - offset
    return 0


@inline
def _may_go_back(words, size_bytes):
    """Return whether the small ring can be used again: everything ever written was taken."""
    is_small = size_bytes <= (_LARGE - _SMALL) // 2
    return is_small and get(words, OUT_TAIL) == get(words, OUT_WRITTEN)


@inline
def _has_large(table, words):
    """Take memory for the large ring unless that was done; return whether it is available."""
    if get(words, OUT_HAS_LARGE) == 0:
        context, large = get(table, CONTEXT), _ring_start(get(words, OUT_AREA), 1)
        if reserve(context, large, get(context, _LARGE_RING_BYTES)) != OK:
            put(table, NEEDS_ROOM, ASKED)
            return False
        put(words, OUT_HAS_LARGE, 1)
    return True


@inline
def place_record(table, words, size_bytes, is_part):
    """Return the place for a record of this size; 0: there is no room for it now."""
    context = get(table, CONTEXT)
    for _ in range(3):
        which = get(words, OUT_RING)
        ring_size = _ring_bytes(context, which)
        skipped = _skipped_bytes(words, which, ring_size, size_bytes, is_part)
        # One place more: the record after this one must be marked as not written.
        needed = skipped + size_bytes + ENVELOPE_BYTES
        if _used_bytes(words) + needed > ring_size or (skipped and which):
            _look_at_tail(words)
        record = _ring_start(get(words, OUT_AREA), which) + get(words, OUT_OFFSET)
        if skipped and which and _may_go_back(words, size_bytes):
            _go_to_other(context, words, record)
        elif _used_bytes(words) + needed <= ring_size:
            if not skipped:
                return record
            _go_to_start(context, words, record, skipped)
        elif which:
            return 0
        elif _has_large(table, words):
            _go_to_other(context, words, record)
        else:
            return 0
    return 0


@inline
def take_next_line(words, context):
    """Begin to take the cache line of the next record, which the receiver may have read."""
    take_line(_ring_start(get(words, OUT_AREA), get(words, OUT_RING)) + get(words, OUT_OFFSET))


# --- taking ---------------------------------------------------------------------------------------


@inline
def _open_incoming(context, words, sender):
    """Check whether a rank has begun to send; return whether it has."""
    me = get(context, RANK)
    if load64_acquire(_opened_word(context, me, sender)) == 0:
        return False
    put(words, IN_AREA, _area_of(context, me, sender))
    return True


@inline
def _skip(words, offset, taken):
    put(words, IN_OFFSET, offset)
    put(words, IN_TAKEN, get(words, IN_TAKEN) + taken)


@inline
def written_record(table, words, sender):
    """Return the next record of a rank that was not taken yet; 0: none is written."""
    context = get(table, CONTEXT)
    if get(words, IN_AREA) == 0 and not _open_incoming(context, words, sender):
        return 0
    while True:
        which, offset = get(words, IN_RING), get(words, IN_OFFSET)
        record = _ring_start(get(words, IN_AREA), which) + offset
        if load64_acquire(record) == 0:
            return 0
        way = way_of(record)
        if way < TO_START:
            return record
        if way == TO_START:
            _skip(words, 0, _ring_bytes(context, which) - offset)
            continue
        after = offset + ENVELOPE_BYTES
        other = get(words, IN_OTHER)
        put(words, IN_OTHER, 0 if after == _ring_bytes(context, which) else after)
        _skip(words, other, ENVELOPE_BYTES)
        put(words, IN_RING, 1 - which)


@inline
def give_back(context, words, sender, size_bytes):
    """Return the taken record's place to its sender."""
    offset = get(words, IN_OFFSET) + size_bytes
    if offset == _ring_bytes(context, get(words, IN_RING)):
        offset = 0
    _skip(words, offset, size_bytes)
    exchange64(get(words, IN_AREA) + _TAIL, get(words, IN_TAKEN))
    ring_bell(context, sender)


@inline
def note_matched(words, cost):
    """Report to the sender that a receive matched a message that took so much room."""
    matched, count = get(words, IN_MATCHED) + cost, get(words, IN_COUNT) + 1
    put(words, IN_MATCHED, matched)
    put(words, IN_COUNT, count)
    store64(get(words, IN_AREA) + _MATCHED_COUNT, count)
    store64_release(get(words, IN_AREA) + _MATCHED, matched)
