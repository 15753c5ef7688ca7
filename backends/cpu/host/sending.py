"""The next step of a send: writes its message, or the place of its data, into the mailbox."""

from __future__ import annotations

from gpucoll.backends.cpu.host.mailboxes import (
    ASKED,
    ENVELOPE_BYTES,
    MANY_DIMENSIONS,
    POST_BYTES,
    SHAPE_BYTES,
    data_place,
    extra_bytes,
    matched_bytes,
    open_mailbox,
    pack,
    place_record,
    publish,
    record_bytes,
)
from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import load64_acquire, store64
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.filling import fill
from gpucoll.transport.shared.layout import Envelope, Way
from gpucoll.transport.shared.peer_memory import can_read
from gpucoll.transport.shared.steps import NOT_SHARED, arena_offset
from gpucoll.transport.shared.words import Context, Mailbox, Mode, Progress, Transfer, TransferTable

_ACKNOWLEDGEMENTS = layout.ACKNOWLEDGEMENTS
STAYED, MOVED, OVER = 0, 1, 2
"""How a step went. The caller removes a row that is over from its list, then ends it."""


# --- acknowledgements -----------------------------------------------------------------------------


@inline
def acknowledgement_word(context: Context, sender: int, acknowledgement: int) -> int:
    """Return the address of the word that tells a sender that its message was taken."""
    place = sender * _ACKNOWLEDGEMENTS + acknowledgement - 1
    return context.acknowledged + 8 * place


@inline
def _take_word(table: TransferTable) -> int:
    """Return 1 + the index of a free acknowledgement word; 0: none is free."""
    count = table.n_free_words
    if count == 0:
        return 0
    table.n_free_words = count - 1
    acknowledgement = table.free_words[count - 1]
    context = table.context
    store64(acknowledgement_word(context, context.rank, acknowledgement), 0)
    return acknowledgement


@inline
def _is_first(table: TransferTable) -> bool:
    """Return whether no send of this rank waits for an acknowledgement."""
    return table.n_free_words == _ACKNOWLEDGEMENTS


@inline
def _is_acknowledged(table: TransferTable, row: Transfer) -> bool:
    context = table.context
    word = acknowledgement_word(context, context.rank, row.acknowledgement)
    return load64_acquire(word) != 0


@inline
def _give_word_back(table: TransferTable, row: Transfer) -> None:
    count = table.n_free_words
    table.free_words[count] = row.acknowledgement
    table.n_free_words = count + 1


# --- the message ----------------------------------------------------------------------------------


@inline
def _is_fetched(table: TransferTable, row: Transfer) -> bool:
    """Return whether the receiver reads the data directly from this process.

    If each rank has a CPU, two processes stream very large data faster than one copies it, provided
    that they have nothing else to do: with messages in both directions each copies one. On some
    processors they stream all data faster. Then one send at a time does so: the data of several
    would fill the mailbox, so that a small message could not pass.
    """
    context, receiver = table.context, row.peer
    if receiver == context.rank:
        return True
    if not can_read(context, receiver):
        return False
    if row.size_bytes < context.fetched_min_bytes and _is_first(table):
        return False
    is_alone, most_bytes = table.pending == 1, context.single_copy_max_bytes
    return not is_alone or most_bytes == 0 or row.size_bytes <= 2 * most_bytes


@inline
def _choose_way(table: TransferTable, row: Transfer) -> None:
    """Choose the path of a message, and the word that acknowledges it if it needs one."""
    context, size_bytes = table.context, row.size_bytes
    row.way = Way.POSTED
    if size_bytes <= context.eager_bytes or table.n_free_words == 0:
        return
    offset = arena_offset(context, row.memory, size_bytes)
    if offset != NOT_SHARED:
        row.way = Way.IN_ARENA
        row.place = offset
    elif _is_fetched(table, row):
        row.way = Way.IN_PROCESS
        row.place = row.memory


@inline
def _needs_word(table: TransferTable, words: Mailbox, row: Transfer, size_bytes: int) -> bool:
    """Return whether the sender waits until its message is taken or, if small, matched."""
    if row.way != Way.POSTED or row.mode & Mode.SYNCHRONOUS:
        return True
    context = table.context
    if row.size_bytes > context.eager_bytes:
        return _is_first(table)  # any other is over once its last part is in the mailbox
    room, sent = context.eager_room_bytes, words.out_sent + size_bytes
    return sent - words.out_matched > room and sent - matched_bytes(words) > room


@inline
def _write_extra(record: Envelope, row: Transfer) -> None:
    """Write a shape of more than one dimension, and a description."""
    for place in range(layout.MESSAGE_DIMENSIONS):
        Words(record.address + ENVELOPE_BYTES)[place] = row.dimensions[place]
    size_bytes = row.description_bytes
    start, source = Words(record.address + ENVELOPE_BYTES + SHAPE_BYTES), row.description
    for place in range((size_bytes + 7) >> 3):  # whole words: it is padded
        start[place] = source[place]


@inline
def _write_envelope(record: Envelope, row: Transfer, extra: int) -> None:
    """Write a message's envelope except its number."""
    record.size_bytes = row.size_bytes
    record.tag = row.tag
    record.dtype = row.dtype
    way, dimensions = row.way, min(row.n_dimensions, MANY_DIMENSIONS)
    description_bytes = row.description_bytes
    packed = pack(way, row.mode, dimensions, row.acknowledgement, description_bytes)
    record.packed = packed
    if way == Way.POSTED:
        record.place = row.dimensions[0]
    else:
        record.place = row.place
        record.first_length = row.dimensions[0]
    if extra:
        _write_extra(record, row)


@inline
def _note_need(table: TransferTable, row: Transfer) -> None:
    """Note the send for which memory was just requested in vain, if there is one."""
    if table.needs_room.address == ASKED:
        table.needs_room = row


@inline
def note_room(table: TransferTable, row: Transfer) -> None:
    """Note that a send needs no memory any more: its row may soon be gone."""
    if table.needs_room.address == row.address:
        table.needs_room = Transfer(0)


@inline
def _begin_send(table: TransferTable, words: Mailbox, row: Transfer) -> bool:
    """Write the first record of a message; return whether there was room."""
    context, receiver = table.context, row.peer
    if words.out_area == 0 and not open_mailbox(table, words, receiver):
        _note_need(table, row)
        return False
    _choose_way(table, row)
    posted_bytes = min(row.size_bytes, POST_BYTES) if row.way == Way.POSTED else 0
    extra = extra_bytes(row.n_dimensions, row.description_bytes)
    size_bytes = record_bytes(extra, posted_bytes)
    if row.way != Way.POSTED:
        size_bytes = ENVELOPE_BYTES + extra
    needs_word = _needs_word(table, words, row, size_bytes)
    if needs_word and table.n_free_words == 0:
        return False
    record = place_record(table, words, size_bytes, posted_bytes == POST_BYTES)
    if not record:
        _note_need(table, row)
        return False
    note_room(table, row)
    row.acknowledgement = _take_word(table) if needs_word else 0
    _write_envelope(record, row, extra)
    if posted_bytes:
        place = data_place(record, extra, row.size_bytes)
        fill(context, place, row.memory, posted_bytes)
    row.done_bytes = posted_bytes
    row.is_waiting = 0
    number = words.out_number + 1
    words.out_number = number
    words.out_sent += size_bytes
    publish(context, words, receiver, record, size_bytes, number)
    return True


@inline
def _send_part(table: TransferTable, words: Mailbox, row: Transfer) -> bool:
    """Write one more part of a message; return whether there was room."""
    context, done = table.context, row.done_bytes
    part_bytes = min(POST_BYTES, row.size_bytes - done)
    size_bytes = record_bytes(0, part_bytes)
    record = place_record(table, words, size_bytes, True)
    if not record:
        return False
    record.size_bytes = part_bytes
    record.packed = Way.PART
    place = data_place(record, 0, part_bytes)
    fill(context, place, row.memory + done, part_bytes)
    row.done_bytes = done + part_bytes
    publish(context, words, row.peer, record, size_bytes, words.out_number)
    return True


@inline
def is_posted(row: Transfer) -> bool:
    """Return whether a send's whole message is in the mailbox."""
    if row.is_waiting:
        return False
    return row.way != Way.POSTED or row.done_bytes >= row.size_bytes


@inline
def send_step(table: TransferTable, row: Transfer) -> int:
    """Advance a send, the first one to its rank, by a step; return how it went.

    When its whole message is in the mailbox, it only waits for the acknowledgement.
    """
    words = table.peers[row.peer]
    has_moved = STAYED
    if not is_posted(row):
        if row.is_waiting:
            has_moved = _begin_send(table, words, row)
        else:
            has_moved = _send_part(table, words, row)
        if not has_moved or not is_posted(row):
            return has_moved
        words.out_waiting -= 1
        row.state = Progress.UNDER_WAY
    if row.acknowledgement != 0:
        if not _is_acknowledged(table, row):
            return has_moved
        _give_word_back(table, row)
    return OVER
