"""Receive on a connection: straight into place, or into scratch memory for reducing.

Received data may overwrite data that an earlier row sends or receives; `_writable` tells how far
that is allowed. Data that comes too early waits in scratch memory, and then in the connection.
"""

from __future__ import annotations

import numpy as np

from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.memory import call_reduce
from gpucoll.transport.tcp.stream_plan import is_sent_first
from gpucoll.transport.tcp.stream_sending import MOST_BYTES, MSG_DONTWAIT, failed
from gpucoll.transport.tcp.stream_state import IDLE, MOVED, go_on, plan_of, row_of
from gpucoll.transport.tcp.stream_words import (
    HEADER_BYTES,
    HEADER_WORDS,
    SCRATCH_BYTES,
    Link,
    Plan,
    Row,
    State,
    StreamStatus,
)

BEHIND_HEADER = 4 << 10
"""How much data that is not reduced is received with the header, and then copied to its place."""
LEAST_ROOM = 64 << 10

_i64, _i32 = types.int64, types.int32
_recv = types.ExternalFunction("recv", _i64(_i32, _i64, _i64, _i32))
_memmove = types.ExternalFunction("memmove", _i64(_i64, _i64, _i64))


@inline
def _before(start: int, end: int, begin: int, stop: int) -> int:
    """Return up to where bytes from `start` to `end` may be written if begin..stop may not."""
    if start >= stop or end <= begin:
        return end
    return max(start, begin)


@inline
def _writable(state: State, number: int) -> int:
    """Return how many more bytes a row may write: earlier transfers of those bytes are complete."""
    row, plan = row_of(state, number), plan_of(state, number)
    start = row.receive_offset + plan.received
    end = row.receive_offset + row.receive_bytes
    if row.gate > state.ready:
        return 0
    if plan.may_wait == 0:
        return end - start
    sender, last = max(row.first, state.first_send), row.end
    while sender < last and row_of(state, sender).step <= row.step:
        progress = plan_of(state, sender)
        if progress.send_done == 0 and is_sent_first(state, sender, number):
            begin = row_of(state, sender).send_offset
            stop = begin + row_of(state, sender).send_bytes
            end = _before(start, end, begin + progress.sent, stop)
        sender += 1
    for before in range(max(row.first, state.first_receive), number):
        progress = plan_of(state, before)
        if progress.receive_done == 0:
            begin = row_of(state, before).receive_offset
            stop = begin + row_of(state, before).receive_bytes
            end = _before(start, end, begin + progress.received, stop)
    return end - start


@inline
def _take(state: State, link: Link, address: int, size_bytes: int) -> int:
    """Receive; return the number of bytes; 0: there are none yet; -1: the link is gone."""
    flags = np.int32(MSG_DONTWAIT)
    got = _recv(np.int32(link.fd), address, size_bytes, flags)
    if got > 0:
        return got
    if got == 0:
        state.errno = 0
        return -1
    return 0 if failed(state) == IDLE else -1


@inline
def _receive_header(state: State, link: Link, number: int) -> int:
    """Receive the header and, with it, the first of the following bytes into scratch memory."""
    row = row_of(state, number)
    came, scratch = link.header_came, link.scratch
    most = SCRATCH_BYTES if row.reduces != 0 else BEHIND_HEADER
    want = HEADER_BYTES - came + min(row.receive_bytes, most)
    got = _take(state, link, scratch - HEADER_BYTES + came, want)
    if got <= 0:
        return IDLE if got == 0 else StreamStatus.GONE
    of_header = min(got, HEADER_BYTES - came)
    link.header_came = came + of_header
    link.end = got - of_header
    if came + of_header == HEADER_BYTES:
        for word in range(HEADER_WORDS):
            if Words(scratch - HEADER_BYTES)[word] != state.header[word]:
                return StreamStatus.MISMATCH
    return MOVED


@inline
def _make_room(link: Link, size_bytes: int) -> None:
    """Move waiting data to the front of scratch memory if little is free after it."""
    begin, end = link.begin, link.end
    if begin > 0 and SCRATCH_BYTES - end < min(size_bytes, LEAST_ROOM):
        _memmove(link.scratch, link.scratch + begin, end - begin)
        link.begin = 0
        link.end = end - begin


@inline
def wanted(state: State, link: Link, number: int) -> int:
    """Return how many bytes can be received now."""
    row, plan = row_of(state, number), plan_of(state, number)
    begin, end = link.begin, link.end
    rest = row.receive_bytes - plan.received - (end - begin)
    if row.reduces != 0 or end > 0:
        return min(rest, SCRATCH_BYTES - (end - begin))
    return min(min(rest, _writable(state, number)), MOST_BYTES)


@inline
def _receive_bytes(state: State, link: Link, number: int) -> int:
    """Receive data to reduce into scratch memory, and other data straight into place."""
    size_bytes = wanted(state, link, number)
    if size_bytes <= 0:
        return IDLE
    row, plan = row_of(state, number), plan_of(state, number)
    if row.reduces != 0 or link.end > 0:
        _make_room(link, size_bytes)
        end = link.end
        got = _take(state, link, link.scratch + end, min(size_bytes, SCRATCH_BYTES - end))
        if got > 0:
            link.end = end + got
    else:
        received = plan.received
        place = state.work + row.receive_offset + received
        got = _take(state, link, place, size_bytes)
        if got > 0:
            plan.received = received + got
    if got < 0:
        return StreamStatus.GONE
    return IDLE if got == 0 else MOVED


@inline
def _reduce(state: State, row: Row, place: int, theirs: int, size_bytes: int) -> None:
    """Combine received data with the data in place, by the reduce kernel."""
    state.destination = place
    theirs_first = row.theirs_first != 0
    state.operands[0] = theirs if theirs_first else place
    state.operands[1] = place if theirs_first else theirs
    count = size_bytes // state.item_bytes * state.parts
    call_reduce(
        state.kernel, state.at.destination, 1, state.operands.address, 2, count, state.parameter, 0
    )


@inline
def _place(state: State, link: Link, number: int) -> bool:
    """Reduce or copy what waits in scratch memory, as far as allowed; return whether any was."""
    begin, end = link.begin, link.end
    if begin == end:
        return False
    row, plan = row_of(state, number), plan_of(state, number)
    size_bytes = min(end - begin, _writable(state, number))
    received = plan.received
    place = state.work + row.receive_offset + received
    theirs = link.scratch + begin
    reduces = row.reduces != 0
    if reduces:
        size_bytes -= size_bytes % state.item_bytes
    if size_bytes <= 0:
        return False
    if reduces:
        _reduce(state, row, place, theirs, size_bytes)
    else:
        _memmove(place, theirs, size_bytes)
    plan.received = received + size_bytes
    begin += size_bytes
    if end - begin < 64:  # an incomplete item, or nothing
        _memmove(link.scratch, link.scratch + begin, end - begin)
        begin, end = 0, end - begin
    link.begin = begin
    link.end = end
    return True


@inline
def _end_receives(state: State, link: Link, number: int) -> None:
    """Go on to the link's next row if this one is complete, and over rows without bytes."""
    while number >= 0:
        plan = plan_of(state, number)
        if plan.received != row_of(state, number).receive_bytes:
            break
        plan.receive_done = 1
        state.open -= 1
        number = plan.next_receive
    link.receive_row = number
    go_on(state, State.first_receive, Plan.receive_done)


@inline
def receive_some(state: State, link: Link) -> int:
    """Receive on a link, and put received data in its place."""
    number = link.receive_row
    if number < 0:
        return IDLE
    if link.header_came < HEADER_BYTES:
        result = _receive_header(state, link, number)
        if result != MOVED or link.header_came < HEADER_BYTES:
            return result
    else:
        result = _receive_bytes(state, link, number)
        if result >= 0:
            return result
    if _place(state, link, number):
        result = MOVED
    if result == MOVED:
        _end_receives(state, link, number)
    return result
