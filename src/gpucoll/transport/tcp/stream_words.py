"""The words of a call over TCP connections, by number: what Python and the compiled loop share."""

from __future__ import annotations

from enum import IntEnum

HEADER_BYTES = 32
"""Before the first byte of a call in each direction of a connection."""
HEADER_WORDS = 4
MAGIC = int.from_bytes(b"gpucoll\x01", "little")
"""First word of a header; the last byte is the version of what goes over the connection."""
SCRATCH_BYTES = 256 << 10
"""So much of what is to be reduced is received at once: it stays in the processor's own cache."""


class Row(IntEnum):
    """Of a schedule: what one row says. Offsets and sizes are bytes of the working buffer.

    Attributes
    ----------
    FIRST, END : int
        The rows of its section, from the first to before the last: no other row's steps matter.
    GATE : int
        How much must be ready (`State.READY`) for it to send, or to write.
    """

    STEP = 0
    SEND_PEER = 1
    SEND_OFFSET = 2
    SEND_BYTES = 3
    RECEIVE_PEER = 4
    RECEIVE_OFFSET = 5
    RECEIVE_BYTES = 6
    REDUCES = 7
    THEIRS_FIRST = 8
    FORWARDS = 9
    FIRST = 10
    END = 11
    GATE = 12


ROW_WORDS = len(Row)


class Plan(IntEnum):
    """Of a row: what the loop makes of it, and how far it has come.

    Attributes
    ----------
    NEXT_SEND, NEXT_RECEIVE : int
        The next row that sends, or receives, on the same link; -1: none.
    SOURCE : int
        The row whose bytes are passed on as they come; -1: none.
    MAY_WAIT : int
        Whether other rows send or receive what this one overwrites.
    SENT, RECEIVED : int
        Bytes. Received ones are in place, and reduced.
    """

    NEXT_SEND = 0
    NEXT_RECEIVE = 1
    SOURCE = 2
    MAY_WAIT = 3
    SENT = 4
    RECEIVED = 5
    SEND_DONE = 6
    RECEIVE_DONE = 7


PLAN_WORDS = len(Plan)


class Link(IntEnum):
    """Of a connection, in a call.

    Attributes
    ----------
    SEND_ROW, RECEIVE_ROW : int
        Which rows are being sent and received; -1: none.
    HEADER_SENT, HEADER_CAME : int
        Bytes of the header.
    BEGIN, END : int
        Where what was received and is in no place yet lies in the scratch memory.
    SCRATCH : int
        Address of that; the header that came lies in front of it.
    """

    FD = 0
    SEND_ROW = 1
    HEADER_SENT = 2
    RECEIVE_ROW = 3
    HEADER_CAME = 4
    BEGIN = 5
    END = 6
    SCRATCH = 7


LINK_WORDS = len(Link)


class State(IntEnum):
    """Of a call; first what each call sets.

    Attributes
    ----------
    PARTS : int
        What the kernel counts, of one item: 2 for complex numbers.
    ABORT : int
        Address of the abort word; 0: there is none.
    READY : int
        Rows whose gate is higher wait.
    UNTIL : int
        A slice is over when all rows below this one have sent and received.
    STOPS_IDLE : int
        Whether a slice is over when nothing moves.
    YIELDS : int
        How often the processor is given away before the loop sleeps.
    BEGUN : int
        0: the rows have not been looked at.
    OPEN : int
        How many sends and receives are not over.
    FIRST_SEND, FIRST_RECEIVE : int
        The first row whose send, or receive, is not over.
    IDLE : int
        How many turns in a row moved nothing.
    LINK, ERRNO : int
        Which link is gone or does not match; of rows that cannot be: the row, and a `Fault`.
    CLOCK, MESSAGE, VECTORS, DESTINATION, OPERANDS : int
        Arguments of system calls and of the reduce kernel.
    """

    ROWS = 0
    N_ROWS = 1
    PLAN = 2
    WORK = 3
    WORK_BYTES = 4
    KERNEL = 5
    ITEM_BYTES = 6
    PARTS = 7
    PARAMETER = 8
    HEADER = 9
    ABORT = 13
    DEADLINE_NS = 14
    SLICE_NS = 15
    READY = 16
    UNTIL = 17
    STOPS_IDLE = 18
    YIELDS = 19
    BEGUN = 20
    LINKS = 21
    N_LINKS = 22
    POLL_FDS = 23
    OPEN = 24
    FIRST_SEND = 25
    FIRST_RECEIVE = 26
    IDLE = 27
    LINK = 28
    ERRNO = 29
    CLOCK = 30
    MESSAGE = 32
    VECTORS = 39
    DESTINATION = 43
    OPERANDS = 44


STATE_WORDS = 46


class StreamStatus(IntEnum):
    """How a call, or a slice of one, ended."""

    DONE = 0
    AGAIN = 1
    """The slice is over; go on."""
    GONE = 2
    """The other end has closed its connection, or it broke."""
    ABORTED = 3
    DEADLINE = 4
    MISMATCH = 5
    """Another header came than this end sends."""
    INVALID = 6
    """The rows cannot be."""


class Fault(IntEnum):
    """Why rows cannot be."""

    STEPS = 1
    PEER = 2
    RANGE = 3
    ITEMS = 4
    FORWARDS = 5
    SECTION = 6
