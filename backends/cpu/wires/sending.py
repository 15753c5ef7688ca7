"""Sending over message connections: records from mailboxes, requested data, and answers.

To the table of messages this code is the receiver of another host: it takes records from the
mailbox and returns their places. A record that gives the address of its data is sent without the
data, which follows directly from there when the receiver requests it.
"""

from __future__ import annotations

import numpy as np

from gpucoll.backends.cpu.host.mailboxes import (
    acknowledgement_of,
    area_of,
    description_bytes_of,
    give_back,
    mode_of,
    opened_word,
    record_bytes,
    way_of,
    written_record,
)
from gpucoll.backends.cpu.host.receiving import message_record_bytes
from gpucoll.backends.cpu.host.sending import acknowledgement_word
from gpucoll.backends.cpu.wires.words import (
    BUFFER_BYTES,
    HEADER_BYTES,
    NOT_ASKED,
    PIECE_BYTES,
    SAID_BYE,
    SEALED_PIECE_BYTES,
    Frame,
    Served,
    Wire,
    Wires,
    WireState,
    failed_call,
    item_of,
    must_seal,
    own_rank,
    put_header,
    ring_room,
    seals_data,
    wake_python,
)
from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_post, exchange64, load64_acquire, store64_release
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.layout import Envelope, Way
from gpucoll.transport.shared.libc import MSG_DONTWAIT, MSG_MORE, MSG_NOSIGNAL, memmove, send
from gpucoll.transport.shared.words import TransferTable

_MATCHED, _MATCHED_COUNT = layout.MAILBOX_MATCHED, layout.MAILBOX_MATCHED_COUNT
_TAIL = layout.MAILBOX_TAIL
_MOST_CALLS = 16
_TO_SAY = 1


@inline
def served(table: TransferTable, acknowledgement: int) -> Served:
    """Return the words about a message whose data is requested, by its acknowledgement."""
    return Wires(table.wires).served[acknowledgement]


@inline
def _has_room(wire: Wire, size_bytes: int) -> bool:
    return wire.out_stop + HEADER_BYTES + size_bytes <= BUFFER_BYTES


@inline
def _add_frame(wire: Wire, kind: int, length: int, value: int) -> Words:
    """Append a frame's header to what is to be sent; return the place for its bytes."""
    stop = wire.out_stop
    wire.out_stop = stop + HEADER_BYTES + length
    return put_header(Words(wire.out_buffer + stop), kind, length, value)


# --- answers --------------------------------------------------------------------------------------


@inline
def _add_taken(table: TransferTable, wire: Wire) -> None:
    """Report matched messages whose senders wait for that."""
    context, place = table.context, 0
    while place < wire.n_taken and _has_room(wire, 0):
        acknowledgement = wire.taken[place]
        word = acknowledgement_word(context, wire.end, acknowledgement)
        if load64_acquire(word) == 0:
            place += 1
            continue
        _add_frame(wire, Frame.TAKEN, 0, acknowledgement)
        last = wire.n_taken - 1
        wire.taken[place] = wire.taken[last]
        wire.n_taken = last


@inline
def _add_asks(wire: Wire) -> None:
    while wire.ask_first < wire.ask_last and _has_room(wire, 0):
        _add_frame(wire, Frame.ASK, 0, item_of(wire.asks, wire.ask_first))
        wire.ask_first += 1


@inline
def _add_credit(table: TransferTable, wire: Wire, is_last: int) -> None:
    """Report how much was matched, and how much may be sent, if that is worth a frame."""
    context, words = table.context, wire.mailbox
    area = words.out_area
    if area == 0 or not _has_room(wire, 16):
        return
    used = words.out_written - load64_acquire(area + _TAIL)
    room = ring_room(context)
    granted = max(wire.came_bytes + room - used, wire.told_granted)
    matched = load64_acquire(area + _MATCHED)
    is_due = granted - wire.told_granted >= room // 4
    if matched - wire.told_matched >= context.eager_room_bytes // 8 + 1:
        is_due = True
    if not is_due and not is_last:
        return
    body = _add_frame(wire, Frame.CREDIT, 16, granted)
    body[0] = matched
    body[1] = load64_acquire(area + _MATCHED_COUNT)
    wire.told_granted = granted
    wire.told_matched = matched


# --- records --------------------------------------------------------------------------------------


@inline
def _next_record(table: TransferTable, wire: Wire) -> tuple[Envelope, int]:
    """Return the next record of the mailbox to the other end, and its size; 0: there is none."""
    context, words, end = table.context, wire.mailbox, wire.end
    if words.in_area == 0:
        if load64_acquire(opened_word(context, end, own_rank(table))) == 0:
            return Envelope(0), 0
        words.in_area = area_of(context, end, own_rank(table))
    record = written_record(table, words, own_rank(table))
    if not record:
        return Envelope(0), 0
    if way_of(record) == Way.PART:
        return record, record_bytes(0, record.size_bytes)
    return record, message_record_bytes(record)


@inline
def _is_sealed(wire: Wire, record: Envelope) -> bool:
    """Return whether a record must be sealed; note whether its message's later ones must be."""
    if way_of(record) == Way.PART:
        return wire.seals_parts != 0
    dtype, mode = record.dtype, mode_of(record)
    wire.seals_parts = 1 if seals_data(dtype, mode) else 0
    return must_seal(dtype, mode, description_bytes_of(record))


@inline
def _write_record(
    table: TransferTable, wire: Wire, record: Envelope, size_bytes: int, to: Envelope
) -> None:
    """Write a record in the form for the other end; keep the place of data that it will request."""
    memmove(to, record, size_bytes)
    way = way_of(record)
    if way == Way.POSTED or way == Way.PART:
        return
    acknowledgement, place = acknowledgement_of(record), record.place
    if way == Way.IN_ARENA:
        place += table.context.arena_base
    to.packed = (record.packed & -256) | Way.ON_ANOTHER_HOST
    to.place = 0
    kept = served(table, acknowledgement)
    kept.memory = place
    kept.size_bytes = record.size_bytes
    kept.done_bytes = NOT_ASKED
    kept.is_sealed = 1 if seals_data(record.dtype, mode_of(record)) else 0
    kept.end = wire.end


@inline
def _add_records(table: TransferTable, wire: Wire) -> bool:
    """Add as many records of the mailbox as there is room for; return whether some are left."""
    context = table.context
    while True:
        record, size_bytes = _next_record(table, wire)
        if not record:
            return False
        sent = wire.sent_bytes + size_bytes
        if sent > wire.granted_bytes or wire.seal != 0:
            return True
        if _is_sealed(wire, record):
            to = put_header(wire.seal_buffer, Frame.RECORD, size_bytes, 0)
            _write_record(table, wire, record, size_bytes, Envelope(to.address))
            store64_release(wire.at.seal, HEADER_BYTES + size_bytes)
            wake_python(table)
        else:
            if not _has_room(wire, size_bytes):
                return True
            to = _add_frame(wire, Frame.RECORD, size_bytes, 0)
            _write_record(table, wire, record, size_bytes, Envelope(to.address))
        wire.sent_bytes = sent
        give_back(context, wire.mailbox, own_rank(table), size_bytes)


# --- requested data -------------------------------------------------------------------------------


@inline
def _end_serving(table: TransferTable, wire: Wire, acknowledgement: int) -> None:
    """Note that all of a message is on its way: its memory may be reused."""
    wire.serve_first += 1
    served(table, acknowledgement).memory = 0
    exchange64(acknowledgement_word(table.context, own_rank(table), acknowledgement), 1)


@inline
def _serve(table: TransferTable, wire: Wire) -> None:
    """Begin to send a piece of the data that was requested first."""
    if wire.serve_first == wire.serve_last or not _has_room(wire, 0):
        return
    acknowledgement = item_of(wire.serves, wire.serve_first)
    kept = served(table, acknowledgement)
    done, size_bytes = kept.done_bytes, kept.size_bytes
    if kept.is_sealed != 0:
        if wire.seal != 0:
            return
        step = min(SEALED_PIECE_BYTES, size_bytes - done)
        to = put_header(wire.seal_buffer, Frame.DATA, step, acknowledgement)
        memmove(to, kept.memory + done, step)
        store64_release(wire.at.seal, HEADER_BYTES + step)
        wake_python(table)
        kept.done_bytes = done + step
        if done + step == size_bytes:
            _end_serving(table, wire, acknowledgement)
        return
    step = min(PIECE_BYTES, size_bytes - done)
    put_header(Words(wire.out_buffer + wire.out_stop), Frame.DATA, step, acknowledgement)
    wire.out_stop += HEADER_BYTES
    wire.out_body_at = kept.memory + done
    wire.out_body_left = step
    wire.out_body_of = acknowledgement


@inline
def _end_body(table: TransferTable, wire: Wire) -> None:
    """Note that a frame's bytes, which were sent directly from their memory, are on their way."""
    acknowledgement = wire.out_body_of
    if acknowledgement == 0:
        wire.seal = 0
        store64_release(wire.at.sealed, 0)
        return
    kept = served(table, acknowledgement)
    # The body covers everything requested since the last piece: both end at the same place.
    done = wire.out_body_at - kept.memory
    kept.done_bytes = done
    if done == kept.size_bytes:
        _end_serving(table, wire, acknowledgement)


# --- everything -----------------------------------------------------------------------------------


@inline
def _add_sealed(wire: Wire) -> bool:
    """Send what Python has sealed; return whether there was any."""
    sealed = load64_acquire(wire.at.sealed)
    if sealed == 0 or not _has_room(wire, 0):
        return False
    put_header(Words(wire.out_buffer + wire.out_stop), Frame.SEALED, sealed, 0)
    wire.out_stop += HEADER_BYTES
    wire.out_body_at = wire.sealed_buffer
    wire.out_body_left = sealed
    wire.out_body_of = 0
    return True


@inline
def _add_bye(table: TransferTable, wire: Wire) -> None:
    """Tell the other end that nothing follows."""
    _add_credit(table, wire, True)
    _add_frame(wire, Frame.BYE, 0, 0)
    wire.says_bye = SAID_BYE


@inline
def _fill(table: TransferTable, wire: Wire) -> None:
    """Assemble what is to be sent next."""
    if wire.carrier != 0 and wire.has_bye != 0:
        if wire.says_bye != SAID_BYE:  # a rank that closes waits for it, or a socket's end
            _add_bye(table, wire)
        return
    _add_taken(table, wire)
    _add_asks(wire)
    _add_credit(table, wire, False)
    if _add_sealed(wire):
        return
    are_left = _add_records(table, wire)
    _serve(table, wire)
    if wire.says_bye == _TO_SAY and not are_left and _has_room(wire, 2 * HEADER_BYTES):
        is_done = wire.serve_first == wire.serve_last and wire.seal == 0
        if is_done and wire.out_body_left == 0:
            _add_bye(table, wire)


@inline
def _send_some(table: TransferTable, wire: Wire, address: int, most_bytes: int, flags: int) -> int:
    """Send; return the bytes, 0 if nothing can be sent now, or less if nothing ever will be."""
    if wire.carrier != 0:
        carry = Wires(table.wires).carry_away
        return call_post(carry, wire.carrier, address, most_bytes)
    gone = send(np.int32(wire.fd), address, most_bytes, np.int32(flags))
    return gone if gone > 0 or failed_call() != 0 else 0


@inline
def send_on(table: TransferTable, wire: Wire) -> int:
    """Send as much as there is and the connection accepts; return whether anything was sent."""
    if wire.state != WireState.OPEN or wire.may_send == 0:
        return 0
    moved = 0
    for _ in range(_MOST_CALLS):
        start = wire.out_start
        if start == wire.out_stop:
            start = 0
            wire.out_start = 0
            wire.out_stop = 0
            if wire.out_body_left == 0:
                _fill(table, wire)
        left, body_left = wire.out_stop - start, wire.out_body_left
        if left == 0 and body_left == 0:
            wire.is_blocked = 0
            return moved
        flags, address, is_body = MSG_DONTWAIT | MSG_NOSIGNAL, wire.out_body_at, left == 0
        if is_body:
            left = body_left
        else:
            address = wire.out_buffer + start
            flags |= MSG_MORE if body_left > 0 else 0
        gone = _send_some(table, wire, address, left, flags)
        if gone <= 0:
            wire.is_blocked = 1
            if gone < 0:  # what the other end sent before it left may still arrive
                wire.may_send = 0
                wire.is_blocked = 0
            return moved
        moved = 1
        if not is_body:
            wire.out_start = start + gone
            continue
        wire.out_body_at = address + gone
        wire.out_body_left = body_left - gone
        if body_left == gone:
            _end_body(table, wire)
    wire.is_blocked = 1  # there may be more
    return moved
