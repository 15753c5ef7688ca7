"""The words of a call over TCP connections, for Python and the compiled loop."""

from __future__ import annotations

from gpucoll.blocks import Block, Field, Words, words
from gpucoll.codes import Codes
from gpucoll.kernels.cpu.jit import inline

HEADER_BYTES = 32
"""Size of the header before a call's first byte in each direction of a connection."""
HEADER_WORDS = 4
MAGIC = int.from_bytes(b"gpucoll\x01", "little")
"""First word of a header; its last byte is the version of the protocol on the connection."""
SCRATCH_BYTES = 256 << 10
"""How much data to reduce is received at once: it stays in the processor's own cache."""


class Row(Block):
    """Fields of one row of a schedule. Offsets and sizes are bytes of the working buffer.

    Attributes
    ----------
    first, end : int
        The rows of its section, from `first` to before `end`: no other row's steps matter.
    gate : int
        How many pieces must be ready (`State.ready`) before it sends, or writes.
    """

    step: int
    send_peer: int
    send_offset: int
    send_bytes: int
    receive_peer: int
    receive_offset: int
    receive_bytes: int
    reduces: int
    theirs_first: int
    forwards: int
    first: int
    end: int
    gate: int


class Plan(Block):
    """The loop's fields of a row: its dependencies and its progress.

    Attributes
    ----------
    next_send, next_receive : int
        The next row that sends, or receives, on the same link; -1: none.
    source : int
        The row whose bytes are forwarded as they come; -1: none.
    may_wait : int
        Whether other rows send or receive bytes that this one overwrites.
    sent, received : int
        Numbers of bytes. Received bytes are in place, and reduced.
    """

    next_send: int
    next_receive: int
    source: int
    may_wait: int
    sent: int
    received: int
    send_done: int
    receive_done: int


class Link(Block):
    """Fields of a connection in a call.

    Attributes
    ----------
    send_row, receive_row : int
        The rows that are being sent and received; -1: none.
    header_sent, header_came : int
        Bytes of the header that were sent and received.
    begin, end : int
        Where received data that is not in its place yet lies in the scratch memory.
    scratch : int
        Address of the scratch memory; the received header precedes it.
    """

    fd: int
    send_row: int
    header_sent: int
    receive_row: int
    header_came: int
    begin: int
    end: int
    scratch: int


class State(Block):
    """Fields of a call; the first ones are set for each call.

    Attributes
    ----------
    parts : int
        How many parts the kernel counts for one item: 2 for complex numbers.
    abort : int
        Address of the abort word; 0: there is none.
    ready : int
        The number of ready pieces: rows with a higher gate wait.
    until : int
        A slice ends when all rows below this one have sent and received.
    stops_idle : int
        Whether a slice ends when nothing moves.
    yields : int
        How often the loop yields the CPU before it sleeps.
    begun : int
        0: the rows have not been checked.
    open : int
        How many sends and receives are not complete.
    first_send, first_receive : int
        The first row whose send, or receive, is not complete.
    idle : int
        How many turns in a row moved nothing.
    link, errno : int
        The link that is gone or does not match, and the errno; for invalid rows, the row and a
        `Fault`.
    clock, message, vectors, destination, operands : int
        Arguments of system calls and of the reduce kernel.
    """

    rows: int
    n_rows: int
    plan: int
    work: int
    work_bytes: int
    kernel: int
    item_bytes: int
    parts: int
    parameter: int
    header: Field[Words] = words(4)
    abort: int
    deadline_ns: int
    slice_ns: int
    ready: int
    until: int
    stops_idle: int
    yields: int
    begun: int
    links: int
    n_links: int
    poll_fds: Field[Words]
    open: int
    first_send: int
    first_receive: int
    idle: int
    link: int
    errno: int
    clock: Field[Words] = words(2)
    message: Field[Words] = words(7)
    vectors: Field[Words] = words(4)
    destination: int
    operands: Field[Words] = words(2)


class StreamStatus(Codes):
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


class Fault(Codes):
    """Why rows are invalid."""

    STEPS = 1
    PEER = 2
    RANGE = 3
    ITEMS = 4
    FORWARDS = 5
    SECTION = 6


# --- in the compiled loop -------------------------------------------------------------------------


IDLE, MOVED = -2, -1
"""The result of one turn of a link; otherwise it is a `StreamStatus` that ends the call."""


@inline
def row_of(state: State, number: int) -> Row:
    """Return a row."""
    return Row(state.rows + Row.n_bytes * number)


@inline
def plan_of(state: State, number: int) -> Plan:
    """Return the loop's fields of a row."""
    return Plan(state.plan + Plan.n_bytes * number)


@inline
def link_of(state: State, number: int) -> Link:
    """Return a link."""
    return Link(state.links + Link.n_bytes * number)


@inline
def go_on(state: State, first: int, done: int) -> None:
    """Advance the field `first` to the first row whose field `done` is 0."""
    firsts = Words(state.address)
    number = firsts[first]
    while number < state.n_rows and Words(plan_of(state, number).address)[done] != 0:
        number += 1
    firsts[first] = number
