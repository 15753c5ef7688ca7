"""Sending over message connections: records from mailboxes, requested data, and answers.

To the table of messages this code is the receiver of another host: it takes records from the
mailbox and returns their places. A record that gives the address of its data is sent without the
data, which follows directly from there when the receiver requests it.
"""

from __future__ import annotations

import numpy as np

from gpucoll.backends.cpu.host.held_messages import message_record_bytes
from gpucoll.backends.cpu.host.mailboxes import (
    E_DTYPE,
    E_PACKED,
    E_PLACE,
    E_SIZE_BYTES,
    IN_AREA,
    IN_ARENA,
    ON_ANOTHER_HOST,
    OUT_AREA,
    OUT_WRITTEN,
    PART,
    POSTED,
    acknowledgement_of,
    description_bytes_of,
    give_back,
    mode_of,
    record_bytes,
    way_of,
    written_record,
)
from gpucoll.backends.cpu.host.sending import acknowledgement_word
from gpucoll.backends.cpu.host.transfers import CONTEXT, WIRES
from gpucoll.backends.cpu.wires.state import (
    ASK_FIRST,
    ASK_LAST,
    ASKS,
    CAME_BYTES,
    CARRIER,
    CARRY_AWAY,
    END,
    F_ASK,
    F_BYE,
    F_CREDIT,
    F_DATA,
    F_RECORD,
    F_SEALED,
    F_TAKEN,
    FD,
    GRANTED_BYTES,
    HAS_BYE,
    IS_BLOCKED,
    MAY_SEND,
    N_TAKEN,
    OPEN,
    SAYS_BYE,
    SENT_BYTES,
    SERVE_FIRST,
    SERVE_LAST,
    SERVES,
    STATE,
    TAKEN,
    TOLD_GRANTED,
    TOLD_MATCHED,
    area_of,
    failed_call,
    first_of,
    move_bytes,
    must_seal,
    opened_word,
    own_rank,
    put_header,
    ring_room,
    seals_data,
    seen_mailbox,
    wake_python,
)
from gpucoll.backends.cpu.wires.words import (
    BUFFER_BYTES,
    HEADER_BYTES,
    NOT_ASKED,
    PIECE_BYTES,
    SAID_BYE,
    SEALED_PIECE_BYTES,
    SERVED_WORDS,
    Served,
    Wire,
    Wires,
)
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.memory import (
    call_post,
    exchange64,
    get,
    load64_acquire,
    put,
    store64_release,
)
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.words import Context

_BUFFER, _START, _STOP = int(Wire.OUT_BUFFER), int(Wire.OUT_START), int(Wire.OUT_STOP)
_BODY_LEFT, _BODY_AT = int(Wire.OUT_BODY_LEFT), int(Wire.OUT_BODY_AT)
_BODY_OF = int(Wire.OUT_BODY_OF)
_SEAL, _SEALED = int(Wire.SEAL), int(Wire.SEALED)
_SEAL_BUFFER, _SEALED_BUFFER = int(Wire.SEAL_BUFFER), int(Wire.SEALED_BUFFER)
_SEALS_PARTS, _SERVED = int(Wire.SEALS_PARTS), int(Wires.SERVED)
_S_ADDRESS, _S_SIZE_BYTES = int(Served.ADDRESS), int(Served.SIZE_BYTES)
_S_DONE_BYTES, _S_IS_SEALED = int(Served.DONE_BYTES), int(Served.IS_SEALED)
_S_END, _ARENA_BASE = int(Served.END), int(Context.ARENA_BASE)
_EAGER_ROOM_BYTES = int(Context.EAGER_ROOM_BYTES)
_MATCHED, _MATCHED_COUNT = layout.MAILBOX_MATCHED, layout.MAILBOX_MATCHED_COUNT
_TAIL = layout.MAILBOX_TAIL
_MSG_DONTWAIT, _MSG_NOSIGNAL, _MSG_MORE = 0x40, 0x4000, 0x8000
_MOST_CALLS = 16
_TO_SAY = 1

_i64, _i32 = types.int64, types.int32
_send = types.ExternalFunction("send", _i64(_i32, _i64, _i64, _i32))


@inline
def served(table, acknowledgement):
    """Return the words about a message whose data is requested, by its acknowledgement."""
    return get(get(table, WIRES), _SERVED) + acknowledgement * (8 * SERVED_WORDS)


@inline
def _has_room(wire, size_bytes):
    return get(wire, _STOP) + HEADER_BYTES + size_bytes <= BUFFER_BYTES


@inline
def _add_frame(wire, kind, length, value):
    """Append a frame's header to what is to be sent; return the place for its bytes."""
    stop = get(wire, _STOP)
    put(wire, _STOP, stop + HEADER_BYTES + length)
    return put_header(get(wire, _BUFFER) + stop, kind, length, value)


# --- answers --------------------------------------------------------------------------------------


@inline
def _add_taken(table, wire):
    """Report matched messages whose senders wait for that."""
    context, place = get(table, CONTEXT), 0
    while place < get(wire, N_TAKEN) and _has_room(wire, 0):
        acknowledgement = get(wire, TAKEN + place)
        word = acknowledgement_word(context, get(wire, END), acknowledgement)
        if load64_acquire(word) == 0:
            place += 1
            continue
        _add_frame(wire, F_TAKEN, 0, acknowledgement)
        last = get(wire, N_TAKEN) - 1
        put(wire, TAKEN + place, get(wire, TAKEN + last))
        put(wire, N_TAKEN, last)


@inline
def _add_asks(wire):
    while get(wire, ASK_FIRST) < get(wire, ASK_LAST) and _has_room(wire, 0):
        _add_frame(wire, F_ASK, 0, first_of(wire, ASKS, ASK_FIRST))
        put(wire, ASK_FIRST, get(wire, ASK_FIRST) + 1)


@inline
def _add_credit(table, wire, is_last):
    """Report how much was matched, and how much may be sent, if that is worth a frame."""
    context, words = get(table, CONTEXT), seen_mailbox(wire)
    area = get(words, OUT_AREA)
    if area == 0 or not _has_room(wire, 16):
        return
    used = get(words, OUT_WRITTEN) - load64_acquire(area + _TAIL)
    room = ring_room(context)
    granted = max(get(wire, CAME_BYTES) + room - used, get(wire, TOLD_GRANTED))
    matched = load64_acquire(area + _MATCHED)
    is_due = granted - get(wire, TOLD_GRANTED) >= room // 4
    if matched - get(wire, TOLD_MATCHED) >= get(context, _EAGER_ROOM_BYTES) // 8 + 1:
        is_due = True
    if not is_due and not is_last:
        return
    body = _add_frame(wire, F_CREDIT, 16, granted)
    put(body, 0, matched)
    put(body, 1, load64_acquire(area + _MATCHED_COUNT))
    put(wire, TOLD_GRANTED, granted)
    put(wire, TOLD_MATCHED, matched)


# --- records --------------------------------------------------------------------------------------


@inline
def _next_record(table, wire):
    """Return the next record of the mailbox to the other end, and its size; 0: there is none."""
    context, words, end = get(table, CONTEXT), seen_mailbox(wire), get(wire, END)
    if get(words, IN_AREA) == 0:
        if load64_acquire(opened_word(context, end, own_rank(table))) == 0:
            return 0, 0
        put(words, IN_AREA, area_of(context, end, own_rank(table)))
    record = written_record(table, words, own_rank(table))
    if record == 0:
        return 0, 0
    if way_of(record) == PART:
        return record, record_bytes(0, get(record, E_SIZE_BYTES))
    return record, message_record_bytes(record)


@inline
def _is_sealed(wire, record):
    """Return whether a record must be sealed; note whether its message's later ones must be."""
    if way_of(record) == PART:
        return get(wire, _SEALS_PARTS) != 0
    dtype, mode = get(record, E_DTYPE), mode_of(record)
    put(wire, _SEALS_PARTS, 1 if seals_data(dtype, mode) else 0)
    return must_seal(dtype, mode, description_bytes_of(record))


@inline
def _write_record(table, wire, record, size_bytes, to):
    """Write a record in the form for the other end; keep the place of data that it will request."""
    move_bytes(to, record, size_bytes)
    way = way_of(record)
    if way == POSTED or way == PART:
        return
    acknowledgement, place = acknowledgement_of(record), get(record, E_PLACE)
    if way == IN_ARENA:
        place += get(get(table, CONTEXT), _ARENA_BASE)
    put(to, E_PACKED, (get(record, E_PACKED) & -256) | ON_ANOTHER_HOST)
    put(to, E_PLACE, 0)
    kept = served(table, acknowledgement)
    put(kept, _S_ADDRESS, place)
    put(kept, _S_SIZE_BYTES, get(record, E_SIZE_BYTES))
    put(kept, _S_DONE_BYTES, NOT_ASKED)
    put(kept, _S_IS_SEALED, 1 if seals_data(get(record, E_DTYPE), mode_of(record)) else 0)
    put(kept, _S_END, get(wire, END))


@inline
def _add_records(table, wire):
    """Add as many records of the mailbox as there is room for; return whether some are left."""
    context = get(table, CONTEXT)
    while True:
        record, size_bytes = _next_record(table, wire)
        if record == 0:
            return False
        sent = get(wire, SENT_BYTES) + size_bytes
        if sent > get(wire, GRANTED_BYTES) or get(wire, _SEAL) != 0:
            return True
        if _is_sealed(wire, record):
            to = put_header(get(wire, _SEAL_BUFFER), F_RECORD, size_bytes, 0)
            _write_record(table, wire, record, size_bytes, to)
            store64_release(wire + 8 * _SEAL, HEADER_BYTES + size_bytes)
            wake_python(table)
        else:
            if not _has_room(wire, size_bytes):
                return True
            to = _add_frame(wire, F_RECORD, size_bytes, 0)
            _write_record(table, wire, record, size_bytes, to)
        put(wire, SENT_BYTES, sent)
        give_back(context, seen_mailbox(wire), own_rank(table), size_bytes)


# --- requested data -------------------------------------------------------------------------------


@inline
def _end_serving(table, wire, acknowledgement):
    """Note that all of a message is on its way: its memory may be reused."""
    put(wire, SERVE_FIRST, get(wire, SERVE_FIRST) + 1)
    put(served(table, acknowledgement), _S_ADDRESS, 0)
    exchange64(acknowledgement_word(get(table, CONTEXT), own_rank(table), acknowledgement), 1)


@inline
def _serve(table, wire):
    """Begin to send a piece of the data that was requested first."""
    if get(wire, SERVE_FIRST) == get(wire, SERVE_LAST) or not _has_room(wire, 0):
        return
    acknowledgement = first_of(wire, SERVES, SERVE_FIRST)
    kept = served(table, acknowledgement)
    done, size_bytes = get(kept, _S_DONE_BYTES), get(kept, _S_SIZE_BYTES)
    if get(kept, _S_IS_SEALED) != 0:
        if get(wire, _SEAL) != 0:
            return
        step = min(SEALED_PIECE_BYTES, size_bytes - done)
        to = put_header(get(wire, _SEAL_BUFFER), F_DATA, step, acknowledgement)
        move_bytes(to, get(kept, _S_ADDRESS) + done, step)
        store64_release(wire + 8 * _SEAL, HEADER_BYTES + step)
        wake_python(table)
        put(kept, _S_DONE_BYTES, done + step)
        if done + step == size_bytes:
            _end_serving(table, wire, acknowledgement)
        return
    step = min(PIECE_BYTES, size_bytes - done)
    put_header(get(wire, _BUFFER) + get(wire, _STOP), F_DATA, step, acknowledgement)
    put(wire, _STOP, get(wire, _STOP) + HEADER_BYTES)
    put(wire, _BODY_AT, get(kept, _S_ADDRESS) + done)
    put(wire, _BODY_LEFT, step)
    put(wire, _BODY_OF, acknowledgement)


@inline
def _end_body(table, wire):
    """Note that a frame's bytes, which were sent directly from their memory, are on their way."""
    acknowledgement = get(wire, _BODY_OF)
    if acknowledgement == 0:
        put(wire, _SEAL, 0)
        store64_release(wire + 8 * _SEALED, 0)
        return
    kept = served(table, acknowledgement)
    # The body covers everything requested since the last piece: both end at the same place.
    done = get(wire, _BODY_AT) - get(kept, _S_ADDRESS)
    put(kept, _S_DONE_BYTES, done)
    if done == get(kept, _S_SIZE_BYTES):
        _end_serving(table, wire, acknowledgement)


# --- everything -----------------------------------------------------------------------------------


@inline
def _add_sealed(wire):
    """Send what Python has sealed; return whether there was any."""
    sealed = load64_acquire(wire + 8 * _SEALED)
    if sealed == 0 or not _has_room(wire, 0):
        return False
    put_header(get(wire, _BUFFER) + get(wire, _STOP), F_SEALED, sealed, 0)
    put(wire, _STOP, get(wire, _STOP) + HEADER_BYTES)
    put(wire, _BODY_AT, get(wire, _SEALED_BUFFER))
    put(wire, _BODY_LEFT, sealed)
    put(wire, _BODY_OF, 0)
    return True


@inline
def _add_bye(table, wire):
    """Tell the other end that nothing follows."""
    _add_credit(table, wire, True)
    _add_frame(wire, F_BYE, 0, 0)
    put(wire, SAYS_BYE, SAID_BYE)


@inline
def _fill(table, wire):
    """Assemble what is to be sent next."""
    if get(wire, CARRIER) != 0 and get(wire, HAS_BYE) != 0:
        if get(wire, SAYS_BYE) != SAID_BYE:  # a rank that closes waits for it, or a socket's end
            _add_bye(table, wire)
        return
    _add_taken(table, wire)
    _add_asks(wire)
    _add_credit(table, wire, False)
    if _add_sealed(wire):
        return
    are_left = _add_records(table, wire)
    _serve(table, wire)
    if get(wire, SAYS_BYE) == _TO_SAY and not are_left and _has_room(wire, 2 * HEADER_BYTES):
        is_done = get(wire, SERVE_FIRST) == get(wire, SERVE_LAST) and get(wire, _SEAL) == 0
        if is_done and get(wire, _BODY_LEFT) == 0:
            _add_bye(table, wire)


@inline
def _send_some(table, wire, address, most_bytes, flags):
    """Send; return the bytes, 0 if nothing can be sent now, or less if nothing ever will be."""
    if get(wire, CARRIER) != 0:
        carry = get(get(table, WIRES), CARRY_AWAY)
        return call_post(carry, get(wire, CARRIER), address, most_bytes)
    gone = _send(np.int32(get(wire, FD)), address, most_bytes, np.int32(flags))
    return gone if gone > 0 or failed_call() != 0 else 0


@inline
def send_on(table, wire):
    """Send as much as there is and the connection accepts; return whether anything was sent."""
    if get(wire, STATE) != OPEN or get(wire, MAY_SEND) == 0:
        return 0
    moved = 0
    for _ in range(_MOST_CALLS):
        start = get(wire, _START)
        if start == get(wire, _STOP):
            start = 0
            put(wire, _START, 0)
            put(wire, _STOP, 0)
            if get(wire, _BODY_LEFT) == 0:
                _fill(table, wire)
        left, body_left = get(wire, _STOP) - start, get(wire, _BODY_LEFT)
        if left == 0 and body_left == 0:
            put(wire, IS_BLOCKED, 0)
            return moved
        flags, address, is_body = _MSG_DONTWAIT | _MSG_NOSIGNAL, get(wire, _BODY_AT), left == 0
        if is_body:
            left = body_left
        else:
            address = get(wire, _BUFFER) + start
            flags |= _MSG_MORE if body_left > 0 else 0
        gone = _send_some(table, wire, address, left, flags)
        if gone <= 0:
            put(wire, IS_BLOCKED, 1)
            if gone < 0:  # what the other end sent before it left may still arrive
                put(wire, MAY_SEND, 0)
                put(wire, IS_BLOCKED, 0)
            return moved
        moved = 1
        if not is_body:
            put(wire, _START, start + gone)
            continue
        put(wire, _BODY_AT, address + gone)
        put(wire, _BODY_LEFT, body_left - gone)
        if body_left == gone:
            _end_body(table, wire)
    put(wire, IS_BLOCKED, 1)  # there may be more
    return moved
