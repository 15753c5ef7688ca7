"""Receiving over message connections: records go to mailboxes, data to the row that requested it.

To the table of messages this code is the sender on another host: it writes records into the
mailbox. The connection was authenticated when it was opened, but its content is not sealed: no
content may make this process write where it should not. Anything that Python may unpickle is taken
only from sealed frames.
"""

from __future__ import annotations

import numpy as np

from gpucoll.backends.cpu.host.mailboxes import (
    ENVELOPE_BYTES,
    POST_BYTES,
    acknowledgement_of,
    area_of,
    description_bytes_of,
    mode_of,
    opened_word,
    place_record,
    publish,
    record_bytes,
    way_of,
)
from gpucoll.backends.cpu.host.receiving import message_record_bytes
from gpucoll.backends.cpu.host.sending import acknowledgement_word
from gpucoll.backends.cpu.wires.sending import served
from gpucoll.backends.cpu.wires.words import (
    BUFFER_BYTES,
    CARRIER_FAILED,
    HEADER_BYTES,
    NO_FRAME,
    NOT_ASKED,
    SAID_BYE,
    SEAL_BYTES,
    Announced,
    Frame,
    Wire,
    Wires,
    WireState,
    fail,
    failed_call,
    must_seal,
    own_rank,
    put_at,
    seals_data,
    wake_python,
)
from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import (
    call_post,
    exchange64,
    load64_acquire,
    store64,
    store64_release,
)
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.layout import Envelope, Way
from gpucoll.transport.shared.libc import MSG_DONTWAIT, memmove, recv
from gpucoll.transport.shared.room import reserve
from gpucoll.transport.shared.words import Mode, Status, Transfer, TransferTable

_MATCHED, _MATCHED_COUNT = layout.MAILBOX_MATCHED, layout.MAILBOX_MATCHED_COUNT
_SMALL_BYTES = layout.MAILBOX_LARGE
_ACKNOWLEDGEMENTS = layout.ACKNOWLEDGEMENTS
_MOST_DESCRIPTION_BYTES = layout.MOST_DESCRIPTION_BYTES
_MOST_SEALED_BYTES = SEAL_BYTES - HEADER_BYTES
_WORD_BITS = 0xFFFF << 24  # the acknowledgement in `PACKED`
_MOST_FRAMES = 64
_MOST_BODY_BYTES = 1 << 20
_TAKEN, _LATER, _BAD, _PARTLY = 0, 1, 2, 3
"""How a frame was taken: taken; no room for it now; not a frame of ours; not complete yet."""


# --- records --------------------------------------------------------------------------------------


@inline
def _is_message(wire: Wire, record: Envelope, size_bytes: int, is_sealed: int) -> bool:
    """Return whether a message's first record is one that a rank could have written."""
    way, acknowledgement = way_of(record), acknowledgement_of(record)
    data_bytes, description_bytes = record.size_bytes, description_bytes_of(record)
    if way != Way.POSTED and way != Way.ON_ANOTHER_HOST:
        return False
    if data_bytes < 0 or description_bytes < 0 or description_bytes > _MOST_DESCRIPTION_BYTES:
        return False
    if acknowledgement > _ACKNOWLEDGEMENTS or message_record_bytes(record) != size_bytes:
        return False
    if must_seal(record.dtype, mode_of(record), description_bytes) and not is_sealed:
        return False
    if record.number != wire.mailbox.out_number + 1 or wire.parts_left != 0:
        return False
    if way == Way.POSTED:
        return True
    return data_bytes > 0 and acknowledgement > 0 and wire.fetches[acknowledgement] == 0


@inline
def _is_part(wire: Wire, record: Envelope, size_bytes: int, is_sealed: int) -> bool:
    """Return whether a further record belongs to the message being received."""
    left, part_bytes = wire.parts_left, record.size_bytes
    if left == 0 or part_bytes != min(left, POST_BYTES):
        return False
    if wire.opens_parts != 0 and not is_sealed:
        return False
    return record_bytes(0, part_bytes) == size_bytes


@inline
def _have_mailbox(table: TransferTable, wire: Wire) -> bool:
    """Take memory for the mailbox from the other end; return whether it is available."""
    context, words, me = table.context, wire.mailbox, own_rank(table)
    if words.out_area != 0:
        return True
    area = area_of(context, me, wire.end)
    if reserve(context, area, _SMALL_BYTES) != Status.OK:
        return False
    words.out_area = area
    exchange64(opened_word(context, me, wire.end), 1)
    return True


@inline
def _place(table: TransferTable, wire: Wire, size_bytes: int) -> Envelope:
    """Return the place for a record; 0: there is no room, or no memory, which Python then gets."""
    needed, place = table.needs_room, Envelope(0)
    table.needs_room = Transfer(0)
    is_open = _have_mailbox(table, wire)
    if is_open:
        place = place_record(table, wire.mailbox, size_bytes, False)
    if not is_open or table.needs_room:
        wire.needs_room = 1
        wake_python(table)
    table.needs_room = needed  # the note for this rank's own sends
    return place


@inline
def _note_message(table: TransferTable, wire: Wire, record: Envelope) -> int:
    """Note the facts about a message that arrived; return its word `PACKED`."""
    context, end = table.context, wire.end
    packed, acknowledgement = record.packed, acknowledgement_of(record)
    data_bytes, is_object = (record.size_bytes, seals_data(record.dtype, mode_of(record)))
    wire.came_cost += message_record_bytes(record)
    if way_of(record) == Way.ON_ANOTHER_HOST:
        wire.fetches[acknowledgement] = Announced.SEALED if is_object else Announced.PLAIN
        return packed
    wire.opens_parts = 1 if is_object else 0
    wire.parts_left = data_bytes - min(data_bytes, POST_BYTES)
    if acknowledgement == 0:
        return packed
    # Its sender learns late what was matched, and so may wait although there was room.
    matched = load64_acquire(wire.mailbox.out_area + _MATCHED)
    is_due = mode_of(record) & Mode.SYNCHRONOUS == 0
    is_due = is_due and wire.came_cost - matched <= context.eager_room_bytes
    store64(acknowledgement_word(context, end, acknowledgement), 1 if is_due else 0)
    wire.taken[wire.n_taken] = acknowledgement
    wire.n_taken += 1
    return packed & ~_WORD_BITS if is_due else packed


@inline
def _take_record(
    table: TransferTable, wire: Wire, record: Envelope, size_bytes: int, is_sealed: int
) -> int:
    """Put a record into the mailbox from the other end; return how it went."""
    if size_bytes < ENVELOPE_BYTES:
        return _BAD
    context, words, is_part = table.context, wire.mailbox, way_of(record) == Way.PART
    if is_part and not _is_part(wire, record, size_bytes, is_sealed):
        return _BAD
    if not is_part and not _is_message(wire, record, size_bytes, is_sealed):
        return _BAD
    if wire.n_taken >= _ACKNOWLEDGEMENTS:
        return _BAD
    to = _place(table, wire, size_bytes)
    if not to:
        return _LATER
    memmove(to.address + 8, record.address + 8, size_bytes - 8)
    number = words.out_number
    if is_part:
        wire.parts_left -= record.size_bytes
    else:
        number += 1
        words.out_number = number
        to.packed = _note_message(table, wire, record)
        if way_of(record) == Way.ON_ANOTHER_HOST:
            to.place = 1  # not asked for yet
    wire.came_bytes += size_bytes
    publish(context, words, own_rank(table), to, size_bytes, number)
    return _TAKEN


# --- data and answers -----------------------------------------------------------------------------


@inline
def _row_for(wire: Wire, acknowledgement: int, size_bytes: int, is_sealed: int) -> Transfer:
    """Return the row for a piece of data; 0: no row has requested it."""
    if acknowledgement < 1 or acknowledgement > _ACKNOWLEDGEMENTS:
        return Transfer(0)
    kept = wire.fetches[acknowledgement]
    row = Transfer(kept & -2)
    if row.address <= Announced.SEALED or (kept & 1 != 0 and not is_sealed):
        return Transfer(0)
    left = row.found_bytes - row.done_bytes
    return row if 0 < size_bytes <= left else Transfer(0)


@inline
def _note_data(wire: Wire, acknowledgement: int, size_bytes: int) -> None:
    """Note that `size_bytes` more of a message's data are in place."""
    row = Transfer(wire.fetches[acknowledgement] & -2)
    done = row.done_bytes + size_bytes
    row.done_bytes = done
    if done == row.found_bytes:
        wire.fetches[acknowledgement] = 0


@inline
def _take_opened_data(wire: Wire, data: Envelope, size_bytes: int, acknowledgement: int) -> int:
    row = _row_for(wire, acknowledgement, size_bytes, True)
    if not row:
        return _BAD
    memmove(row.memory + row.done_bytes, data, size_bytes)
    _note_data(wire, acknowledgement, size_bytes)
    return _TAKEN


@inline
def _take_ask(table: TransferTable, wire: Wire, acknowledgement: int) -> int:
    if acknowledgement < 1 or acknowledgement > _ACKNOWLEDGEMENTS:
        return _BAD
    kept = served(table, acknowledgement)
    is_asked = kept.done_bytes != NOT_ASKED or kept.memory == 0
    if is_asked or kept.end != wire.end:
        return _BAD
    kept.done_bytes = 0
    put_at(wire.serves, wire.serve_last, acknowledgement)
    wire.serve_last += 1
    return _TAKEN


@inline
def _take_taken(table: TransferTable, acknowledgement: int) -> int:
    if acknowledgement < 1 or acknowledgement > _ACKNOWLEDGEMENTS:
        return _BAD
    exchange64(acknowledgement_word(table.context, own_rank(table), acknowledgement), 1)
    return _TAKEN


@inline
def _take_credit(
    table: TransferTable, wire: Wire, body: Envelope, size_bytes: int, granted: int
) -> int:
    area = table.peers[wire.end].out_area
    if size_bytes != 16:
        return _BAD
    wire.granted_bytes = max(wire.granted_bytes, granted)
    if area != 0:
        store64(area + _MATCHED_COUNT, Words(body.address)[1])
        store64_release(area + _MATCHED, Words(body.address)[0])
    return _TAKEN


@inline
def _take_frame(table: TransferTable, wire: Wire, frame: Words, is_sealed: int) -> int:
    """Handle a frame that is complete; return how it went."""
    kind, size_bytes = frame[0] & 0xFF, frame[0] >> 8
    value, body = frame[1], Envelope(frame.address + HEADER_BYTES)
    if kind == Frame.RECORD:
        return _take_record(table, wire, body, size_bytes, is_sealed)
    if kind == Frame.CREDIT:
        return _take_credit(table, wire, body, size_bytes, value)
    if kind == Frame.DATA and is_sealed:
        return _take_opened_data(wire, body, size_bytes, value)
    if size_bytes != 0:
        return _BAD
    if kind == Frame.ASK:
        return _take_ask(table, wire, value)
    if kind == Frame.TAKEN:
        return _take_taken(table, value)
    if kind == Frame.HELLO:
        wire.may_send = 1
        return _TAKEN
    if kind == Frame.BYE:
        wire.has_bye = 1
        return _TAKEN
    return _BAD


# --- incoming bytes -------------------------------------------------------------------------------


@inline
def _begin_body(wire: Wire, kind: int, size_bytes: int, value: int) -> bool:
    """Begin a frame whose bytes go directly to their place; return whether it is one of ours."""
    if kind == Frame.SEALED:
        wire.body_at = wire.open_buffer
        wire.body_of = 0
        wire.open_bytes = size_bytes
        wire.body_left = size_bytes
        return 0 < size_bytes <= _MOST_SEALED_BYTES
    row = _row_for(wire, value, size_bytes, False)
    if not row:
        return False
    wire.body_at = row.memory + row.done_bytes
    wire.body_of = value
    wire.body_left = size_bytes
    return True


@inline
def _note_body(table: TransferTable, wire: Wire, size_bytes: int) -> None:
    """Note that `size_bytes` more of such a frame are in place."""
    wire.body_at += size_bytes
    left = wire.body_left - size_bytes
    wire.body_left = left
    if wire.body_of != 0:
        _note_data(wire, wire.body_of, size_bytes)
    elif left == 0:
        store64_release(wire.at.open, wire.open_bytes)
        wake_python(table)


@inline
def _take_opened(table: TransferTable, wire: Wire) -> bool:
    """Handle what Python has opened; return whether that is done, so that receiving goes on."""
    opened = load64_acquire(wire.at.opened)
    if opened == 0:
        return False
    went = _take_frame(table, wire, wire.opened_buffer, True)
    if went == _BAD:
        fail(table, wire, NO_FRAME)
    if went != _TAKEN:
        return False
    wire.open = 0
    store64_release(wire.at.opened, 0)
    return True


@inline
def _take_buffered(table: TransferTable, wire: Wire) -> int:
    """Handle one received frame, or the beginning of one; return how it went."""
    start, stop = wire.in_start, wire.in_stop
    if stop - start < HEADER_BYTES:
        return _PARTLY
    frame = Words(wire.in_buffer + start)
    kind, size_bytes = frame[0] & 0xFF, frame[0] >> 8
    if kind == Frame.DATA or kind == Frame.SEALED:
        if not _begin_body(wire, kind, size_bytes, frame[1]):
            return _BAD
        wire.in_start = start + HEADER_BYTES
        return _TAKEN
    if size_bytes < 0 or size_bytes > BUFFER_BYTES - HEADER_BYTES:
        return _BAD
    if stop - start < HEADER_BYTES + size_bytes:
        return _PARTLY
    went = _take_frame(table, wire, frame, False)
    if went == _TAKEN:
        wire.in_start = start + HEADER_BYTES + size_bytes
    return went


@inline
def _receive_carried(
    table: TransferTable, wire: Wire, address: int, most_bytes: int, enough_bytes: int
) -> int:
    """Receive what a carrier has brought, message by message; return as `_receive` does."""
    carry, came, got = Wires(table.wires).carry_here, 0, 1
    while got > 0 and came < enough_bytes:
        got = call_post(carry, wire.carrier, address + came, most_bytes - came)
        came += max(got, 0)
    wire.carrier_is_empty = 1 if came == 0 and got == 0 else 0
    if came > 0:
        return came
    if got < 0:
        fail(table, wire, CARRIER_FAILED)
    elif wire.has_bye != 0 and wire.says_bye == SAID_BYE:
        wire.state = WireState.ENDED
        wake_python(table)
    return 0


@inline
def _receive(
    table: TransferTable, wire: Wire, address: int, most_bytes: int, enough_bytes: int
) -> int:
    """Receive; from a carrier until there is no more, or enough. Return the bytes, 0: none."""
    if wire.carrier != 0:
        return _receive_carried(table, wire, address, most_bytes, enough_bytes)
    got = recv(np.int32(wire.fd), address, most_bytes, np.int32(MSG_DONTWAIT))
    if got > 0:
        return got
    if got < 0:
        number = failed_call()
        if number != 0:
            fail(table, wire, number)
    elif wire.has_bye != 0:
        wire.state = WireState.ENDED
        wake_python(table)
    else:
        fail(table, wire, 0)
    return 0


@inline
def _receive_buffered(table: TransferTable, wire: Wire) -> int:
    """Receive into the buffer, after data that is not handled yet; return the bytes received."""
    start, stop, buffer = wire.in_start, wire.in_stop, wire.in_buffer
    if start > 0:
        if stop > start:
            memmove(buffer, buffer + start, stop - start)
        stop -= start
        wire.in_start = 0
        wire.in_stop = stop
    room = BUFFER_BYTES - stop
    got = _receive(table, wire, buffer + stop, room, room)
    wire.in_stop = stop + got
    return got


@inline
def _receive_body(table: TransferTable, wire: Wire) -> int:
    """Receive more of a frame's bytes directly to their place; return how many."""
    left, start = wire.body_left, wire.in_start
    waiting = min(wire.in_stop - start, left)
    if waiting > 0:
        memmove(wire.body_at, wire.in_buffer + start, waiting)
        wire.in_start = start + waiting
    else:
        waiting = _receive(table, wire, wire.body_at, min(left, _MOST_BODY_BYTES), 1)
    if waiting > 0:
        _note_body(table, wire, waiting)
    return waiting


@inline
def receive_on(table: TransferTable, wire: Wire) -> int:
    """Receive and handle frame by frame; return whether anything was received."""
    if wire.state != WireState.OPEN:
        return 0
    moved, is_empty = 0, False
    for _ in range(_MOST_FRAMES):
        if wire.open != 0:
            if not _take_opened(table, wire):
                return moved
            moved = 1
        elif wire.body_left > 0:
            if _receive_body(table, wire) == 0:
                return moved
            moved = 1
        else:
            went = _take_buffered(table, wire)
            if went == _BAD:
                fail(table, wire, NO_FRAME)
                return moved
            if went == _TAKEN:
                moved = 1
                continue
            if is_empty or went == _LATER:
                return moved
            asked = BUFFER_BYTES - wire.in_stop + wire.in_start
            got = _receive_buffered(table, wire)
            if got == 0:
                return moved
            is_empty = got < asked  # everything available came: another call would find nothing
    return moved
