"""Words of the connections that carry messages between hosts, and the frames that go over them.

A wire is one connection: a block of int64 in this process's memory, which compiled code works on
(`loop`) under the lock of the table of messages. What goes over it are frames: two words, {kind,
length << 8} and a value, then as many bytes as the length says.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from gpucoll.transport.shared import layout
from gpucoll.transport.shared.words import MAILBOX_WORDS


class Frame(IntEnum):
    """What a frame is, and its value."""

    HELLO = 1  # the first one, of the rank that has connected: the other one may send
    RECORD = 2  # of a mailbox, as it lies there
    ASK = 3  # for a message's data, by its acknowledgement
    DATA = 4  # of such a message: a piece of it, in order
    TAKEN = 5  # a message was matched, by its acknowledgement
    CREDIT = 6  # how much was matched, and how many; the value: how much may be sent in all
    BYE = 7  # nothing follows
    SEALED = 8  # a record or data, sealed as one frame of this kind


HEADER_BYTES: Final = 16
BUFFER_BYTES: Final = 64 << 10
"""Of what is sent, or comes, in small frames."""
PIECE_BYTES: Final = 1 << 20
"""The longest frame of data: others go between two."""
SEALED_PIECE_BYTES: Final = 256 << 10
SEAL_BYTES: Final = SEALED_PIECE_BYTES + 4096
"""Room for a frame, sealed or not."""
SLACK_BYTES: Final = 128 << 10
"""So much of the large ring may be lost to the ends of it, and to records that are no messages."""
ACKNOWLEDGED: Final = layout.ACKNOWLEDGEMENTS + 1


class WireState(IntEnum):
    """How a connection is."""

    OPEN = 0
    FAILED = 1  # it ended without a word, or what came was no frame of ours
    ENDED = 2  # both ends have said that nothing follows


NO_FRAME: Final = -1
"""In place of an error's number: what came is nothing that a rank sends."""
CARRIER_FAILED: Final = -2
"""Likewise: what carries the bytes says why."""


class Wire(IntEnum):
    """Fields of a connection."""

    FD = 0
    END = 1  # who is at the other end, as the table counts ranks
    STATE = 2
    ERRNO = 3  # of one that has failed; 0: the other end closed it; or of the two below
    MAY_SEND = 4
    IS_BLOCKED = 5  # the connection takes no more for now
    # What comes.
    IN_BUFFER = 6
    IN_START = 7
    IN_STOP = 8
    BODY_LEFT = 9  # of a frame whose bytes go where they belong at once
    BODY_AT = 10
    BODY_OF = 11  # the acknowledgement of the message; 0: a sealed frame
    # What goes.
    OUT_BUFFER = 12
    OUT_START = 13
    OUT_STOP = 14
    OUT_BODY_LEFT = 15
    OUT_BODY_AT = 16
    OUT_BODY_OF = 17
    # Queues of acknowledgements, each in a ring of as many words.
    ASK_FIRST = 18
    ASK_LAST = 19
    SERVE_FIRST = 20
    SERVE_LAST = 21
    N_TAKEN = 22  # messages of the other end that are to be told when they are matched
    # Room, and what was matched.
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
    OPEN = 33  # bytes of a sealed frame that has come
    OPENED = 34  # bytes of what was in it
    OPEN_BUFFER = 35
    OPENED_BUFFER = 36
    CARRIER = 37  # address of what carries bytes in place of the socket; 0: the socket does
    # The end.
    SAYS_BYE = 38  # 1: to be said; SAID_BYE: said
    HAS_BYE = 39
    # Whether parts of messages are sealed now.
    SEALS_PARTS = 40
    OPENS_PARTS = 41
    NEEDS_ROOM = 42  # what came waits for memory
    PARTS_LEFT = 43  # bytes of the message that comes, in further records
    OPEN_BYTES = 44  # of the sealed frame that comes
    CARRIER_IS_EMPTY = 45  # whether the carrier had brought nothing when it was last asked
    # The rings of this pair as the other end sees them, by `words.Mailbox`.
    MAILBOX = 48
    FETCHES = MAILBOX + MAILBOX_WORDS  # by acknowledgement: the row that its data is for
    ASKS = FETCHES + ACKNOWLEDGED
    SERVES = ASKS + layout.ACKNOWLEDGEMENTS
    TAKEN = SERVES + layout.ACKNOWLEDGEMENTS


WIRE_WORDS: Final = Wire.TAKEN + layout.ACKNOWLEDGEMENTS
SAID_BYE: Final = 2


class Served(IntEnum):
    """Fields of a message of this rank whose data another host asks for."""

    ADDRESS = 0
    SIZE_BYTES = 1
    DONE_BYTES = 2  # NOT_ASKED before
    IS_SEALED = 3
    END = 4  # whose it is


SERVED_WORDS: Final = 5
NOT_ASKED: Final = -1


class Announced(IntEnum):
    """In `Wire.FETCHES`, before a receive has asked for a message: how its data must come.

    Then it is the address of the row, plus 1 where it must come sealed.
    """

    PLAIN = 2
    SEALED = 3


class Wires(IntEnum):
    """Fields of what all connections of a table of messages have in common."""

    COUNT = 0
    EVENT_FD = 1  # wakes the thread
    IS_LOOKING = 2  # whether the thread wakes when something comes
    NEEDS_PYTHON = 3  # whether there is something to do for it
    ONE = 4  # what an eventfd is written
    HOST_STEP = 5  # address of `message_step.message_step`
    HOST_POST = 6  # address of `message_step.message_post`
    N_STEPS = 7  # counts
    SERVED = 8  # address of a `Served` for each acknowledgement
    POLL_FDS = 9  # address of a ``struct pollfd`` for each connection
    CARRY_AWAY = 10  # address of ``(carrier, address, most bytes)`` -> bytes taken; -1: failed
    CARRY_HERE = 11  # such a function that fills memory; 0: nothing has come
    FIRST = 16
    """Addresses of the connections."""
