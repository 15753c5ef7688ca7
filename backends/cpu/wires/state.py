"""Fields and system calls that the parts of the loop over message connections share."""

from __future__ import annotations

import numpy as np

from gpucoll.backends.cpu.host.transfers import CONTEXT, WIRES
from gpucoll.backends.cpu.wires.words import (
    HEADER_BYTES,
    SLACK_BYTES,
    Frame,
    Wire,
    Wires,
    WireState,
)
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.memory import get, load32, put, signed32
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.steps import RANK, WORLD_SIZE
from gpucoll.transport.shared.words import Context, Mode
from gpucoll.types import dtype_code

FD, END, STATE, ERRNO = int(Wire.FD), int(Wire.END), int(Wire.STATE), int(Wire.ERRNO)
MAY_SEND, IS_BLOCKED = int(Wire.MAY_SEND), int(Wire.IS_BLOCKED)
ASK_FIRST, ASK_LAST = int(Wire.ASK_FIRST), int(Wire.ASK_LAST)
SERVE_FIRST, SERVE_LAST = int(Wire.SERVE_FIRST), int(Wire.SERVE_LAST)
N_TAKEN, TAKEN = int(Wire.N_TAKEN), int(Wire.TAKEN)
SENT_BYTES, GRANTED_BYTES = int(Wire.SENT_BYTES), int(Wire.GRANTED_BYTES)
CAME_BYTES, TOLD_GRANTED = int(Wire.CAME_BYTES), int(Wire.TOLD_GRANTED)
CAME_COST, TOLD_MATCHED = int(Wire.CAME_COST), int(Wire.TOLD_MATCHED)
HAS_BYE, SAYS_BYE = int(Wire.HAS_BYE), int(Wire.SAYS_BYE)
CARRIER = int(Wire.CARRIER)
CARRY_AWAY, CARRY_HERE = int(Wires.CARRY_AWAY), int(Wires.CARRY_HERE)
FETCHES, ASKS, SERVES = int(Wire.FETCHES), int(Wire.ASKS), int(Wire.SERVES)
OPEN, FAILED, ENDED = int(WireState.OPEN), int(WireState.FAILED), int(WireState.ENDED)
F_HELLO, F_RECORD, F_ASK = int(Frame.HELLO), int(Frame.RECORD), int(Frame.ASK)
F_DATA, F_TAKEN, F_CREDIT = int(Frame.DATA), int(Frame.TAKEN), int(Frame.CREDIT)
F_BYE, F_SEALED = int(Frame.BYE), int(Frame.SEALED)

_MAILBOX, _LARGE_RING_BYTES = int(Wire.MAILBOX), int(Context.LARGE_RING_BYTES)
_MAILBOXES, _MAILBOX_STRIDE = int(Context.MAILBOXES), int(Context.MAILBOX_STRIDE)
_OPENED = int(Context.OPENED)
_COUNT, _FIRST = int(Wires.COUNT), int(Wires.FIRST)
_EVENT_FD, _ONE = int(Wires.EVENT_FD), int(Wires.ONE)
_NEEDS_PYTHON = int(Wires.NEEDS_PYTHON)
_ACKNOWLEDGEMENTS = layout.ACKNOWLEDGEMENTS
_OBJECT, _FOLLOWS = int(dtype_code("object")), int(Mode.FOLLOWS)
_EINTR, _EAGAIN = 4, 11

_i64, _i32 = types.int64, types.int32
_errno_location = types.ExternalFunction("__errno_location", _i64())
_write = types.ExternalFunction("write", _i64(_i32, _i64, _i64))
move_bytes = types.ExternalFunction("memmove", _i64(_i64, _i64, _i64))


@inline
def seen_mailbox(wire):
    """Return the address of the other end's words about the two mailboxes of a pair."""
    return wire + 8 * _MAILBOX


@inline
def ring_room(context):
    """Return how many bytes of records the other end may send before any is taken."""
    return get(context, _LARGE_RING_BYTES) - SLACK_BYTES


@inline
def area_of(context, receiver, sender):
    """Return the address of a mailbox."""
    place = receiver * get(context, WORLD_SIZE) + sender
    return get(context, _MAILBOXES) + place * get(context, _MAILBOX_STRIDE)


@inline
def opened_word(context, receiver, sender):
    """Return the address of the word that shows whether a mailbox is used."""
    return get(context, _OPENED) + 8 * (receiver * get(context, WORLD_SIZE) + sender)


@inline
def must_seal(dtype, mode, description_bytes):
    """Return whether a message's first record must be sealed: Python may unpickle its content."""
    return dtype == _OBJECT or mode & _FOLLOWS != 0 or description_bytes > 0


@inline
def seals_data(dtype, mode):
    """Return whether all of a message's data must be sealed: it is part of an object."""
    return dtype == _OBJECT or mode & _FOLLOWS != 0


@inline
def push(wire, queue, last, acknowledgement):
    """Append an acknowledgement to a queue, which has room: each is in it at most once."""
    count = get(wire, last)
    put(wire, queue + count % _ACKNOWLEDGEMENTS, acknowledgement)
    put(wire, last, count + 1)


@inline
def first_of(wire, queue, first):
    """Return the first element of a queue."""
    return get(wire, queue + get(wire, first) % _ACKNOWLEDGEMENTS)


@inline
def wire_to(table, end):
    """Return the connection to a rank, or 0."""
    wires, found = get(table, WIRES), 0
    for place in range(get(wires, _COUNT)):
        wire = get(wires, _FIRST + place)
        if get(wire, END) == end:
            found = wire
    return found


@inline
def wake_python(table):
    """Wake the thread for work that only Python can do."""
    wires = get(table, WIRES)
    put(wires, _NEEDS_PYTHON, 1)
    wake_thread(wires)


@inline
def wake_thread(wires):
    """Wake the thread of the connections."""
    _write(np.int32(get(wires, _EVENT_FD)), wires + 8 * _ONE, 8)


@inline
def fail(table, wire, number):
    """Note that a connection cannot be used any more."""
    put(wire, ERRNO, number)
    put(wire, STATE, FAILED)
    wake_python(table)


@inline
def failed_call():
    """Return why a system call has failed; 0: there was nothing to do now."""
    number = signed32(load32(_errno_location()))
    return 0 if number == _EAGAIN or number == _EINTR else number


@inline
def put_header(address, kind, length, value):
    """Write the header of a frame; return the place for its bytes."""
    put(address, 0, kind | (length << 8))
    put(address, 1, value)
    return address + HEADER_BYTES


@inline
def own_rank(table):
    """Return this rank's number in the table."""
    return get(get(table, CONTEXT), RANK)
