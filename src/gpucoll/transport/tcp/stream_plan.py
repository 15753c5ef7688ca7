"""Prepare a schedule before anything moves: check its rows, and find which wait for which."""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.transport.tcp.stream_words import (
    Fault,
    Link,
    Plan,
    State,
    StreamStatus,
    go_on,
    link_of,
    plan_of,
    row_of,
)


@inline
def _fault_of_range(state: State, peer: int, offset: int, size_bytes: int) -> int:
    """Return the fault of a peer, or of the range that it sends or gets; 0: none."""
    if peer < -1 or peer >= state.n_links:
        return Fault.PEER
    if peer < 0:
        return 0
    if offset < 0 or size_bytes < 0 or size_bytes > state.work_bytes - offset:
        return Fault.RANGE
    return 0


@inline
def _fault_of_section(state: State, number: int) -> int:
    """Return the fault of a row's place in its section; 0: none."""
    row = row_of(state, number)
    first, end = row.first, row.end
    if first < 0 or first > number or end <= number or end > state.n_rows:
        return Fault.SECTION
    if first == number:
        return 0
    before = row_of(state, number - 1)
    if before.first != first or before.end != end:
        return Fault.SECTION
    return Fault.STEPS if row.step < before.step else 0


@inline
def _fault_of(state: State, number: int) -> int:
    """Return the fault of a row by itself; 0: none."""
    row = row_of(state, number)
    fault = _fault_of_section(state, number)
    if fault != 0:
        return fault
    fault = max(
        _fault_of_range(state, row.send_peer, row.send_offset, row.send_bytes),
        _fault_of_range(state, row.receive_peer, row.receive_offset, row.receive_bytes),
    )
    if fault != 0 or row.receive_peer < 0 or row.reduces == 0:
        return fault
    has_kernel = state.kernel != 0
    is_whole = row.receive_bytes % state.item_bytes == 0
    return 0 if has_kernel and is_whole else Fault.ITEMS


@inline
def _overlap(first: int, first_bytes: int, second: int, second_bytes: int) -> bool:
    """Return whether two ranges of the working buffer have bytes in common."""
    first_end, second_end = first + first_bytes, second + second_bytes
    return first < second_end and second < first_end and first < first_end and second < second_end


@inline
def _find_source(state: State, number: int) -> int:
    """Return the last row before this one that receives exactly what it sends; -1: none does.

    No row after that one may receive a part of it.
    """
    row = row_of(state, number)
    for before in range(number - 1, row.first - 1, -1):
        other = row_of(state, before)
        if other.receive_peer < 0:
            continue
        if other.receive_offset == row.send_offset and other.receive_bytes == row.send_bytes:
            return before
        if _overlap(row.send_offset, row.send_bytes, other.receive_offset, other.receive_bytes):
            return -1
    return -1


@inline
def is_sent_first(state: State, sender: int, number: int) -> bool:
    """Return whether `sender` must have sent the common bytes before row `number` receives them."""
    row, other = row_of(state, number), row_of(state, sender)
    if other.send_peer < 0 or other.step > row.step:
        return False
    return plan_of(state, sender).source < number  # else it forwards what comes there


@inline
def _may_wait(state: State, number: int) -> bool:
    """Return whether other rows send or receive bytes that this one overwrites."""
    row = row_of(state, number)
    start, size_bytes = row.receive_offset, row.receive_bytes
    for before in range(row.first, number):
        other = row_of(state, before)
        overlaps = _overlap(start, size_bytes, other.receive_offset, other.receive_bytes)
        if overlaps and other.receive_peer >= 0:
            return True
    for sender in range(row.first, row.end):
        other = row_of(state, sender)
        overlaps = _overlap(start, size_bytes, other.send_offset, other.send_bytes)
        if overlaps and is_sent_first(state, sender, number):
            return True
    return False


@inline
def _begin_link(link: Link) -> None:
    """Reset a link, before it gets its rows."""
    link.send_row = -1
    link.receive_row = -1
    link.header_sent = 0
    link.header_came = 0
    link.begin = 0
    link.end = 0


@inline
def _begin_row(state: State, number: int) -> int:
    """Put a row before the later ones of its links; return how many transfers it has."""
    row, plan = row_of(state, number), plan_of(state, number)
    sends, receives = row.send_peer, row.receive_peer
    plan.send_done = 1 if sends < 0 else 0
    plan.receive_done = 1 if receives < 0 else 0
    plan.sent = 0
    plan.received = 0
    plan.may_wait = 0
    plan.source = -1
    if sends >= 0:
        plan.next_send = link_of(state, sends).send_row
        link_of(state, sends).send_row = number
    if receives >= 0:
        plan.next_receive = link_of(state, receives).receive_row
        link_of(state, receives).receive_row = number
    return (1 if sends >= 0 else 0) + (1 if receives >= 0 else 0)


@inline
def _refuse(state: State, number: int, fault: int) -> int:
    state.link = number
    state.errno = fault
    return StreamStatus.INVALID


@inline
def begin(state: State) -> int:
    """Check all rows, and find what each has to wait for; return a status."""
    for number in range(state.n_links):
        _begin_link(link_of(state, number))
    n_rows, n_open = state.n_rows, 0
    for number in range(n_rows):
        fault = _fault_of(state, number)
        if fault != 0:
            return _refuse(state, number, fault)
    for number in range(n_rows - 1, -1, -1):
        n_open += _begin_row(state, number)
    for number in range(n_rows):
        row = row_of(state, number)
        if row.send_peer >= 0 and row.forwards != 0:
            source = _find_source(state, number)
            if source < 0:
                return _refuse(state, number, Fault.FORWARDS)
            plan_of(state, number).source = source
    for number in range(n_rows):
        if row_of(state, number).receive_peer >= 0:
            plan_of(state, number).may_wait = 1 if _may_wait(state, number) else 0
    state.open = n_open
    state.first_send = 0
    state.first_receive = 0
    go_on(state, State.first_send, Plan.send_done)
    go_on(state, State.first_receive, Plan.receive_done)
    state.idle = 0
    state.begun = 1
    return StreamStatus.AGAIN


@compiled_when_used()
def plan_streams(state: State) -> int:
    """Begin a call that another loop runs; return `AGAIN` or `INVALID`."""
    return begin(state)
