"""Find out what may be sent on a connection now, and send it."""

from __future__ import annotations

import numpy as np

from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.memory import get, load32, put, signed32
from gpucoll.transport.tcp.stream_state import (
    ERRNO,
    FD,
    FIRST,
    FIRST_RECEIVE,
    FIRST_SEND,
    GATE,
    GONE,
    HEADER,
    HEADER_SENT,
    IDLE,
    MESSAGE,
    MOVED,
    NEXT_SEND,
    OPEN,
    READY,
    RECEIVE_DONE,
    RECEIVED,
    SEND_BYTES,
    SEND_DONE,
    SEND_OFFSET,
    SEND_ROW,
    SENT,
    SOURCE,
    STEP,
    VECTORS,
    WORK,
    go_on,
    plan_of,
    row_of,
)
from gpucoll.transport.tcp.stream_words import HEADER_BYTES

LEAST_PASSED_ON = 64 << 10
"""Forwarded data goes in pieces of at least this size, except for the last piece."""
MOST_BYTES = 1 << 20
"""How much one system call sends or receives at most, so that the other links get their turn."""
MSG_DONTWAIT, MSG_NOSIGNAL = 0x40, 0x4000
EINTR, EAGAIN = 4, 11

_i64, _i32 = types.int64, types.int32
_send = types.ExternalFunction("send", _i64(_i32, _i64, _i64, _i32))
_sendmsg = types.ExternalFunction("sendmsg", _i64(_i32, _i64, _i32))
_errno_location = types.ExternalFunction("__errno_location", _i64())


@inline
def errno():
    """Return the errno of this thread's last system call."""
    return signed32(load32(_errno_location()))


@inline
def failed(state):
    """Return the result for a failed system call: `IDLE` if it may be repeated, or `GONE`."""
    number = errno()
    if number == EAGAIN or number == EINTR:
        return IDLE
    put(state, ERRNO, number)
    return GONE


@inline
def _waits(state, row, number):
    """Return whether a receive of an earlier step in its section is not complete."""
    first = max(get(row, FIRST), get(state, FIRST_RECEIVE))
    while first < number and get(plan_of(state, first), RECEIVE_DONE) != 0:
        first += 1
    return first < number and get(row_of(state, first), STEP) < get(row, STEP)


@inline
def sendable(state, number):
    """Return up to which byte a row may be sent now; -1: it may not begin yet."""
    row, plan = row_of(state, number), plan_of(state, number)
    source = get(plan, SOURCE)
    if get(row, GATE) > get(state, READY):
        return -1
    if source < 0:
        return -1 if _waits(state, row, number) else get(row, SEND_BYTES)
    if get(plan_of(state, source), RECEIVE_DONE) != 0:
        return get(row, SEND_BYTES)
    came = get(plan_of(state, source), RECEIVED)
    return -1 if came - get(plan, SENT) < LEAST_PASSED_ON else came


@inline
def _send_with_header(state, link, header_sent, address, size_bytes):
    """Send the rest of the header and the following bytes in one system call."""
    vectors, message = state + 8 * VECTORS, state + 8 * MESSAGE
    put(vectors, 0, state + 8 * HEADER + header_sent)
    put(vectors, 1, HEADER_BYTES - header_sent)
    put(vectors, 2, address)
    put(vectors, 3, size_bytes)
    put(message, 2, vectors)  # struct msghdr; all else is 0
    put(message, 3, 2)
    flags = np.int32(MSG_DONTWAIT | MSG_NOSIGNAL)
    return _sendmsg(np.int32(get(link, FD)), message, flags)


@inline
def _end_send(state, link, number):
    plan = plan_of(state, number)
    put(plan, SEND_DONE, 1)
    put(link, SEND_ROW, get(plan, NEXT_SEND))
    put(state, OPEN, get(state, OPEN) - 1)
    go_on(state, FIRST_SEND, SEND_DONE)


@inline
def send_some(state, link):
    """Send what may be sent on a link, as far as the kernel takes it."""
    number = get(link, SEND_ROW)
    if number < 0:
        return IDLE
    ready = sendable(state, number)
    if ready < 0:
        return IDLE
    row, plan = row_of(state, number), plan_of(state, number)
    sent, header_sent = get(plan, SENT), get(link, HEADER_SENT)
    address = get(state, WORK) + get(row, SEND_OFFSET) + sent
    size_bytes = min(ready - sent, MOST_BYTES)
    taken = 0
    if header_sent < HEADER_BYTES:
        taken = _send_with_header(state, link, header_sent, address, size_bytes)
    elif size_bytes > 0:
        flags = np.int32(MSG_DONTWAIT | MSG_NOSIGNAL)
        taken = _send(np.int32(get(link, FD)), address, size_bytes, flags)
    if taken < 0:
        return failed(state)
    of_header = min(taken, HEADER_BYTES - header_sent)
    put(link, HEADER_SENT, header_sent + of_header)
    sent += taken - of_header
    put(plan, SENT, sent)
    if header_sent + of_header == HEADER_BYTES and sent == get(row, SEND_BYTES):
        _end_send(state, link, number)
    return MOVED
