"""Addresses in the state that the compiled loops over connections share: rows, links, fields."""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import get, put
from gpucoll.transport.tcp.stream_words import (
    LINK_WORDS,
    PLAN_WORDS,
    ROW_WORDS,
    Link,
    Plan,
    Row,
    State,
    StreamStatus,
)

IDLE, MOVED = -2, -1
"""The result of one turn of a link; otherwise it is a `StreamStatus` that ends the call."""

# Plain ints: Numba freezes them into the code.
STEP, FORWARDS = int(Row.STEP), int(Row.FORWARDS)
FIRST, SECTION_END, GATE = int(Row.FIRST), int(Row.END), int(Row.GATE)
SEND_PEER, SEND_OFFSET = int(Row.SEND_PEER), int(Row.SEND_OFFSET)
SEND_BYTES = int(Row.SEND_BYTES)
RECEIVE_PEER, RECEIVE_OFFSET = int(Row.RECEIVE_PEER), int(Row.RECEIVE_OFFSET)
RECEIVE_BYTES = int(Row.RECEIVE_BYTES)
REDUCES, THEIRS_FIRST = int(Row.REDUCES), int(Row.THEIRS_FIRST)
NEXT_SEND, NEXT_RECEIVE = int(Plan.NEXT_SEND), int(Plan.NEXT_RECEIVE)
SOURCE, MAY_WAIT = int(Plan.SOURCE), int(Plan.MAY_WAIT)
SENT, RECEIVED = int(Plan.SENT), int(Plan.RECEIVED)
SEND_DONE, RECEIVE_DONE = int(Plan.SEND_DONE), int(Plan.RECEIVE_DONE)
FD, SEND_ROW, RECEIVE_ROW = int(Link.FD), int(Link.SEND_ROW), int(Link.RECEIVE_ROW)
HEADER_SENT, HEADER_CAME = int(Link.HEADER_SENT), int(Link.HEADER_CAME)
BEGIN, END, SCRATCH = int(Link.BEGIN), int(Link.END), int(Link.SCRATCH)
ROWS, N_ROWS, PLAN = int(State.ROWS), int(State.N_ROWS), int(State.PLAN)
WORK, WORK_BYTES = int(State.WORK), int(State.WORK_BYTES)
KERNEL, ITEM_BYTES, PARTS = int(State.KERNEL), int(State.ITEM_BYTES), int(State.PARTS)
PARAMETER, HEADER, ABORT = int(State.PARAMETER), int(State.HEADER), int(State.ABORT)
DEADLINE_NS, SLICE_NS = int(State.DEADLINE_NS), int(State.SLICE_NS)
READY, UNTIL = int(State.READY), int(State.UNTIL)
STOPS_IDLE, YIELDS = int(State.STOPS_IDLE), int(State.YIELDS)
BEGUN, LINKS, N_LINKS = int(State.BEGUN), int(State.LINKS), int(State.N_LINKS)
POLL_FDS, OPEN, IDLE_TURNS = int(State.POLL_FDS), int(State.OPEN), int(State.IDLE)
FIRST_SEND, FIRST_RECEIVE = int(State.FIRST_SEND), int(State.FIRST_RECEIVE)
LINK, ERRNO, CLOCK = int(State.LINK), int(State.ERRNO), int(State.CLOCK)
MESSAGE, VECTORS = int(State.MESSAGE), int(State.VECTORS)
DESTINATION, OPERANDS = int(State.DESTINATION), int(State.OPERANDS)
DONE, AGAIN, GONE = int(StreamStatus.DONE), int(StreamStatus.AGAIN), int(StreamStatus.GONE)
ABORTED, DEADLINE = int(StreamStatus.ABORTED), int(StreamStatus.DEADLINE)
MISMATCH, INVALID = int(StreamStatus.MISMATCH), int(StreamStatus.INVALID)


@inline
def row_of(state, number):
    """Return the address of a row."""
    return get(state, ROWS) + 8 * ROW_WORDS * number


@inline
def plan_of(state, number):
    """Return the address of the loop's fields of a row."""
    return get(state, PLAN) + 8 * PLAN_WORDS * number


@inline
def link_of(state, number):
    """Return the address of a link."""
    return get(state, LINKS) + 8 * LINK_WORDS * number


@inline
def go_on(state, first, done):
    """Advance `first` to the first row that is not done."""
    number = get(state, first)
    while number < get(state, N_ROWS) and get(plan_of(state, number), done) != 0:
        number += 1
    put(state, first, number)
