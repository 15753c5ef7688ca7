"""Words of the connections that carry messages between hosts, and the frames that they carry.

A wire is one connection: a block of int64 in this process's memory, which compiled code uses
(`loop`) under the lock of the table of messages. A connection carries frames: two words, {kind,
length << 8} and a value, followed by as many bytes as the length states.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from gpucoll.transport.shared import layout
from gpucoll.transport.shared.words import MAILBOX_WORDS


class Frame(IntEnum):
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


class WireState(IntEnum):
    """The state of a connection."""

    OPEN = 0
    FAILED = 1  # it ended without a BYE, or received something that is no frame of ours
    ENDED = 2  # both ends have sent BYE


NO_FRAME: Final = -1
"""In place of an error's number: the connection received something that no rank sends."""
CARRIER_FAILED: Final = -2
"""In place of an error's number: the carrier has the reason."""


class Wire(IntEnum):
    """Fields of a connection."""

    FD = 0
    END = 1  # the rank at the other end, by the table's number
    STATE = 2
    ERRNO = 3  # why it failed; 0: the other end closed it; or one of the two above
    MAY_SEND = 4
    IS_BLOCKED = 5  # the connection accepts no more bytes for now
    # Incoming bytes.
    IN_BUFFER = 6
    IN_START = 7
    IN_STOP = 8
    BODY_LEFT = 9  # bytes left of a frame that goes directly to its place
    BODY_AT = 10
    BODY_OF = 11  # the acknowledgement of the message; 0: a sealed frame
    # Outgoing bytes.
    OUT_BUFFER = 12
    OUT_START = 13
    OUT_STOP = 14
    OUT_BODY_LEFT = 15
    OUT_BODY_AT = 16
    OUT_BODY_OF = 17
    # Queues of acknowledgements, each in a ring with one word for each of them.
    ASK_FIRST = 18
    ASK_LAST = 19
    SERVE_FIRST = 20
    SERVE_LAST = 21
    N_TAKEN = 22  # messages of the other end that must be reported when they are matched
    # Room, and matched bytes.
    SENT_BYTES = 23  # of records
    GRANTED_BYTES = 24
    CAME_BYTES = 25
    TOLD_GRANTED = 26
    CAME_COST = 27
    TOLD_MATCHED = 28
    # Between compiled code, which writes the first of each pair, and Python, which writes the
    # other.
    SEAL = 29  # bytes of a frame to be sealed
    SEALED = 30  # bytes of it, sealed
    SEAL_BUFFER = 31
    SEALED_BUFFER = 32
    OPEN = 33  # bytes of a sealed frame that arrived
    OPENED = 34  # bytes of its content
    OPEN_BUFFER = 35
    OPENED_BUFFER = 36
    CARRIER = 37  # address of the carrier that replaces the socket; 0: the socket carries bytes
    # The end.
    SAYS_BYE = 38  # 1: to be sent; SAID_BYE: sent
    HAS_BYE = 39
    # Whether parts of messages are sealed now.
    SEALS_PARTS = 40
    OPENS_PARTS = 41
    NEEDS_ROOM = 42  # received data waits for memory
    PARTS_LEFT = 43  # bytes in further records of the message being received
    OPEN_BYTES = 44  # bytes of the sealed frame being received
    CARRIER_IS_EMPTY = 45  # whether the carrier had brought nothing at the last call
    # The rings of this pair as the other end sees them, by `words.Mailbox`.
    MAILBOX = 48
    FETCHES = MAILBOX + MAILBOX_WORDS  # by acknowledgement: the row that gets its data
    ASKS = FETCHES + ACKNOWLEDGED
    SERVES = ASKS + layout.ACKNOWLEDGEMENTS
    TAKEN = SERVES + layout.ACKNOWLEDGEMENTS


WIRE_WORDS: Final = Wire.TAKEN + layout.ACKNOWLEDGEMENTS
SAID_BYE: Final = 2


class Served(IntEnum):
    """Fields of a message of this rank whose data another host requests."""

    ADDRESS = 0
    SIZE_BYTES = 1
    DONE_BYTES = 2  # NOT_ASKED before the first request
    IS_SEALED = 3
    END = 4  # the rank to which it goes


SERVED_WORDS: Final = 5
NOT_ASKED: Final = -1


class Announced(IntEnum):
    """In `Wire.FETCHES`, before a receive has requested a message: how its data must be sent.

    Afterwards the word is the address of the row, plus 1 if the data must be sealed.
    """

    PLAIN = 2
    SEALED = 3


class Wires(IntEnum):
    """Fields that all connections of a table of messages share."""

    COUNT = 0
    EVENT_FD = 1  # wakes the thread
    IS_LOOKING = 2  # whether the thread wakes when data arrives
    NEEDS_PYTHON = 3  # whether Python has something to do
    ONE = 4  # the value that is written to the eventfd
    HOST_STEP = 5  # address of `message_step.message_step`
    HOST_POST = 6  # address of `message_step.message_post`
    N_STEPS = 7  # counts the steps
    SERVED = 8  # address of a `Served` for each acknowledgement
    POLL_FDS = 9  # address of a ``struct pollfd`` for each connection
    CARRY_AWAY = 10  # address of ``(carrier, address, most bytes)`` -> bytes sent; -1: failed
    CARRY_HERE = 11  # address of such a function that receives; 0: nothing arrived
    FIRST = 16
    """Addresses of the connections."""
