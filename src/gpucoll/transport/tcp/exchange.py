"""Exchange small parts between leaders in compiled code: every host gets every host's part.

This is Bruck's all-gather: in step s a leader sends what it has, up to 2**s parts, to the leader
2**s hosts after it, and receives as many from the leader 2**s hosts before it. So each leader
learns of every host's call in the same steps as the data takes, whether all calls are the same or
not.

Every connection carries at most one message of a call in each direction, followed by that of the
next call. Nothing beyond a message is read: a leader that sends the next message has received all
of this one.
"""

from __future__ import annotations

import numpy as np

from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import call_loop, get, load32, load64, put, signed32
from gpucoll.transport.tcp.exchange_words import (
    MAGIC,
    MESSAGE_WORDS,
    PART_WORDS,
    STEP_WORDS,
    Outcome,
    PartKind,
    Word,
)

HERE, N_HOSTS, ABORT = int(Word.HERE), int(Word.N_HOSTS), int(Word.ABORT)
STEPS, N_STEPS, STEP = int(Word.STEPS), int(Word.N_STEPS), int(Word.STEP)
HELD, HELD_BYTES, CAPACITY = int(Word.HELD), int(Word.HELD_BYTES), int(Word.CAPACITY)
DIGEST, KIND, NUMBER = int(Word.DIGEST), int(Word.KIND), int(Word.NUMBER)
SENT, CAME, COMES = int(Word.SENT), int(Word.CAME), int(Word.COMES)
OUTCOME, LINK, ERRNO = int(Word.OUTCOME), int(Word.LINK), int(Word.ERRNO)
PARTS, CLOCK, _GO_ON = int(Word.PARTS), int(Word.CLOCK), int(Word.GO_ON)
SENT_HEADER, CAME_HEADER = int(Word.SENT_HEADER), int(Word.CAME_HEADER)
MESSAGE, VECTORS, POLL_FDS = int(Word.MESSAGE), int(Word.VECTORS), int(Word.POLL_FDS)
AGREED, DIFFERS, AGAIN = int(Outcome.AGREED), int(Outcome.DIFFERS), int(Outcome.AGAIN)
GONE, ABORTED, GARBLED = int(Outcome.GONE), int(Outcome.ABORTED), int(Outcome.GARBLED)
FURTHER = int(PartKind.FURTHER)
HEADER_BYTES, PART_BYTES = 8 * MESSAGE_WORDS, 8 * PART_WORDS
IDLE, MOVED = -2, -1
YIELDS = 100
TIME_SLICE_NS = 500_000
"""A yield that takes longer than this has given away a time slice; no more yields follow."""
NANOSECONDS, MILLISECOND_NS = 1_000_000_000, 1_000_000
CLOCK_MONOTONIC = 1
POLLIN, POLLOUT = 1, 4
MSG_DONTWAIT, MSG_NOSIGNAL = 0x40, 0x4000
EINTR, EAGAIN = 4, 11

_i64, _i32 = types.int64, types.int32
_send = types.ExternalFunction("send", _i64(_i32, _i64, _i64, _i32))
_recv = types.ExternalFunction("recv", _i64(_i32, _i64, _i64, _i32))
_sendmsg = types.ExternalFunction("sendmsg", _i64(_i32, _i64, _i32))
_recvmsg = types.ExternalFunction("recvmsg", _i64(_i32, _i64, _i32))
_poll = types.ExternalFunction("poll", _i32(_i64, _i64, _i32))
_sched_yield = types.ExternalFunction("sched_yield", _i32())
_clock_gettime = types.ExternalFunction("clock_gettime", _i32(_i32, _i64))
_errno_location = types.ExternalFunction("__errno_location", _i64())


@inline
def whole_words(size_bytes):
    """Return a size rounded up to whole words."""
    return (size_bytes + 7) & -8


@inline
def now_ns(words):
    """Return the monotonic clock, in nanoseconds."""
    _clock_gettime(np.int32(CLOCK_MONOTONIC), words + 8 * CLOCK)
    return get(words, CLOCK) * NANOSECONDS + get(words, CLOCK + 1)


@inline
def step_of(words):
    """Return the address of the current step's row."""
    return get(words, STEPS) + 8 * STEP_WORDS * get(words, STEP)


@inline
def sender_of(words):
    """Return the host that a step's message comes from."""
    n_hosts = get(words, N_HOSTS)
    return (get(words, HERE) - (1 << get(words, STEP)) + n_hosts) % n_hosts


@inline
def _size_of_parts(words, count):
    """Return the size in bytes of the first `count` parts that are here."""
    at, held = 0, get(words, HELD)
    for _ in range(count):
        at += PART_BYTES + whole_words(get(held + at, 2))
    return at


@inline
def begin_step(words):
    """Make the header of a step's message, and store the expected size of the one to receive."""
    n_hosts, count = get(words, N_HOSTS), get(step_of(words), 2)
    comes, sizes = 0, get(words, PARTS) + 8 * n_hosts
    for place in range(count):
        host = (sender_of(words) - place + n_hosts) % n_hosts
        comes += PART_BYTES + whole_words(get(sizes, host))
    put(words, COMES, comes)
    put(words, SENT, 0)
    put(words, CAME, 0)
    size_bytes = _size_of_parts(words, get(step_of(words), 2))
    put(words, SENT_HEADER, MAGIC)
    put(words, SENT_HEADER + 1, get(words, NUMBER))
    put(words, SENT_HEADER + 2, get(words, STEP))
    put(words, SENT_HEADER + 3, size_bytes)


@inline
def owner_of(words, host):
    """Return the word that identifies a part: its call's number and its host."""
    return (get(words, NUMBER) << 32) | host


@inline
def begin_exchange(words, digest, kind, size_bytes):
    """Begin an exchange with this host's data, which follows the room for its part's header.

    The expected bytes of each host follow the addresses at `PARTS`.
    """
    held = get(words, HELD)
    put(held, 0, digest)
    put(held, 1, kind)
    put(held, 2, size_bytes)
    put(held, 3, owner_of(words, get(words, HERE)))
    put(words, DIGEST, digest)
    put(words, KIND, kind)
    put(words, HELD_BYTES, PART_BYTES + whole_words(size_bytes))
    put(words, OUTCOME, AGAIN)
    put(words, STEP, 0)
    begin_step(words)


@inline
def _failed(words, host):
    """Return the result for a failed system call: `IDLE` if it may be repeated, or `GONE`."""
    number = signed32(load32(_errno_location()))
    if number == EAGAIN or number == EINTR:
        return IDLE
    put(words, ERRNO, number)
    put(words, LINK, host)
    return GONE


@inline
def _two_vectors(words, first, first_bytes, second, second_bytes):
    """Fill in a message header for two pieces of memory; return its address."""
    vectors, message = words + 8 * VECTORS, words + 8 * MESSAGE
    put(vectors, 0, first)
    put(vectors, 1, first_bytes)
    put(vectors, 2, second)
    put(vectors, 3, second_bytes)
    put(message, 2, vectors)  # struct msghdr; all else is 0
    put(message, 3, 2)
    return message


@inline
def _send_some(words):
    """Send the rest of a step's message, as far as the kernel takes it."""
    sent, whole = get(words, SENT), HEADER_BYTES + get(words, SENT_HEADER + 3)
    if sent == whole:
        return IDLE
    fd, flags = np.int32(get(step_of(words), 0)), np.int32(MSG_DONTWAIT | MSG_NOSIGNAL)
    held = get(words, HELD)
    if sent < HEADER_BYTES:
        start = words + 8 * SENT_HEADER + sent
        size_bytes = whole - HEADER_BYTES
        message = _two_vectors(words, start, HEADER_BYTES - sent, held, size_bytes)
        taken = _sendmsg(fd, message, flags)
    else:
        taken = _send(fd, held + sent - HEADER_BYTES, whole - sent, flags)
    if taken < 0:
        return _failed(words, (get(words, HERE) + (1 << get(words, STEP))) % get(words, N_HOSTS))
    put(words, SENT, sent + taken)
    return MOVED


@inline
def _is_header_wrong(words):
    """Return whether the received header is not one of this step."""
    header, size_bytes = words + 8 * CAME_HEADER, get(words, CAME_HEADER + 3)
    if get(header, 0) != MAGIC or get(header, 1) != get(words, NUMBER):
        return True
    if get(header, 2) != get(words, STEP) or size_bytes & 7 != 0:
        return True
    least_bytes = PART_BYTES * get(step_of(words), 2)
    return size_bytes < least_bytes or size_bytes > get(words, CAPACITY) - get(words, HELD_BYTES)


@inline
def _receive_some(words):
    """Receive the rest of a step's message, as far as it has come."""
    came, whole = get(words, CAME), HEADER_BYTES
    if came >= HEADER_BYTES:
        whole += get(words, CAME_HEADER + 3)
        if came == whole:
            return IDLE
    fd, flags = np.int32(get(step_of(words), 1)), np.int32(MSG_DONTWAIT)
    place = get(words, HELD) + get(words, HELD_BYTES)
    if came < HEADER_BYTES:
        start = words + 8 * CAME_HEADER + came
        expected = min(get(words, COMES), get(words, CAPACITY) - get(words, HELD_BYTES))
        message = _two_vectors(words, start, HEADER_BYTES - came, place, expected)
        got = _recvmsg(fd, message, flags)
    else:
        got = _recv(fd, place + came - HEADER_BYTES, whole - came, flags)
    if got < 0:
        return _failed(words, sender_of(words))
    if got == 0:
        put(words, ERRNO, 0)
        put(words, LINK, sender_of(words))
        return GONE
    put(words, CAME, came + got)
    if came < HEADER_BYTES <= came + got:
        size_bytes = get(words, CAME_HEADER + 3)
        if _is_header_wrong(words) or came + got > HEADER_BYTES + size_bytes:
            put(words, LINK, sender_of(words))
            return GARBLED
    return MOVED


@inline
def _end_step(words):
    """Go on to the next step if this one is over; return whether it was."""
    came, sent = get(words, CAME), get(words, SENT)
    if came < HEADER_BYTES or came < HEADER_BYTES + get(words, CAME_HEADER + 3):
        return False
    if sent < HEADER_BYTES + get(words, SENT_HEADER + 3):
        return False
    put(words, HELD_BYTES, get(words, HELD_BYTES) + came - HEADER_BYTES)
    put(words, STEP, get(words, STEP) + 1)
    return True


@inline
def find_parts(words):
    """Store where each host's data lies; return whether all hosts make the same call."""
    n_hosts, here, held = get(words, N_HOSTS), get(words, HERE), get(words, HELD)
    end, at, result = get(words, HELD_BYTES), 0, AGREED
    for place in range(n_hosts):
        host = (here - place + n_hosts) % n_hosts
        part = held + at
        is_whole = end - at >= PART_BYTES
        size_bytes = get(part, 2) if is_whole else -1
        rest = end - at - PART_BYTES
        if size_bytes < 0 or size_bytes > rest or get(part, 3) != owner_of(words, host):
            put(words, LINK, host)
            return GARBLED
        if get(part, 0) != get(words, DIGEST) or get(part, 1) != get(words, KIND):
            result = DIFFERS
        if size_bytes != get(get(words, PARTS), n_hosts + host):
            result = DIFFERS
        put(get(words, PARTS), host, part + PART_BYTES)
        at += PART_BYTES + whole_words(size_bytes)
    return DIFFERS if get(words, KIND) == FURTHER else result


@inline
def _sleep(words, duration_ns):
    """Sleep until something can move, for `duration_ns` at most; return whether a signal came."""
    fds, count, step = words + 8 * POLL_FDS, 0, step_of(words)
    came = get(words, CAME)
    if came < HEADER_BYTES or came < HEADER_BYTES + get(words, CAME_HEADER + 3):
        put(fds, count, get(step, 1) | (POLLIN << 32))  # {int32 fd, int16 events, int16 revents}
        count += 1
    if get(words, SENT) < HEADER_BYTES + get(words, SENT_HEADER + 3):
        put(fds, count, get(step, 0) | (POLLOUT << 32))
        count += 1
    milliseconds = (duration_ns + MILLISECOND_NS - 1) // MILLISECOND_NS
    return _poll(fds, count, np.int32(milliseconds)) < 0


@inline
def _move(words):
    """Send and receive on a step's connections; return `MOVED`, `IDLE`, or how it has ended."""
    sent = _send_some(words)
    came = _receive_some(words)
    if came >= 0:
        return came
    return max(sent, came)


@inline
def go_on_until(words, end_ns):
    """Go on with an exchange; return its `Outcome`, or `AGAIN` at `end_ns` or after a signal."""
    idle = 0
    while get(words, STEP) < get(words, N_STEPS):
        result = _move(words)
        if result >= 0:
            return result
        if _end_step(words):
            if get(words, STEP) < get(words, N_STEPS):
                begin_step(words)
            idle = 0
        elif result == MOVED:
            idle = 0
        else:
            if load64(get(words, ABORT)) != 0:
                return ABORTED
            time_ns = now_ns(words)
            if time_ns >= end_ns:
                return AGAIN
            idle += 1
            if idle > YIELDS:
                if _sleep(words, end_ns - time_ns):
                    return AGAIN
            else:
                _sched_yield()
                if now_ns(words) - time_ns > TIME_SLICE_NS:
                    idle = YIELDS
    return find_parts(words)


@inline
def go_on_as_told(words, end_ns):
    """Go on with an exchange as `go_on_until` does, over whatever carries the messages."""
    if get(words, _GO_ON) != 0:
        return call_loop(get(words, _GO_ON), words, end_ns)
    return go_on_until(words, end_ns)


@compiled_when_used()
def proceed(words, slice_ns):
    """Go on with an exchange for one slice; store and return its `Outcome`."""
    outcome = go_on_as_told(words, now_ns(words) + slice_ns)
    put(words, OUTCOME, outcome)
    return outcome


@compiled_when_used()
def begin(words, digest, kind):
    """Begin an exchange without data; return 0."""
    for host in range(get(words, N_HOSTS)):
        put(get(words, PARTS), get(words, N_HOSTS) + host, 0)
    begin_exchange(words, digest, kind, 0)
    return 0
