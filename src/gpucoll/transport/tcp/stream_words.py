"""The words of a call over TCP connections, by number, for Python and the compiled loop."""

from __future__ import annotations

from enum import IntEnum

HEADER_BYTES = 32
"""Size of the header before a call's first byte in each direction of a connection."""
HEADER_WORDS = 4
MAGIC = int.from_bytes(b"gpucoll\x01", "little")
"""First word of a header; its last byte is the version of the protocol on the connection."""
SCRATCH_BYTES = 256 << 10
"""How much data to reduce is received at once: it stays in the processor's own cache."""


class Row(IntEnum):
    """Fields of one row of a schedule. Offsets and sizes are bytes of the working buffer.

    Attributes
    ----------
    FIRST, END : int
        The rows of its section, from FIRST up to but excluding END: no other row's steps matter.
    GATE : int
        How many pieces must be ready (`State.READY`) before it sends, or writes.
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
    """The loop's fields of a row: its dependencies and its progress.

    Attributes
    ----------
    NEXT_SEND, NEXT_RECEIVE : int
        The next row that sends, or receives, on the same link; -1: none.
    SOURCE : int
        The row whose bytes are forwarded as they come; -1: none.
    MAY_WAIT : int
        Whether other rows send or receive bytes that this one overwrites.
    SENT, RECEIVED : int
        Numbers of bytes. Received bytes are in place, and reduced.
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
    """Fields of a connection in a call.

    Attributes
    ----------
    SEND_ROW, RECEIVE_ROW : int
        The rows that are being sent and received; -1: none.
    HEADER_SENT, HEADER_CAME : int
        Bytes of the header that were sent and received.
    BEGIN, END : int
        Where received data that is not in its place yet lies in the scratch memory.
    SCRATCH : int
        Address of the scratch memory; the received header precedes it.
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
    """Fields of a call; the first ones are set for each call.

    Attributes
    ----------
    PARTS : int
        How many parts the kernel counts for one item: 2 for complex numbers.
    ABORT : int
        Address of the abort word; 0: there is none.
    READY : int
        The number of ready pieces: rows with a higher gate wait.
    UNTIL : int
        A slice ends when all rows below this one have sent and received.
    STOPS_IDLE : int
        Whether a slice ends when nothing moves.
    YIELDS : int
        How often the loop yields the CPU before it sleeps.
    BEGUN : int
        0: the rows have not been checked.
    OPEN : int
        How many sends and receives are not complete.
    FIRST_SEND, FIRST_RECEIVE : int
        The first row whose send, or receive, is not complete.
    IDLE : int
        How many turns in a row moved nothing.
    LINK, ERRNO : int
        The link that is gone or does not match, and the errno; for invalid rows, the row and a
        `Fault`.
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
    """The received header differs from the one that this end sends."""
    INVALID = 6
    """The rows are invalid."""


class Fault(IntEnum):
    """Why rows are invalid."""

    STEPS = 1
    PEER = 2
    RANGE = 3
    ITEMS = 4
    FORWARDS = 5
    SECTION = 6
