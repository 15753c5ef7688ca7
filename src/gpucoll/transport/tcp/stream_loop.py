"""A schedule of sends, receives and reductions over TCP connections, as one compiled loop.

The loop serves all connections in turn, without blocking: it sends what may be sent, receives, and
reduces. Only one header for each direction of a connection that a call uses frames the bytes, so
reduced data can be sent on at once. While nothing moves, the loop yields for a while, then sleeps
in ``poll`` until something can move. Python's signals are checked between slices.

`gpucoll.transport.tcp.streams` describes the rows, and which of them are allowed.
"""

from __future__ import annotations

import numpy as np

from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import load64
from gpucoll.transport.tcp.stream_plan import begin
from gpucoll.transport.tcp.stream_receiving import receive_some, wanted
from gpucoll.transport.tcp.stream_sending import send_some, sendable
from gpucoll.transport.tcp.stream_state import IDLE, MOVED, link_of
from gpucoll.transport.tcp.stream_words import HEADER_BYTES, Link, State, StreamStatus

TIME_SLICE_NS = 500_000
"""A yield that takes longer than this has given away a time slice; no more yields follow."""
NANOSECONDS = 1_000_000_000
MILLISECOND_NS = 1_000_000
CLOCK_MONOTONIC = 1
POLLIN, POLLOUT = 1, 4

_i64, _i32 = types.int64, types.int32
_poll = types.ExternalFunction("poll", _i32(_i64, _i64, _i32))
_sched_yield = types.ExternalFunction("sched_yield", _i32())
_clock_gettime = types.ExternalFunction("clock_gettime", _i32(_i32, _i64))


@inline
def now_ns(state: State) -> int:
    """Return the monotonic clock, in nanoseconds."""
    _clock_gettime(np.int32(CLOCK_MONOTONIC), state.clock.address)
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
    found = _poll(fds.address, count, np.int32(milliseconds))
    # After a signal, Python's handlers run before the next slice.
    return StreamStatus.AGAIN if found < 0 else IDLE


@inline
def _wait(state: State, time_ns: int, duration_ns: int) -> int:
    """Wait a little; return a status that ends the slice, or `IDLE`."""
    tries = state.idle
    state.idle = tries + 1
    if tries >= state.yields:
        return _sleep(state, duration_ns)
    _sched_yield()
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
