"""Receiving over message connections: records go to mailboxes, data to the row that requested it.

To the table of messages this code is the sender on another host: it writes records into the
mailbox. The connection was authenticated when it was opened, but its content is not sealed: no
content may make this process write where it should not. Anything that Python may unpickle is taken
only from sealed frames.
"""

from __future__ import annotations

import numpy as np

from gpucoll.backends.cpu.host.held_messages import message_record_bytes
from gpucoll.backends.cpu.host.mailboxes import (
    E_DTYPE,
    E_PACKED,
    E_PLACE,
    E_SIZE_BYTES,
    ENVELOPE_BYTES,
    ON_ANOTHER_HOST,
    OUT_AREA,
    OUT_NUMBER,
    PART,
    POST_BYTES,
    POSTED,
    acknowledgement_of,
    description_bytes_of,
    mailbox_words,
    mode_of,
    place_record,
    publish,
    record_bytes,
    way_of,
)
from gpucoll.backends.cpu.host.sending import acknowledgement_word
from gpucoll.backends.cpu.host.transfers import (
    ADDRESS,
    CONTEXT,
    DONE_BYTES,
    FOUND_BYTES,
    NEEDS_ROOM,
    SYNCHRONOUS,
    WIRES,
)
from gpucoll.backends.cpu.wires.sending import served
from gpucoll.backends.cpu.wires.state import (
    CAME_BYTES,
    CAME_COST,
    CARRIER,
    CARRY_HERE,
    END,
    ENDED,
    F_ASK,
    F_BYE,
    F_CREDIT,
    F_DATA,
    F_HELLO,
    F_RECORD,
    F_SEALED,
    F_TAKEN,
    FD,
    FETCHES,
    GRANTED_BYTES,
    HAS_BYE,
    MAY_SEND,
    N_TAKEN,
    OPEN,
    SAYS_BYE,
    SERVE_LAST,
    SERVES,
    STATE,
    TAKEN,
    area_of,
    fail,
    failed_call,
    move_bytes,
    must_seal,
    opened_word,
    own_rank,
    push,
    seals_data,
    seen_mailbox,
    wake_python,
)
from gpucoll.backends.cpu.wires.words import (
    BUFFER_BYTES,
    CARRIER_FAILED,
    HEADER_BYTES,
    NO_FRAME,
    NOT_ASKED,
    SAID_BYE,
    SEAL_BYTES,
    Announced,
    Served,
    Wire,
)
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.memory import (
    call_post,
    exchange64,
    get,
    load64_acquire,
    put,
    store64,
    store64_release,
)
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.room import reserve
from gpucoll.transport.shared.steps import OK
from gpucoll.transport.shared.words import Context

_BUFFER, _START, _STOP = int(Wire.IN_BUFFER), int(Wire.IN_START), int(Wire.IN_STOP)
_IS_EMPTY = int(Wire.CARRIER_IS_EMPTY)
_BODY_LEFT, _BODY_AT = int(Wire.BODY_LEFT), int(Wire.BODY_AT)
_BODY_OF, _PARTS_LEFT = int(Wire.BODY_OF), int(Wire.PARTS_LEFT)
_OPEN, _OPENED, _OPEN_BYTES = int(Wire.OPEN), int(Wire.OPENED), int(Wire.OPEN_BYTES)
_OPEN_BUFFER, _OPENED_BUFFER = int(Wire.OPEN_BUFFER), int(Wire.OPENED_BUFFER)
_OPENS_PARTS, _WIRE_NEEDS_ROOM = int(Wire.OPENS_PARTS), int(Wire.NEEDS_ROOM)
_S_ADDRESS, _S_DONE_BYTES, _S_END = int(Served.ADDRESS), int(Served.DONE_BYTES), int(Served.END)
_PLAIN, _SEALED_MESSAGE = int(Announced.PLAIN), int(Announced.SEALED)
_MATCHED, _MATCHED_COUNT = layout.MAILBOX_MATCHED, layout.MAILBOX_MATCHED_COUNT
_SMALL_BYTES = layout.MAILBOX_LARGE
_ACKNOWLEDGEMENTS = layout.ACKNOWLEDGEMENTS
_MOST_DESCRIPTION_BYTES = layout.MOST_DESCRIPTION_BYTES
_MOST_SEALED_BYTES = SEAL_BYTES - HEADER_BYTES
_EAGER_ROOM_BYTES = int(Context.EAGER_ROOM_BYTES)
_WORD_BITS = 0xFFFF << 24  # the acknowledgement in `PACKED`
_MSG_DONTWAIT = 0x40
_MOST_FRAMES = 64
_MOST_BODY_BYTES = 1 << 20
_TAKEN, _LATER, _BAD, _PARTLY = 0, 1, 2, 3
"""How a frame was taken: taken; no room for it now; not a frame of ours; not complete yet."""

_i64, _i32 = types.int64, types.int32
_recv = types.ExternalFunction("recv", _i64(_i32, _i64, _i64, _i32))


# --- records --------------------------------------------------------------------------------------


@inline
def _is_message(wire, record, size_bytes, is_sealed):
    """Return whether a message's first record is one that a rank could have written."""
    way, acknowledgement = way_of(record), acknowledgement_of(record)
    data_bytes, description_bytes = get(record, E_SIZE_BYTES), description_bytes_of(record)
    if way != POSTED and way != ON_ANOTHER_HOST:
        return False
    if data_bytes < 0 or description_bytes < 0 or description_bytes > _MOST_DESCRIPTION_BYTES:
        return False
    if acknowledgement > _ACKNOWLEDGEMENTS or message_record_bytes(record) != size_bytes:
        return False
    if must_seal(get(record, E_DTYPE), mode_of(record), description_bytes) and not is_sealed:
        return False
    if get(record, 0) != get(seen_mailbox(wire), OUT_NUMBER) + 1 or get(wire, _PARTS_LEFT) != 0:
        return False
    if way == POSTED:
        return True
    return data_bytes > 0 and acknowledgement > 0 and get(wire, FETCHES + acknowledgement) == 0


@inline
def _is_part(wire, record, size_bytes, is_sealed):
    """Return whether a further record belongs to the message being received."""
    left, part_bytes = get(wire, _PARTS_LEFT), get(record, E_SIZE_BYTES)
    if left == 0 or part_bytes != min(left, POST_BYTES):
        return False
    if get(wire, _OPENS_PARTS) != 0 and not is_sealed:
        return False
    return record_bytes(0, part_bytes) == size_bytes


@inline
def _have_mailbox(table, wire):
    """Take memory for the mailbox from the other end; return whether it is available."""
    context, words, me = get(table, CONTEXT), seen_mailbox(wire), own_rank(table)
    if get(words, OUT_AREA) != 0:
        return True
    area = area_of(context, me, get(wire, END))
    if reserve(context, area, _SMALL_BYTES) != OK:
        return False
    put(words, OUT_AREA, area)
    exchange64(opened_word(context, me, get(wire, END)), 1)
    return True


@inline
def _place(table, wire, size_bytes):
    """Return the place for a record; 0: there is no room, or no memory, which Python then gets."""
    needed, place = get(table, NEEDS_ROOM), 0
    put(table, NEEDS_ROOM, 0)
    is_open = _have_mailbox(table, wire)
    if is_open:
        place = place_record(table, seen_mailbox(wire), size_bytes, False)
    if not is_open or get(table, NEEDS_ROOM) != 0:
        put(wire, _WIRE_NEEDS_ROOM, 1)
        wake_python(table)
    put(table, NEEDS_ROOM, needed)  # the note for this rank's own sends
    return place


@inline
def _note_message(table, wire, record, is_sealed):
    """Note the facts about a message that arrived; return its word `PACKED`."""
    context, end = get(table, CONTEXT), get(wire, END)
    packed, acknowledgement = get(record, E_PACKED), acknowledgement_of(record)
    data_bytes, is_object = (
        get(record, E_SIZE_BYTES),
        seals_data(get(record, E_DTYPE), mode_of(record)),
    )
    put(wire, CAME_COST, get(wire, CAME_COST) + message_record_bytes(record))
    if way_of(record) == ON_ANOTHER_HOST:
        put(wire, FETCHES + acknowledgement, _SEALED_MESSAGE if is_object else _PLAIN)
        return packed
    put(wire, _OPENS_PARTS, 1 if is_object else 0)
    put(wire, _PARTS_LEFT, data_bytes - min(data_bytes, POST_BYTES))
    if acknowledgement == 0:
        return packed
    # Its sender learns late what was matched, and so may wait although there was room.
    matched = load64_acquire(get(seen_mailbox(wire), OUT_AREA) + _MATCHED)
    is_due = mode_of(record) & SYNCHRONOUS == 0
    is_due = is_due and get(wire, CAME_COST) - matched <= get(context, _EAGER_ROOM_BYTES)
    store64(acknowledgement_word(context, end, acknowledgement), 1 if is_due else 0)
    put(wire, TAKEN + get(wire, N_TAKEN), acknowledgement)
    put(wire, N_TAKEN, get(wire, N_TAKEN) + 1)
    return packed & ~_WORD_BITS if is_due else packed


@inline
def _take_record(table, wire, record, size_bytes, is_sealed):
    """Put a record into the mailbox from the other end; return how it went."""
    if size_bytes < ENVELOPE_BYTES:
        return _BAD
    context, words, is_part = get(table, CONTEXT), seen_mailbox(wire), way_of(record) == PART
    if is_part and not _is_part(wire, record, size_bytes, is_sealed):
        return _BAD
    if not is_part and not _is_message(wire, record, size_bytes, is_sealed):
        return _BAD
    if get(wire, N_TAKEN) >= _ACKNOWLEDGEMENTS:
        return _BAD
    to = _place(table, wire, size_bytes)
    if to == 0:
        return _LATER
    move_bytes(to + 8, record + 8, size_bytes - 8)
    number = get(words, OUT_NUMBER)
    if is_part:
        put(wire, _PARTS_LEFT, get(wire, _PARTS_LEFT) - get(record, E_SIZE_BYTES))
    else:
        number += 1
        put(words, OUT_NUMBER, number)
        put(to, E_PACKED, _note_message(table, wire, record, is_sealed))
        if way_of(record) == ON_ANOTHER_HOST:
            put(to, E_PLACE, 1)  # not asked for yet
    put(wire, CAME_BYTES, get(wire, CAME_BYTES) + size_bytes)
    publish(context, words, own_rank(table), to, size_bytes, number)
    return _TAKEN


# --- data and answers -----------------------------------------------------------------------------


@inline
def _row_for(wire, acknowledgement, size_bytes, is_sealed):
    """Return the row for a piece of data; 0: no row has requested it."""
    if acknowledgement < 1 or acknowledgement > _ACKNOWLEDGEMENTS:
        return 0
    kept = get(wire, FETCHES + acknowledgement)
    row = kept & -2
    if row <= _SEALED_MESSAGE or (kept & 1 != 0 and not is_sealed):
        return 0
    left = get(row, FOUND_BYTES) - get(row, DONE_BYTES)
    return row if 0 < size_bytes <= left else 0


@inline
def _note_data(wire, acknowledgement, size_bytes):
    """Note that `size_bytes` more of a message's data are in place."""
    row = get(wire, FETCHES + acknowledgement) & -2
    done = get(row, DONE_BYTES) + size_bytes
    put(row, DONE_BYTES, done)
    if done == get(row, FOUND_BYTES):
        put(wire, FETCHES + acknowledgement, 0)


@inline
def _take_opened_data(wire, data, size_bytes, acknowledgement):
    row = _row_for(wire, acknowledgement, size_bytes, True)
    if row == 0:
        return _BAD
    move_bytes(get(row, ADDRESS) + get(row, DONE_BYTES), data, size_bytes)
    _note_data(wire, acknowledgement, size_bytes)
    return _TAKEN


@inline
def _take_ask(table, wire, acknowledgement):
    if acknowledgement < 1 or acknowledgement > _ACKNOWLEDGEMENTS:
        return _BAD
    kept = served(table, acknowledgement)
    is_asked = get(kept, _S_DONE_BYTES) != NOT_ASKED or get(kept, _S_ADDRESS) == 0
    if is_asked or get(kept, _S_END) != get(wire, END):
        return _BAD
    put(kept, _S_DONE_BYTES, 0)
    push(wire, SERVES, SERVE_LAST, acknowledgement)
    return _TAKEN


@inline
def _take_taken(table, acknowledgement):
    if acknowledgement < 1 or acknowledgement > _ACKNOWLEDGEMENTS:
        return _BAD
    exchange64(acknowledgement_word(get(table, CONTEXT), own_rank(table), acknowledgement), 1)
    return _TAKEN


@inline
def _take_credit(table, wire, body, size_bytes, granted):
    area = get(mailbox_words(table, get(wire, END)), OUT_AREA)
    if size_bytes != 16:
        return _BAD
    put(wire, GRANTED_BYTES, max(get(wire, GRANTED_BYTES), granted))
    if area != 0:
        store64(area + _MATCHED_COUNT, get(body, 1))
        store64_release(area + _MATCHED, get(body, 0))
    return _TAKEN


@inline
def _take_frame(table, wire, frame, is_sealed):
    """Handle a frame that is complete; return how it went."""
    kind, size_bytes = get(frame, 0) & 0xFF, get(frame, 0) >> 8
    value, body = get(frame, 1), frame + HEADER_BYTES
    if kind == F_RECORD:
        return _take_record(table, wire, body, size_bytes, is_sealed)
    if kind == F_CREDIT:
        return _take_credit(table, wire, body, size_bytes, value)
    if kind == F_DATA and is_sealed:
        return _take_opened_data(wire, body, size_bytes, value)
    if size_bytes != 0:
        return _BAD
    if kind == F_ASK:
        return _take_ask(table, wire, value)
    if kind == F_TAKEN:
        return _take_taken(table, value)
    if kind == F_HELLO:
        put(wire, MAY_SEND, 1)
        return _TAKEN
    if kind == F_BYE:
        put(wire, HAS_BYE, 1)
        return _TAKEN
    return _BAD


# --- incoming bytes -------------------------------------------------------------------------------


@inline
def _begin_body(table, wire, kind, size_bytes, value):
    """Begin a frame whose bytes go directly to their place; return whether it is one of ours."""
    if kind == F_SEALED:
        put(wire, _BODY_AT, get(wire, _OPEN_BUFFER))
        put(wire, _BODY_OF, 0)
        put(wire, _OPEN_BYTES, size_bytes)
        put(wire, _BODY_LEFT, size_bytes)
        return 0 < size_bytes <= _MOST_SEALED_BYTES
    row = _row_for(wire, value, size_bytes, False)
    if row == 0:
        return False
    put(wire, _BODY_AT, get(row, ADDRESS) + get(row, DONE_BYTES))
    put(wire, _BODY_OF, value)
    put(wire, _BODY_LEFT, size_bytes)
    return True


@inline
def _note_body(table, wire, size_bytes):
    """Note that `size_bytes` more of such a frame are in place."""
    put(wire, _BODY_AT, get(wire, _BODY_AT) + size_bytes)
    left = get(wire, _BODY_LEFT) - size_bytes
    put(wire, _BODY_LEFT, left)
    if get(wire, _BODY_OF) != 0:
        _note_data(wire, get(wire, _BODY_OF), size_bytes)
    elif left == 0:
        store64_release(wire + 8 * _OPEN, get(wire, _OPEN_BYTES))
        wake_python(table)


@inline
def _take_opened(table, wire):
    """Handle what Python has opened; return whether that is done, so that receiving goes on."""
    opened = load64_acquire(wire + 8 * _OPENED)
    if opened == 0:
        return False
    went = _take_frame(table, wire, get(wire, _OPENED_BUFFER), True)
    if went == _BAD:
        fail(table, wire, NO_FRAME)
    if went != _TAKEN:
        return False
    put(wire, _OPEN, 0)
    store64_release(wire + 8 * _OPENED, 0)
    return True


@inline
def _take_buffered(table, wire):
    """Handle one received frame, or the beginning of one; return how it went."""
    start, stop = get(wire, _START), get(wire, _STOP)
    if stop - start < HEADER_BYTES:
        return _PARTLY
    frame = get(wire, _BUFFER) + start
    kind, size_bytes = get(frame, 0) & 0xFF, get(frame, 0) >> 8
    if kind == F_DATA or kind == F_SEALED:
        if not _begin_body(table, wire, kind, size_bytes, get(frame, 1)):
            return _BAD
        put(wire, _START, start + HEADER_BYTES)
        return _TAKEN
    if size_bytes < 0 or size_bytes > BUFFER_BYTES - HEADER_BYTES:
        return _BAD
    if stop - start < HEADER_BYTES + size_bytes:
        return _PARTLY
    went = _take_frame(table, wire, frame, False)
    if went == _TAKEN:
        put(wire, _START, start + HEADER_BYTES + size_bytes)
    return went


@inline
def _receive_carried(table, wire, address, most_bytes, enough_bytes):
    """Receive what a carrier has brought, message by message; return as `_receive` does."""
    carry, came, got = get(get(table, WIRES), CARRY_HERE), 0, 1
    while got > 0 and came < enough_bytes:
        got = call_post(carry, get(wire, CARRIER), address + came, most_bytes - came)
        came += max(got, 0)
    put(wire, _IS_EMPTY, 1 if came == 0 and got == 0 else 0)
    if came > 0:
        return came
    if got < 0:
        fail(table, wire, CARRIER_FAILED)
    elif get(wire, HAS_BYE) != 0 and get(wire, SAYS_BYE) == SAID_BYE:
        put(wire, STATE, ENDED)
        wake_python(table)
    return 0


@inline
def _receive(table, wire, address, most_bytes, enough_bytes):
    """Receive; from a carrier until there is no more, or enough. Return the bytes, 0: none."""
    if get(wire, CARRIER) != 0:
        return _receive_carried(table, wire, address, most_bytes, enough_bytes)
    got = _recv(np.int32(get(wire, FD)), address, most_bytes, np.int32(_MSG_DONTWAIT))
    if got > 0:
        return got
    if got < 0:
        number = failed_call()
        if number != 0:
            fail(table, wire, number)
    elif get(wire, HAS_BYE) != 0:
        put(wire, STATE, ENDED)
        wake_python(table)
    else:
        fail(table, wire, 0)
    return 0


@inline
def _receive_buffered(table, wire):
    """Receive into the buffer, after data that is not handled yet; return the bytes received."""
    start, stop, buffer = get(wire, _START), get(wire, _STOP), get(wire, _BUFFER)
    if start > 0:
        if stop > start:
            move_bytes(buffer, buffer + start, stop - start)
        stop -= start
        put(wire, _START, 0)
        put(wire, _STOP, stop)
    room = BUFFER_BYTES - stop
    got = _receive(table, wire, buffer + stop, room, room)
    put(wire, _STOP, stop + got)
    return got


@inline
def _receive_body(table, wire):
    """Receive more of a frame's bytes directly to their place; return how many."""
    left, start = get(wire, _BODY_LEFT), get(wire, _START)
    waiting = min(get(wire, _STOP) - start, left)
    if waiting > 0:
        move_bytes(get(wire, _BODY_AT), get(wire, _BUFFER) + start, waiting)
        put(wire, _START, start + waiting)
    else:
        waiting = _receive(table, wire, get(wire, _BODY_AT), min(left, _MOST_BODY_BYTES), 1)
    if waiting > 0:
        _note_body(table, wire, waiting)
    return waiting


@inline
def receive_on(table, wire):
    """Receive and handle frame by frame; return whether anything was received."""
    if get(wire, STATE) != OPEN:
        return 0
    moved, is_empty = 0, False
    for _ in range(_MOST_FRAMES):
        if get(wire, _OPEN) != 0:
            if not _take_opened(table, wire):
                return moved
            moved = 1
        elif get(wire, _BODY_LEFT) > 0:
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
            asked = BUFFER_BYTES - get(wire, _STOP) + get(wire, _START)
            got = _receive_buffered(table, wire)
            if got == 0:
                return moved
            is_empty = got < asked  # everything available came: another call would find nothing
    return moved
