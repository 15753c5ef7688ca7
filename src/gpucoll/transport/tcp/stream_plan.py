"""Prepare a schedule before anything moves: check its rows, and find which wait for which."""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import get, put
from gpucoll.transport.tcp.stream_state import (
    AGAIN,
    BEGIN,
    BEGUN,
    END,
    ERRNO,
    FIRST,
    FIRST_RECEIVE,
    FIRST_SEND,
    FORWARDS,
    HEADER_CAME,
    HEADER_SENT,
    IDLE_TURNS,
    INVALID,
    ITEM_BYTES,
    KERNEL,
    LINK,
    MAY_WAIT,
    N_LINKS,
    N_ROWS,
    NEXT_RECEIVE,
    NEXT_SEND,
    OPEN,
    RECEIVE_BYTES,
    RECEIVE_DONE,
    RECEIVE_OFFSET,
    RECEIVE_PEER,
    RECEIVE_ROW,
    RECEIVED,
    REDUCES,
    SECTION_END,
    SEND_BYTES,
    SEND_DONE,
    SEND_OFFSET,
    SEND_PEER,
    SEND_ROW,
    SENT,
    SOURCE,
    STEP,
    WORK_BYTES,
    go_on,
    link_of,
    plan_of,
    row_of,
)
from gpucoll.transport.tcp.stream_words import Fault

BAD_STEPS, BAD_PEER, BAD_RANGE = int(Fault.STEPS), int(Fault.PEER), int(Fault.RANGE)
BAD_ITEMS, BAD_FORWARDS = int(Fault.ITEMS), int(Fault.FORWARDS)
BAD_SECTION = int(Fault.SECTION)


@inline
def _fault_of_range(state, row, peer):
    """Return the fault of a peer, or of the offset and size after it; 0: none."""
    if get(row, peer) < -1 or get(row, peer) >= get(state, N_LINKS):
        return BAD_PEER
    offset, size_bytes = get(row, peer + 1), get(row, peer + 2)
    if get(row, peer) < 0:
        return 0
    if offset < 0 or size_bytes < 0 or size_bytes > get(state, WORK_BYTES) - offset:
        return BAD_RANGE
    return 0


@inline
def _fault_of_section(state, number):
    """Return the fault of a row's place in its section; 0: none."""
    row = row_of(state, number)
    first, end = get(row, FIRST), get(row, SECTION_END)
    if first < 0 or first > number or end <= number or end > get(state, N_ROWS):
        return BAD_SECTION
    if first == number:
        return 0
    before = row_of(state, number - 1)
    if get(before, FIRST) != first or get(before, SECTION_END) != end:
        return BAD_SECTION
    return BAD_STEPS if get(row, STEP) < get(before, STEP) else 0


@inline
def _fault_of(state, number):
    """Return the fault of a row by itself; 0: none."""
    row = row_of(state, number)
    fault = _fault_of_section(state, number)
    if fault != 0:
        return fault
    fault = max(_fault_of_range(state, row, SEND_PEER), _fault_of_range(state, row, RECEIVE_PEER))
    if fault != 0 or get(row, RECEIVE_PEER) < 0 or get(row, REDUCES) == 0:
        return fault
    has_kernel = get(state, KERNEL) != 0
    is_whole = get(row, RECEIVE_BYTES) % get(state, ITEM_BYTES) == 0
    return 0 if has_kernel and is_whole else BAD_ITEMS


@inline
def _overlap(row, offset_column, other, other_column):
    """Return whether two ranges of the working buffer have bytes in common."""
    first, first_end = (
        get(row, offset_column),
        get(row, offset_column) + get(row, offset_column + 1),
    )
    second = get(other, other_column)
    second_end = second + get(other, other_column + 1)
    return first < second_end and second < first_end and first < first_end and second < second_end


@inline
def _find_source(state, number):
    """Return the last row before this one that receives exactly what it sends; -1: none does.

    No row after that one may receive a part of it.
    """
    row = row_of(state, number)
    for before in range(number - 1, get(row, FIRST) - 1, -1):
        other = row_of(state, before)
        if get(other, RECEIVE_PEER) < 0:
            continue
        if get(other, RECEIVE_OFFSET) == get(row, SEND_OFFSET) and get(other, RECEIVE_BYTES) == get(
            row, SEND_BYTES
        ):
            return before
        if _overlap(row, SEND_OFFSET, other, RECEIVE_OFFSET):
            return -1
    return -1


@inline
def is_sent_first(state, sender, number):
    """Return whether `sender` must have sent the common bytes before row `number` receives them."""
    row, other = row_of(state, number), row_of(state, sender)
    if get(other, SEND_PEER) < 0 or get(other, STEP) > get(row, STEP):
        return False
    return get(plan_of(state, sender), SOURCE) < number  # else it forwards what comes there


@inline
def _may_wait(state, number):
    """Return whether other rows send or receive bytes that this one overwrites."""
    row = row_of(state, number)
    for before in range(get(row, FIRST), number):
        other = row_of(state, before)
        overlaps = _overlap(row, RECEIVE_OFFSET, other, RECEIVE_OFFSET)
        if overlaps and get(other, RECEIVE_PEER) >= 0:
            return True
    for sender in range(get(row, FIRST), get(row, SECTION_END)):
        overlaps = _overlap(row, RECEIVE_OFFSET, row_of(state, sender), SEND_OFFSET)
        if overlaps and is_sent_first(state, sender, number):
            return True
    return False


@inline
def _begin_link(link):
    """Reset a link, before it gets its rows."""
    put(link, SEND_ROW, -1)
    put(link, RECEIVE_ROW, -1)
    put(link, HEADER_SENT, 0)
    put(link, HEADER_CAME, 0)
    put(link, BEGIN, 0)
    put(link, END, 0)


@inline
def _begin_row(state, number):
    """Put a row before the later ones of its links; return how many transfers it has."""
    row, plan = row_of(state, number), plan_of(state, number)
    sends, receives = get(row, SEND_PEER), get(row, RECEIVE_PEER)
    put(plan, SEND_DONE, 1 if sends < 0 else 0)
    put(plan, RECEIVE_DONE, 1 if receives < 0 else 0)
    put(plan, SENT, 0)
    put(plan, RECEIVED, 0)
    put(plan, MAY_WAIT, 0)
    put(plan, SOURCE, -1)
    if sends >= 0:
        put(plan, NEXT_SEND, get(link_of(state, sends), SEND_ROW))
        put(link_of(state, sends), SEND_ROW, number)
    if receives >= 0:
        put(plan, NEXT_RECEIVE, get(link_of(state, receives), RECEIVE_ROW))
        put(link_of(state, receives), RECEIVE_ROW, number)
    return (1 if sends >= 0 else 0) + (1 if receives >= 0 else 0)


@inline
def _refuse(state, number, fault):
    put(state, LINK, number)
    put(state, ERRNO, fault)
    return INVALID


@inline
def begin(state):
    """Check all rows, and find what each has to wait for; return a status."""
    for number in range(get(state, N_LINKS)):
        _begin_link(link_of(state, number))
    n_rows, n_open = get(state, N_ROWS), 0
    for number in range(n_rows):
        fault = _fault_of(state, number)
        if fault != 0:
            return _refuse(state, number, fault)
    for number in range(n_rows - 1, -1, -1):
        n_open += _begin_row(state, number)
    for number in range(n_rows):
        row = row_of(state, number)
        if get(row, SEND_PEER) >= 0 and get(row, FORWARDS) != 0:
            source = _find_source(state, number)
            if source < 0:
                return _refuse(state, number, BAD_FORWARDS)
            put(plan_of(state, number), SOURCE, source)
    for number in range(n_rows):
        if get(row_of(state, number), RECEIVE_PEER) >= 0:
            put(plan_of(state, number), MAY_WAIT, 1 if _may_wait(state, number) else 0)
    put(state, OPEN, n_open)
    put(state, FIRST_SEND, 0)
    put(state, FIRST_RECEIVE, 0)
    go_on(state, FIRST_SEND, SEND_DONE)
    go_on(state, FIRST_RECEIVE, RECEIVE_DONE)
    put(state, IDLE_TURNS, 0)
    put(state, BEGUN, 1)
    return AGAIN


@compiled_when_used()
def plan_streams(state):
    """Begin a call that another loop runs; return `AGAIN` or `INVALID`."""
    return begin(state)
