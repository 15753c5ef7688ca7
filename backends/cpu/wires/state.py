"""Fields and system calls that the parts of the loop over message connections share."""

from __future__ import annotations

import numpy as np

from gpucoll.backends.cpu.wires.words import HEADER_BYTES, SLACK_BYTES, Wire, Wires, WireState
from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.memory import load32, signed32
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.words import Context, Mode, TransferTable
from gpucoll.types import dtype_code

_ACKNOWLEDGEMENTS = layout.ACKNOWLEDGEMENTS
_OBJECT = int(dtype_code("object"))
_EINTR, _EAGAIN = 4, 11

_i64, _i32 = types.int64, types.int32
_errno_location = types.ExternalFunction("__errno_location", _i64())
_write = types.ExternalFunction("write", _i64(_i32, _i64, _i64))
move_bytes = types.ExternalFunction("memmove", _i64(_i64, _i64, _i64))


@inline
def ring_room(context: Context) -> int:
    """Return how many bytes of records the other end may send before any is taken."""
    return context.large_ring_bytes - SLACK_BYTES


@inline
def area_of(context: Context, receiver: int, sender: int) -> int:
    """Return the address of a mailbox."""
    place = receiver * context.world_size + sender
    return context.mailboxes + place * context.mailbox_stride


@inline
def opened_word(context: Context, receiver: int, sender: int) -> int:
    """Return the address of the word that shows whether a mailbox is used."""
    return context.opened + 8 * (receiver * context.world_size + sender)


@inline
def must_seal(dtype: int, mode: int, description_bytes: int) -> bool:
    """Return whether a message's first record must be sealed: Python may unpickle its content."""
    return dtype == _OBJECT or mode & Mode.FOLLOWS != 0 or description_bytes > 0


@inline
def seals_data(dtype: int, mode: int) -> bool:
    """Return whether all of a message's data must be sealed: it is part of an object."""
    return dtype == _OBJECT or mode & Mode.FOLLOWS != 0


@inline
def put_at(queue: Words, number: int, acknowledgement: int) -> None:
    """Put an acknowledgement into a queue, which has room: each is in it at most once."""
    queue[number % _ACKNOWLEDGEMENTS] = acknowledgement


@inline
def item_of(queue: Words, number: int) -> int:
    """Return an item of a queue."""
    return queue[number % _ACKNOWLEDGEMENTS]


@inline
def wire_to(table: TransferTable, end: int) -> Wire:
    """Return the connection to a rank, or 0."""
    wires, found = Wires(table.wires), Wire(0)
    for place in range(wires.count):
        wire = Wire(wires.connections[place])
        if wire.end == end:
            found = wire
    return found


@inline
def wake_python(table: TransferTable) -> None:
    """Wake the thread for work that only Python can do."""
    wires = Wires(table.wires)
    wires.needs_python = 1
    wake_thread(wires)


@inline
def wake_thread(wires: Wires) -> None:
    """Wake the thread of the connections."""
    _write(np.int32(wires.event_fd), wires.at.one, 8)


@inline
def fail(table: TransferTable, wire: Wire, number: int) -> None:
    """Note that a connection cannot be used any more."""
    wire.errno = number
    wire.state = WireState.FAILED
    wake_python(table)


@inline
def failed_call() -> int:
    """Return why a system call has failed; 0: there was nothing to do now."""
    number = signed32(load32(_errno_location()))
    return 0 if number == _EAGAIN or number == _EINTR else number


@inline
def put_header(address: Words, kind: int, length: int, value: int) -> Words:
    """Write the header of a frame; return the place for its bytes."""
    address[0] = kind | (length << 8)
    address[1] = value
    return Words(address.address + HEADER_BYTES)


@inline
def own_rank(table: TransferTable) -> int:
    """Return this rank's number in the table."""
    return table.context.rank
