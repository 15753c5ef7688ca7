"""Receive on a connection: straight into place, or into scratch memory for reducing.

Received data may overwrite data that an earlier row sends or receives; `_writable` tells how far
that is allowed. Data that comes too early waits in scratch memory, and then in the connection.
"""

from __future__ import annotations

import numpy as np

from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.memory import call_reduce, get, put
from gpucoll.transport.tcp.stream_plan import is_sent_first
from gpucoll.transport.tcp.stream_sending import MOST_BYTES, MSG_DONTWAIT, failed
from gpucoll.transport.tcp.stream_state import (
    BEGIN,
    DESTINATION,
    END,
    ERRNO,
    FD,
    FIRST,
    FIRST_RECEIVE,
    FIRST_SEND,
    GATE,
    GONE,
    HEADER,
    HEADER_CAME,
    IDLE,
    ITEM_BYTES,
    KERNEL,
    MAY_WAIT,
    MISMATCH,
    MOVED,
    NEXT_RECEIVE,
    OPEN,
    OPERANDS,
    PARAMETER,
    PARTS,
    READY,
    RECEIVE_BYTES,
    RECEIVE_DONE,
    RECEIVE_OFFSET,
    RECEIVE_ROW,
    RECEIVED,
    REDUCES,
    SCRATCH,
    SECTION_END,
    SEND_BYTES,
    SEND_DONE,
    SEND_OFFSET,
    SENT,
    STEP,
    THEIRS_FIRST,
    WORK,
    go_on,
    plan_of,
    row_of,
)
from gpucoll.transport.tcp.stream_words import HEADER_BYTES, HEADER_WORDS, SCRATCH_BYTES

BEHIND_HEADER = 4 << 10
"""How much data that is not reduced is received with the header, and then copied to its place."""
LEAST_ROOM = 64 << 10

_i64, _i32 = types.int64, types.int32
_recv = types.ExternalFunction("recv", _i64(_i32, _i64, _i64, _i32))
_memmove = types.ExternalFunction("memmove", _i64(_i64, _i64, _i64))


@inline
def _before(start, end, begin, stop):
    """Return up to where bytes from `start` to `end` may be written if begin..stop may not."""
    if start >= stop or end <= begin:
        return end
    return max(start, begin)


@inline
def _writable(state, number):
    """Return how many more bytes a row may write: earlier transfers of those bytes are complete."""
    row, plan = row_of(state, number), plan_of(state, number)
    start = get(row, RECEIVE_OFFSET) + get(plan, RECEIVED)
    end = get(row, RECEIVE_OFFSET) + get(row, RECEIVE_BYTES)
    if get(row, GATE) > get(state, READY):
        return 0
    if get(plan, MAY_WAIT) == 0:
        return end - start
    sender, last = max(get(row, FIRST), get(state, FIRST_SEND)), get(row, SECTION_END)
    while sender < last and get(row_of(state, sender), STEP) <= get(row, STEP):
        progress = plan_of(state, sender)
        if get(progress, SEND_DONE) == 0 and is_sent_first(state, sender, number):
            begin = get(row_of(state, sender), SEND_OFFSET)
            stop = begin + get(row_of(state, sender), SEND_BYTES)
            end = _before(start, end, begin + get(progress, SENT), stop)
        sender += 1
    for before in range(max(get(row, FIRST), get(state, FIRST_RECEIVE)), number):
        progress = plan_of(state, before)
        if get(progress, RECEIVE_DONE) == 0:
            begin = get(row_of(state, before), RECEIVE_OFFSET)
            stop = begin + get(row_of(state, before), RECEIVE_BYTES)
            end = _before(start, end, begin + get(progress, RECEIVED), stop)
    return end - start


@inline
def _take(state, link, address, size_bytes):
    """Receive; return the number of bytes; 0: there are none yet; -1: the link is gone."""
    flags = np.int32(MSG_DONTWAIT)
    got = _recv(np.int32(get(link, FD)), address, size_bytes, flags)
    if got > 0:
        return got
    if got == 0:
        put(state, ERRNO, 0)
        return -1
    return 0 if failed(state) == IDLE else -1


@inline
def _receive_header(state, link, number):
    """Receive the header and, with it, the first of the following bytes into scratch memory."""
    row = row_of(state, number)
    came, scratch = get(link, HEADER_CAME), get(link, SCRATCH)
    most = SCRATCH_BYTES if get(row, REDUCES) != 0 else BEHIND_HEADER
    want = HEADER_BYTES - came + min(get(row, RECEIVE_BYTES), most)
    got = _take(state, link, scratch - HEADER_BYTES + came, want)
    if got <= 0:
        return IDLE if got == 0 else GONE
    of_header = min(got, HEADER_BYTES - came)
    put(link, HEADER_CAME, came + of_header)
    put(link, END, got - of_header)
    if came + of_header == HEADER_BYTES:
        for word in range(HEADER_WORDS):
            if get(scratch - HEADER_BYTES, word) != get(state, HEADER + word):
                return MISMATCH
    return MOVED


@inline
def _make_room(link, size_bytes):
    """Move waiting data to the front of scratch memory if little is free after it."""
    begin, end = get(link, BEGIN), get(link, END)
    if begin > 0 and SCRATCH_BYTES - end < min(size_bytes, LEAST_ROOM):
        _memmove(get(link, SCRATCH), get(link, SCRATCH) + begin, end - begin)
        put(link, BEGIN, 0)
        put(link, END, end - begin)


@inline
def wanted(state, link, number):
    """Return how many bytes can be received now."""
    row, plan = row_of(state, number), plan_of(state, number)
    begin, end = get(link, BEGIN), get(link, END)
    rest = get(row, RECEIVE_BYTES) - get(plan, RECEIVED) - (end - begin)
    if get(row, REDUCES) != 0 or end > 0:
        return min(rest, SCRATCH_BYTES - (end - begin))
    return min(min(rest, _writable(state, number)), MOST_BYTES)


@inline
def _receive_bytes(state, link, number):
    """Receive data to reduce into scratch memory, and other data straight into place."""
    size_bytes = wanted(state, link, number)
    if size_bytes <= 0:
        return IDLE
    row, plan = row_of(state, number), plan_of(state, number)
    if get(row, REDUCES) != 0 or get(link, END) > 0:
        _make_room(link, size_bytes)
        end = get(link, END)
        got = _take(state, link, get(link, SCRATCH) + end, min(size_bytes, SCRATCH_BYTES - end))
        if got > 0:
            put(link, END, end + got)
    else:
        received = get(plan, RECEIVED)
        place = get(state, WORK) + get(row, RECEIVE_OFFSET) + received
        got = _take(state, link, place, size_bytes)
        if got > 0:
            put(plan, RECEIVED, received + got)
    if got < 0:
        return GONE
    return IDLE if got == 0 else MOVED


@inline
def _reduce(state, row, place, theirs, size_bytes):
    """Combine received data with the data in place, by the reduce kernel."""
    put(state, DESTINATION, place)
    theirs_first = get(row, THEIRS_FIRST) != 0
    put(state, OPERANDS, theirs if theirs_first else place)
    put(state, OPERANDS + 1, place if theirs_first else theirs)
    count = size_bytes // get(state, ITEM_BYTES) * get(state, PARTS)
    call_reduce(
        get(state, KERNEL),
        state + 8 * DESTINATION,
        1,
        state + 8 * OPERANDS,
        2,
        count,
        get(state, PARAMETER),
        0,
    )


@inline
def _place(state, link, number):
    """Reduce or copy what waits in scratch memory, as far as allowed; return whether any was."""
    begin, end = get(link, BEGIN), get(link, END)
    if begin == end:
        return False
    row, plan = row_of(state, number), plan_of(state, number)
    size_bytes = min(end - begin, _writable(state, number))
    received = get(plan, RECEIVED)
    place = get(state, WORK) + get(row, RECEIVE_OFFSET) + received
    theirs = get(link, SCRATCH) + begin
    reduces = get(row, REDUCES) != 0
    if reduces:
        size_bytes -= size_bytes % get(state, ITEM_BYTES)
    if size_bytes <= 0:
        return False
    if reduces:
        _reduce(state, row, place, theirs, size_bytes)
    else:
        _memmove(place, theirs, size_bytes)
    put(plan, RECEIVED, received + size_bytes)
    begin += size_bytes
    if end - begin < 64:  # an incomplete item, or nothing
        _memmove(get(link, SCRATCH), get(link, SCRATCH) + begin, end - begin)
        begin, end = 0, end - begin
    put(link, BEGIN, begin)
    put(link, END, end)
    return True


@inline
def _end_receives(state, link, number):
    """Go on to the link's next row if this one is complete, and over rows without bytes."""
    while number >= 0:
        plan = plan_of(state, number)
        if get(plan, RECEIVED) != get(row_of(state, number), RECEIVE_BYTES):
            break
        put(plan, RECEIVE_DONE, 1)
        put(state, OPEN, get(state, OPEN) - 1)
        number = get(plan, NEXT_RECEIVE)
    put(link, RECEIVE_ROW, number)
    go_on(state, FIRST_RECEIVE, RECEIVE_DONE)


@inline
def receive_some(state, link):
    """Receive on a link, and put received data in its place."""
    number = get(link, RECEIVE_ROW)
    if number < 0:
        return IDLE
    if get(link, HEADER_CAME) < HEADER_BYTES:
        result = _receive_header(state, link, number)
        if result != MOVED or get(link, HEADER_CAME) < HEADER_BYTES:
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
