"""Words of the connections that carry messages between hosts, and the frames that they carry.

A wire is one connection: a block of int64 in this process's memory, which compiled code uses
(`loop`) under the lock of the table of messages. A connection carries frames: two words, {kind,
length << 8} and a value, followed by as many bytes as the length states.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from gpucoll.blocks import Block, Field, Words, words
from gpucoll.codes import Codes
from gpucoll.kernels.cpu.jit import inline
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.libc import EAGAIN, EINTR, errno, write
from gpucoll.transport.shared.words import Context, Mailbox, Mode, TransferTable
from gpucoll.types import dtype_code


class Frame(Codes):
    """The kinds of frames, with the meaning of their values."""

    HELLO = 1  # the first frame, from the rank that connected: the other one may send
    RECORD = 2  # a record of a mailbox, unchanged
    ASK = 3  # requests a message's data, by its acknowledgement
    DATA = 4  # a piece of such a message, in order
    TAKEN = 5  # a message was matched, by its acknowledgement
    CREDIT = 6  # how much was matched, and how many; the value: how much may be sent in all
    BYE = 7  # nothing follows
    SEALED = 8  # a record or data, sealed as one frame of this kind


HEADER_BYTES: Final = 16
BUFFER_BYTES: Final = 64 << 10
"""Size of a buffer for small frames that are sent, or received."""
PIECE_BYTES: Final = 1 << 20
"""The longest frame of data, so that other frames can go in between."""
SEALED_PIECE_BYTES: Final = 256 << 10
SEAL_BYTES: Final = SEALED_PIECE_BYTES + 4096
"""Room for a frame, sealed or not."""
SLACK_BYTES: Final = 128 << 10
"""How much of the large ring may be lost to its ends, and to records that are no messages."""
ACKNOWLEDGED: Final = layout.ACKNOWLEDGEMENTS + 1


class WireState(Codes):
    """The state of a connection."""

    OPEN = 0
    FAILED = 1  # it ended without a BYE, or received something that is no frame of ours
    ENDED = 2  # both ends have sent BYE


NO_FRAME: Final = -1
"""In place of an error's number: the connection received something that no rank sends."""
CARRIER_FAILED: Final = -2
"""In place of an error's number: the carrier has the reason."""


class Wire(Block):
    """One connection."""

    fd: int
    end: int  # the rank at the other end, by the table's number
    state: int
    errno: int  # why it failed; 0: the other end closed it; or one of the two above
    may_send: int
    is_blocked: int  # the connection accepts no more bytes for now
    # Incoming bytes.
    in_buffer: int
    in_start: int
    in_stop: int
    body_left: int  # bytes left of a frame that goes directly to its place
    body_at: int
    body_of: int  # the acknowledgement of the message; 0: a sealed frame
    # Outgoing bytes.
    out_buffer: int
    out_start: int
    out_stop: int
    out_body_left: int
    out_body_at: int
    out_body_of: int
    # Queues of acknowledgements, each in a ring with one word for each of them.
    ask_first: int
    ask_last: int
    serve_first: int
    serve_last: int
    n_taken: int  # messages of the other end that must be reported when they are matched
    # Room, and matched bytes.
    sent_bytes: int  # of records
    granted_bytes: int
    came_bytes: int
    told_granted: int
    came_cost: int
    told_matched: int
    # Between compiled code, which writes the first of each pair, and Python, which writes the
    # other.
    seal: int  # bytes of a frame to be sealed
    sealed: int  # bytes of it, sealed
    seal_buffer: Field[Words]
    sealed_buffer: int
    open: int  # bytes of a sealed frame that arrived
    opened: int  # bytes of its content
    open_buffer: int
    opened_buffer: Field[Words]
    carrier: int  # address of the carrier that replaces the socket; 0: the socket carries bytes
    # The end.
    says_bye: int  # 1: to be sent; SAID_BYE: sent
    has_bye: int
    # Whether parts of messages are sealed now.
    seals_parts: int
    opens_parts: int
    needs_room: int  # received data waits for memory
    parts_left: int  # bytes in further records of the message being received
    open_bytes: int  # bytes of the sealed frame being received
    carrier_is_empty: int  # whether the carrier had brought nothing at the last call
    # The rings of this pair as the other end sees them, by `words.Mailbox`.
    mailbox: Field[Mailbox] = words(Mailbox.n_words, index=48)
    fetches: Field[Words] = words(ACKNOWLEDGED)  # by acknowledgement: the row that gets its data
    asks: Field[Words] = words(layout.ACKNOWLEDGEMENTS)
    serves: Field[Words] = words(layout.ACKNOWLEDGEMENTS)
    taken: Field[Words] = words(layout.ACKNOWLEDGEMENTS)


SAID_BYE: Final = 2


class Served(Block):
    """A message of this rank whose data another host requests."""

    memory: int
    size_bytes: int
    done_bytes: int  # NOT_ASKED before the first request
    is_sealed: int
    end: int  # the rank to which it goes


NOT_ASKED: Final = -1


class Announced(Codes):
    """In `Wire.fetches`, before a receive has requested a message: how its data must be sent.

    Afterwards the word is the address of the row, plus 1 if the data must be sealed.
    """

    PLAIN = 2
    SEALED = 3


class Wires(Block):
    """What all connections of a table of messages share."""

    count: int
    event_fd: int  # wakes the thread
    is_looking: int  # whether the thread wakes when data arrives
    needs_python: int  # whether Python has something to do
    one: int  # the value that is written to the eventfd
    host_step: int  # address of `message_step.message_step`
    host_post: int  # address of `message_step.message_post`
    n_steps: int  # counts the steps
    served: Field[Served]  # one for each acknowledgement
    poll_fds: int  # address of a ``struct pollfd`` for each connection
    carry_away: int  # address of ``(carrier, address, most bytes)`` -> bytes sent; -1: failed
    carry_here: int  # address of such a function that receives; 0: nothing arrived
    connections: Field[Words] = words(1, index=16)
    """Addresses of the connections."""


# --- in compiled code -----------------------------------------------------------------------------


_ACKNOWLEDGEMENTS = layout.ACKNOWLEDGEMENTS
_OBJECT = int(dtype_code("object"))


@inline
def ring_room(context: Context) -> int:
    """Return how many bytes of records the other end may send before any is taken."""
    return context.large_ring_bytes - SLACK_BYTES


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
    write(np.int32(wires.event_fd), wires.at.one, 8)


@inline
def fail(table: TransferTable, wire: Wire, number: int) -> None:
    """Note that a connection cannot be used any more."""
    wire.errno = number
    wire.state = WireState.FAILED
    wake_python(table)


@inline
def failed_call() -> int:
    """Return why a system call has failed; 0: there was nothing to do now."""
    number = errno()
    return 0 if number == EAGAIN or number == EINTR else number


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
