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
from gpucoll.kernels.cpu.memory import get, load64, put
from gpucoll.transport.tcp.stream_plan import begin
from gpucoll.transport.tcp.stream_receiving import receive_some, wanted
from gpucoll.transport.tcp.stream_sending import send_some, sendable
from gpucoll.transport.tcp.stream_state import (
    ABORT,
    ABORTED,
    AGAIN,
    BEGUN,
    CLOCK,
    DEADLINE,
    DEADLINE_NS,
    DONE,
    ERRNO,
    FD,
    FIRST_RECEIVE,
    FIRST_SEND,
    HEADER_CAME,
    IDLE,
    IDLE_TURNS,
    LINK,
    MISMATCH,
    MOVED,
    N_LINKS,
    OPEN,
    POLL_FDS,
    RECEIVE_ROW,
    SEND_ROW,
    SLICE_NS,
    STOPS_IDLE,
    UNTIL,
    YIELDS,
    link_of,
)
from gpucoll.transport.tcp.stream_words import HEADER_BYTES

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
def now_ns(state):
    """Return the monotonic clock, in nanoseconds."""
    _clock_gettime(np.int32(CLOCK_MONOTONIC), state + 8 * CLOCK)
    return get(state, CLOCK) * NANOSECONDS + get(state, CLOCK + 1)


@inline
def _turn_of_link(state, number):
    """Send and receive on one link; return `MOVED`, `IDLE` or a status."""
    link = link_of(state, number)
    sent = send_some(state, link)
    error = get(state, ERRNO)
    if sent >= 0 and get(link, HEADER_CAME) == HEADER_BYTES:
        put(state, LINK, number)
        return sent
    received = receive_some(state, link)
    if sent >= 0 and received != MISMATCH:  # received data tells more than a closed connection
        put(state, ERRNO, error)
        received = sent
    if received >= 0:
        put(state, LINK, number)
        return received
    return max(sent, received)


@inline
def _turn(state):
    """Serve each link once."""
    result = IDLE
    for number in range(get(state, N_LINKS)):
        of_link = _turn_of_link(state, number)
        if of_link >= 0:
            return of_link
        result = max(result, of_link)
    return result


@inline
def _events(state, link):
    """Return the events to poll a link for."""
    events, number = 0, get(link, RECEIVE_ROW)
    if number >= 0:
        is_wanted = get(link, HEADER_CAME) < HEADER_BYTES or wanted(state, link, number) > 0
        events |= POLLIN if is_wanted else 0
    number = get(link, SEND_ROW)
    if number >= 0 and sendable(state, number) >= 0:
        events |= POLLOUT
    return events


@inline
def _sleep(state, duration_ns):
    """Sleep until something can move, for `duration_ns` at most; return a status."""
    fds, count = get(state, POLL_FDS), 0
    for number in range(get(state, N_LINKS)):
        link = link_of(state, number)
        events = _events(state, link)
        if events != 0:  # pollfd is {int32 fd, int16 events, int16 revents}
            put(fds, count, get(link, FD) | (events << 32))
            count += 1
    milliseconds = (duration_ns + MILLISECOND_NS - 1) // MILLISECOND_NS
    found = _poll(fds, count, np.int32(milliseconds))
    return AGAIN if found < 0 else IDLE  # a signal: Python's handlers run before the next slice


@inline
def _wait(state, time_ns, duration_ns):
    """Wait a little; return a status that ends the slice, or `IDLE`."""
    tries = get(state, IDLE_TURNS)
    put(state, IDLE_TURNS, tries + 1)
    if tries >= get(state, YIELDS):
        return _sleep(state, duration_ns)
    _sched_yield()
    if now_ns(state) - time_ns > TIME_SLICE_NS:
        put(state, IDLE_TURNS, get(state, YIELDS))
    return IDLE


@compiled_when_used()
def run_streams(state):
    """Begin a call, or go on with it, for at most one slice; return a status."""
    if get(state, BEGUN) == 0:
        status = begin(state)
        if status != AGAIN:
            return status
    end_ns, deadline_ns = now_ns(state) + get(state, SLICE_NS), get(state, DEADLINE_NS)
    while True:
        abort = get(state, ABORT)
        if abort != 0 and load64(abort) != 0:
            return ABORTED
        result = _turn(state)
        if result >= 0:
            return result
        if get(state, OPEN) == 0:
            return DONE
        if min(get(state, FIRST_RECEIVE), get(state, FIRST_SEND)) >= get(state, UNTIL):
            return AGAIN
        time_ns = now_ns(state)
        if time_ns >= deadline_ns:
            return DEADLINE
        if time_ns >= end_ns:
            return AGAIN
        if result == MOVED:
            put(state, IDLE_TURNS, 0)
        elif get(state, STOPS_IDLE) != 0:
            return AGAIN
        else:
            status = _wait(state, time_ns, min(end_ns, deadline_ns) - time_ns)
            if status >= 0:
                return status
