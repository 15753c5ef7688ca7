"""The next step of a send: writes its message, or the place of its data, into the mailbox."""

from __future__ import annotations

import numpy as np

from gpucoll.backends.cpu.host.mailboxes import (
    ASKED,
    E_DTYPE,
    E_FIRST_LENGTH,
    E_PACKED,
    E_PLACE,
    E_SIZE_BYTES,
    E_TAG,
    EAGER_BYTES,
    ENVELOPE_BYTES,
    IN_ARENA,
    IN_PROCESS,
    MANY_DIMENSIONS,
    OUT_AREA,
    OUT_MATCHED,
    OUT_NUMBER,
    OUT_SENT,
    OUT_WAITING,
    PART,
    POST_BYTES,
    POSTED,
    SHAPE_BYTES,
    copy_posted,
    data_place,
    extra_bytes,
    mailbox_words,
    matched_bytes,
    open_mailbox,
    pack,
    place_record,
    publish,
    record_bytes,
)
from gpucoll.backends.cpu.host.single_copy import can_read
from gpucoll.backends.cpu.host.transfers import (
    ACKNOWLEDGEMENT,
    ADDRESS,
    CONTEXT,
    DESCRIPTION,
    DESCRIPTION_BYTES,
    DIMENSION,
    DIMENSIONS,
    DONE_BYTES,
    DTYPE,
    FREE_WORDS,
    IS_WAITING,
    MODE,
    N_FREE_WORDS,
    NEEDS_ROOM,
    PEER,
    PENDING,
    PLACE,
    SIZE_BYTES,
    STATE,
    SYNCHRONOUS,
    TAG,
    UNDER_WAY,
    WAY,
)
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import get, load64_acquire, put, store64
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.steps import NOT_SHARED, RANK, arena_offset
from gpucoll.transport.shared.words import Context

_SINGLE_COPY_MAX_BYTES = int(Context.SINGLE_COPY_MAX_BYTES)
_ACKNOWLEDGED = int(Context.ACKNOWLEDGED)
_EAGER_ROOM_BYTES = int(Context.EAGER_ROOM_BYTES)
_ACKNOWLEDGEMENTS = layout.ACKNOWLEDGEMENTS
_MOST_SHOWN = layout.MESSAGE_DIMENSIONS
STAYED, MOVED, OVER = 0, 1, 2
"""How a step went. The caller removes a row that is over from its list, then ends it."""


# --- acknowledgements -----------------------------------------------------------------------------


@inline
def acknowledgement_word(context, sender, acknowledgement):
    """Return the address of the word that tells a sender that its message was taken."""
    place = sender * _ACKNOWLEDGEMENTS + acknowledgement - 1
    return get(context, _ACKNOWLEDGED) + 8 * place


@inline
def _take_word(table):
    """Return 1 + the index of a free acknowledgement word; 0: none is free."""
    count = get(table, N_FREE_WORDS)
    if count == 0:
        return 0
    put(table, N_FREE_WORDS, count - 1)
    acknowledgement = get(get(table, FREE_WORDS), count - 1)
    context = get(table, CONTEXT)
    store64(acknowledgement_word(context, get(context, RANK), acknowledgement), 0)
    return acknowledgement


@inline
def _is_acknowledged(table, row):
    context = get(table, CONTEXT)
    word = acknowledgement_word(context, get(context, RANK), get(row, ACKNOWLEDGEMENT))
    return load64_acquire(word) != 0


@inline
def _give_word_back(table, row):
    count = get(table, N_FREE_WORDS)
    put(get(table, FREE_WORDS), count, get(row, ACKNOWLEDGEMENT))
    put(table, N_FREE_WORDS, count + 1)


# --- the message ----------------------------------------------------------------------------------


@inline
def _is_fetched(context, row, is_alone):
    """Return whether the receiver reads the data directly from this process.

    If each rank has a CPU, two processes stream very large data faster than one copies it, provided
    that they have nothing else to do: with messages in both directions each copies one.
    """
    receiver, most_bytes = get(row, PEER), get(context, _SINGLE_COPY_MAX_BYTES)
    if receiver == get(context, RANK):
        return True
    if not can_read(context, receiver):
        return False
    return not is_alone or most_bytes == 0 or get(row, SIZE_BYTES) <= 2 * most_bytes


@inline
def _choose_way(table, row):
    """Choose the path of a message, and the word that acknowledges it if it needs one."""
    context, size_bytes = get(table, CONTEXT), get(row, SIZE_BYTES)
    put(row, WAY, POSTED)
    if size_bytes <= get(context, EAGER_BYTES) or get(table, N_FREE_WORDS) == 0:
        return
    offset = arena_offset(context, get(row, ADDRESS), size_bytes)
    if offset != NOT_SHARED:
        put(row, WAY, IN_ARENA)
        put(row, PLACE, offset)
    elif _is_fetched(context, row, get(table, PENDING) == 1):
        put(row, WAY, IN_PROCESS)
        put(row, PLACE, get(row, ADDRESS))


@inline
def _needs_word(table, words, row, size_bytes):
    """Return whether the sender waits until its message is taken or, if small, matched."""
    if get(row, WAY) != POSTED or get(row, MODE) & SYNCHRONOUS:
        return True
    context = get(table, CONTEXT)
    if get(row, SIZE_BYTES) > get(context, EAGER_BYTES):
        return False  # it waits for its parts to be taken
    room, sent = get(context, _EAGER_ROOM_BYTES), get(words, OUT_SENT) + size_bytes
    return sent - get(words, OUT_MATCHED) > room and sent - matched_bytes(words) > room


@inline
def _write_extra(record, row):
    """Write a shape of more than one dimension, and a description."""
    for place in range(_MOST_SHOWN):
        put(record + ENVELOPE_BYTES, place, get(row, DIMENSION + place))
    size_bytes = get(row, DESCRIPTION_BYTES)
    start, source = record + ENVELOPE_BYTES + SHAPE_BYTES, get(row, DESCRIPTION)
    for place in range((size_bytes + 7) >> 3):  # whole words: it is padded
        put(start, place, get(source, place))


@inline
def _write_envelope(record, row, extra):
    """Write a message's envelope except its number."""
    put(record, E_SIZE_BYTES, get(row, SIZE_BYTES))
    put(record, E_TAG, get(row, TAG))
    put(record, E_DTYPE, get(row, DTYPE))
    way, dimensions = get(row, WAY), min(get(row, DIMENSIONS), MANY_DIMENSIONS)
    description_bytes = get(row, DESCRIPTION_BYTES)
    packed = pack(way, get(row, MODE), dimensions, get(row, ACKNOWLEDGEMENT), description_bytes)
    put(record, E_PACKED, packed)
    if way == POSTED:
        put(record, E_PLACE, get(row, DIMENSION))
    else:
        put(record, E_PLACE, get(row, PLACE))
        put(record, E_FIRST_LENGTH, get(row, DIMENSION))
    if extra:
        _write_extra(record, row)


@inline
def _note_need(table, row):
    """Note the send for which memory was just requested in vain, if there is one."""
    if get(table, NEEDS_ROOM) == ASKED:
        put(table, NEEDS_ROOM, row)


@inline
def note_room(table, row):
    """Note that a send needs no memory any more: its row may soon be gone."""
    if get(table, NEEDS_ROOM) == row:
        put(table, NEEDS_ROOM, 0)


@inline
def _begin_send(table, words, row):
    """Write the first record of a message; return whether there was room."""
    context, receiver = get(table, CONTEXT), get(row, PEER)
    if get(words, OUT_AREA) == 0 and not open_mailbox(table, words, receiver):
        _note_need(table, row)
        return False
    _choose_way(table, row)
    posted_bytes = min(get(row, SIZE_BYTES), POST_BYTES) if get(row, WAY) == POSTED else 0
    extra = extra_bytes(get(row, DIMENSIONS), get(row, DESCRIPTION_BYTES))
    size_bytes = record_bytes(extra, posted_bytes)
    if get(row, WAY) != POSTED:
        size_bytes = ENVELOPE_BYTES + extra
    needs_word = _needs_word(table, words, row, size_bytes)
    if needs_word and get(table, N_FREE_WORDS) == 0:
        return False
    record = place_record(table, words, size_bytes, posted_bytes == POST_BYTES)
    if record == 0:
        _note_need(table, row)
        return False
    note_room(table, row)
    put(row, ACKNOWLEDGEMENT, _take_word(table) if needs_word else 0)
    _write_envelope(record, row, extra)
    if posted_bytes:
        place = data_place(record, extra, get(row, SIZE_BYTES))
        copy_posted(context, place, get(row, ADDRESS), posted_bytes)
    put(row, DONE_BYTES, posted_bytes)
    put(row, IS_WAITING, 0)
    number = get(words, OUT_NUMBER) + 1
    put(words, OUT_NUMBER, number)
    put(words, OUT_SENT, get(words, OUT_SENT) + size_bytes)
    publish(context, words, receiver, record, size_bytes, number)
    return True


@inline
def _send_part(table, words, row):
    """Write one more part of a message; return whether there was room."""
    context, done = get(table, CONTEXT), get(row, DONE_BYTES)
    part_bytes = min(POST_BYTES, get(row, SIZE_BYTES) - done)
    size_bytes = record_bytes(0, part_bytes)
    record = place_record(table, words, size_bytes, True)
    if record == 0:
        return False
    put(record, E_SIZE_BYTES, part_bytes)
    put(record, E_PACKED, PART)
    place = data_place(record, 0, part_bytes)
    copy_posted(context, place, get(row, ADDRESS) + done, part_bytes)
    put(row, DONE_BYTES, done + part_bytes)
    publish(context, words, get(row, PEER), record, size_bytes, get(words, OUT_NUMBER))
    return True


@inline
def is_posted(row):
    """Return whether a send's whole message is in the mailbox."""
    if get(row, IS_WAITING):
        return False
    return get(row, WAY) != POSTED or get(row, DONE_BYTES) >= get(row, SIZE_BYTES)


@inline
def send_step(table, row):
    """Advance a send, the first one to its rank, by a step; return how it went.

    When its whole message is in the mailbox, it only waits for the acknowledgement.
    """
    words = mailbox_words(table, get(row, PEER))
    has_moved = np.int64(STAYED)
    if not is_posted(row):
        if get(row, IS_WAITING):
            has_moved = np.int64(_begin_send(table, words, row))
        else:
            has_moved = np.int64(_send_part(table, words, row))
        if not has_moved or not is_posted(row):
            return has_moved
        put(words, OUT_WAITING, get(words, OUT_WAITING) - 1)
        put(row, STATE, UNDER_WAY)
    if get(row, ACKNOWLEDGEMENT) != 0:
        if not _is_acknowledged(table, row):
            return has_moved
        _give_word_back(table, row)
    return OVER
