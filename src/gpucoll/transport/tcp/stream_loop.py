"""A schedule of sends, receives and reductions over TCP connections, as one compiled loop.

The loop serves all connections in turn, without blocking: it sends what may be sent, receives, and
reduces. Only one header for each direction of a connection that a call uses frames the bytes, so
reduced data can be sent on at once. While nothing moves, the loop yields for a while, then sleeps
in ``poll`` until something can move. Python's signals are checked between slices.

`gpucoll.transport.tcp.streams` describes the rows, and which of them are allowed.
"""

from __future__ import annotations

import numpy as np

from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import call_reduce, load64
from gpucoll.transport.shared.flags import NANOSECONDS, yield_once
from gpucoll.transport.shared.libc import (
    CLOCK_MONOTONIC,
    EAGAIN,
    EINTR,
    MSG_DONTWAIT,
    MSG_NOSIGNAL,
    POLLIN,
    POLLOUT,
    clock_gettime,
    errno,
    memmove,
    poll,
    recv,
    send,
    sendmsg,
)
from gpucoll.transport.tcp.stream_plan import begin, is_sent_first
from gpucoll.transport.tcp.stream_words import (
    HEADER_BYTES,
    HEADER_WORDS,
    IDLE,
    MOVED,
    SCRATCH_BYTES,
    Link,
    Plan,
    Row,
    State,
    StreamStatus,
    go_on,
    link_of,
    plan_of,
    row_of,
)

# --- sending --------------------------------------------------------------------------------------


LEAST_PASSED_ON = 64 << 10
"""Forwarded data goes in pieces of at least this size, except for the last piece."""
MOST_BYTES = 1 << 20
"""How much one system call sends or receives at most, so that the other links get their turn."""


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
    return sendmsg(np.int32(link.fd), message.address, flags)


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
        taken = send(np.int32(link.fd), address, size_bytes, flags)
    if taken < 0:
        return failed(state)
    of_header = min(taken, HEADER_BYTES - header_sent)
    link.header_sent = header_sent + of_header
    sent += taken - of_header
    plan.sent = sent
    if header_sent + of_header == HEADER_BYTES and sent == row.send_bytes:
        _end_send(state, link, number)
    return MOVED


# --- receiving ------------------------------------------------------------------------------------

# Received data goes straight into place, or into scratch memory for reducing. It may overwrite data
# that an earlier row sends or receives; `_writable` tells how far that is allowed. Data that comes
# too early waits in scratch memory, and then in the connection.


BEHIND_HEADER = 4 << 10
"""How much data that is not reduced is received with the header, and then copied to its place."""
LEAST_ROOM = 64 << 10


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
    got = recv(np.int32(link.fd), address, size_bytes, flags)
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
        memmove(link.scratch, link.scratch + begin, end - begin)
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
        memmove(place, theirs, size_bytes)
    plan.received = received + size_bytes
    begin += size_bytes
    if end - begin < 64:  # an incomplete item, or nothing
        memmove(link.scratch, link.scratch + begin, end - begin)
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


# --- the loop -------------------------------------------------------------------------------------


TIME_SLICE_NS = 500_000
"""A yield that takes longer than this has given away a time slice; no more yields follow."""
MILLISECOND_NS = 1_000_000


@inline
def now_ns(state: State) -> int:
    """Return the monotonic clock, in nanoseconds."""
    clock_gettime(np.int32(CLOCK_MONOTONIC), state.clock.address)
    return state.clock[0] * NANOSECONDS + state.clock[1]


@inline
def _turn_of_link(state: State, number: int) -> int:
    """Send and receive on one link; return `MOVED`, `IDLE` or a status."""
    link = link_of(state, number)
    sent = send_some(state, link)
    error = state.errno
    if sent >= 0 and link.header_came == HEADER_BYTES:
        state.link = number
        return sent
    received = receive_some(state, link)
    # Received data tells more than a closed connection.
    if sent >= 0 and received != StreamStatus.MISMATCH:
        state.errno = error
        received = sent
    if received >= 0:
        state.link = number
        return received
    return max(sent, received)


@inline
def _turn(state: State) -> int:
    """Serve each link once."""
    result = IDLE
    for number in range(state.n_links):
        of_link = _turn_of_link(state, number)
        if of_link >= 0:
            return of_link
        result = max(result, of_link)
    return result


@inline
def _events(state: State, link: Link) -> int:
    """Return the events to poll a link for."""
    events, number = 0, link.receive_row
    if number >= 0:
        is_wanted = link.header_came < HEADER_BYTES or wanted(state, link, number) > 0
        events |= POLLIN if is_wanted else 0
    number = link.send_row
    if number >= 0 and sendable(state, number) >= 0:
        events |= POLLOUT
    return events


@inline
def _sleep(state: State, duration_ns: int) -> int:
    """Sleep until something can move, for `duration_ns` at most; return a status."""
    fds, count = state.poll_fds, 0
    for number in range(state.n_links):
        link = link_of(state, number)
        events = _events(state, link)
        if events != 0:  # pollfd is {int32 fd, int16 events, int16 revents}
            fds[count] = link.fd | (events << 32)
            count += 1
    milliseconds = (duration_ns + MILLISECOND_NS - 1) // MILLISECOND_NS
    found = poll(fds.address, count, np.int32(milliseconds))
    # After a signal, Python's handlers run before the next slice.
    return StreamStatus.AGAIN if found < 0 else IDLE


@inline
def _wait(state: State, time_ns: int, duration_ns: int) -> int:
    """Wait a little; return a status that ends the slice, or `IDLE`."""
    tries = state.idle
    state.idle = tries + 1
    if tries >= state.yields:
        return _sleep(state, duration_ns)
    yield_once()
    if now_ns(state) - time_ns > TIME_SLICE_NS:
        state.idle = state.yields
    return IDLE


@compiled_when_used()
def run_streams(state: State) -> int:
    """Begin a call, or go on with it, for at most one slice; return a status."""
    if state.begun == 0:
        status = begin(state)
        if status != StreamStatus.AGAIN:
            return status
    end_ns, deadline_ns = now_ns(state) + state.slice_ns, state.deadline_ns
    while True:
        abort = state.abort
        if abort != 0 and load64(abort) != 0:
            return StreamStatus.ABORTED
        result = _turn(state)
        if result >= 0:
            return result
        if state.open == 0:
            return StreamStatus.DONE
        if min(state.first_receive, state.first_send) >= state.until:
            return StreamStatus.AGAIN
        time_ns = now_ns(state)
        if time_ns >= deadline_ns:
            return StreamStatus.DEADLINE
        if time_ns >= end_ns:
            return StreamStatus.AGAIN
        if result == MOVED:
            state.idle = 0
        elif state.stops_idle != 0:
            return StreamStatus.AGAIN
        else:
            status = _wait(state, time_ns, min(end_ns, deadline_ns) - time_ns)
            if status >= 0:
                return status
