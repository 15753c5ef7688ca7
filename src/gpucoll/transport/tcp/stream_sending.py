"""Find out what may be sent on a connection now, and send it."""

from __future__ import annotations

import numpy as np

from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.memory import load32, signed32
from gpucoll.transport.tcp.stream_state import IDLE, MOVED, go_on, plan_of, row_of
from gpucoll.transport.tcp.stream_words import HEADER_BYTES, Link, Plan, Row, State, StreamStatus

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
def errno() -> int:
    """Return the errno of this thread's last system call."""
    return signed32(load32(_errno_location()))


@inline
def failed(state: State) -> int:
    """Return the result for a failed system call: `IDLE` if it may be repeated, or `GONE`."""
    number = errno()
    if number == EAGAIN or number == EINTR:
        return IDLE
    state.errno = number
    return StreamStatus.GONE


@inline
def _waits(state: State, row: Row, number: int) -> bool:
    """Return whether a receive of an earlier step in its section is not complete."""
    first = max(row.first, state.first_receive)
    while first < number and plan_of(state, first).receive_done != 0:
        first += 1
    return first < number and row_of(state, first).step < row.step


@inline
def sendable(state: State, number: int) -> int:
    """Return up to which byte a row may be sent now; -1: it may not begin yet."""
    row, plan = row_of(state, number), plan_of(state, number)
    source = plan.source
    if row.gate > state.ready:
        return -1
    if source < 0:
        return -1 if _waits(state, row, number) else row.send_bytes
    if plan_of(state, source).receive_done != 0:
        return row.send_bytes
    came = plan_of(state, source).received
    return -1 if came - plan.sent < LEAST_PASSED_ON else came


@inline
def _send_with_header(
    state: State, link: Link, header_sent: int, address: int, size_bytes: int
) -> int:
    """Send the rest of the header and the following bytes in one system call."""
    vectors, message = state.vectors, state.message
    vectors[0] = state.header.address + header_sent
    vectors[1] = HEADER_BYTES - header_sent
    vectors[2] = address
    vectors[3] = size_bytes
    message[2] = vectors.address  # struct msghdr; all else is 0
    message[3] = 2
    flags = np.int32(MSG_DONTWAIT | MSG_NOSIGNAL)
    return _sendmsg(np.int32(link.fd), message.address, flags)


@inline
def _end_send(state: State, link: Link, number: int) -> None:
    plan = plan_of(state, number)
    plan.send_done = 1
    link.send_row = plan.next_send
    state.open -= 1
    go_on(state, State.first_send, Plan.send_done)


@inline
def send_some(state: State, link: Link) -> int:
    """Send what may be sent on a link, as far as the kernel takes it."""
    number = link.send_row
    if number < 0:
        return IDLE
    ready = sendable(state, number)
    if ready < 0:
        return IDLE
    row, plan = row_of(state, number), plan_of(state, number)
    sent, header_sent = plan.sent, link.header_sent
    address = state.work + row.send_offset + sent
    size_bytes = min(ready - sent, MOST_BYTES)
    taken = 0
    if header_sent < HEADER_BYTES:
        taken = _send_with_header(state, link, header_sent, address, size_bytes)
    elif size_bytes > 0:
        flags = np.int32(MSG_DONTWAIT | MSG_NOSIGNAL)
        taken = _send(np.int32(link.fd), address, size_bytes, flags)
    if taken < 0:
        return failed(state)
    of_header = min(taken, HEADER_BYTES - header_sent)
    link.header_sent = header_sent + of_header
    sent += taken - of_header
    plan.sent = sent
    if header_sent + of_header == HEADER_BYTES and sent == row.send_bytes:
        _end_send(state, link, number)
    return MOVED
