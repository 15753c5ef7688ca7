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

from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import call_loop, load64
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
    poll,
    recv,
    recvmsg,
    sched_yield,
    send,
    sendmsg,
)
from gpucoll.transport.tcp.exchange_words import (
    MAGIC,
    MESSAGE_WORDS,
    Exchange,
    Outcome,
    Part,
    PartKind,
    Step,
)

HEADER_BYTES, PART_BYTES = 8 * MESSAGE_WORDS, Part.n_bytes
IDLE, MOVED = -2, -1
YIELDS = 100
TIME_SLICE_NS = 500_000
"""A yield that takes longer than this has given away a time slice; no more yields follow."""
NANOSECONDS, MILLISECOND_NS = 1_000_000_000, 1_000_000


@inline
def whole_words(size_bytes: int) -> int:
    """Return a size rounded up to whole words."""
    return (size_bytes + 7) & -8


@inline
def now_ns(words: Exchange) -> int:
    """Return the monotonic clock, in nanoseconds."""
    clock_gettime(np.int32(CLOCK_MONOTONIC), words.clock.address)
    return words.clock[0] * NANOSECONDS + words.clock[1]


@inline
def step_of(words: Exchange) -> Step:
    """Return the current step's row."""
    return Step(words.steps + Step.n_bytes * words.step)


@inline
def sender_of(words: Exchange) -> int:
    """Return the host that a step's message comes from."""
    n_hosts = words.n_hosts
    return (words.here - (1 << words.step) + n_hosts) % n_hosts


@inline
def _size_of_parts(words: Exchange, count: int) -> int:
    """Return the size in bytes of the first `count` parts that are here."""
    at, held = 0, words.held
    for _ in range(count):
        at += PART_BYTES + whole_words(Part(held + at).data_bytes)
    return at


@inline
def begin_step(words: Exchange) -> None:
    """Make the header of a step's message, and store the expected size of the one to receive."""
    n_hosts, count = words.n_hosts, step_of(words).n_parts
    comes, sizes = 0, Words(words.parts.address + 8 * n_hosts)
    for place in range(count):
        host = (sender_of(words) - place + n_hosts) % n_hosts
        comes += PART_BYTES + whole_words(sizes[host])
    words.comes = comes
    words.sent = 0
    words.came = 0
    size_bytes = _size_of_parts(words, step_of(words).n_parts)
    words.sent_header[0] = MAGIC
    words.sent_header[1] = words.number
    words.sent_header[2] = words.step
    words.sent_header[3] = size_bytes


@inline
def owner_of(words: Exchange, host: int) -> int:
    """Return the word that identifies a part: its call's number and its host."""
    return (words.number << 32) | host


@inline
def begin_exchange(words: Exchange, digest: int, kind: int, size_bytes: int) -> None:
    """Begin an exchange with this host's data, which follows the room for its part's header.

    The expected bytes of each host follow the addresses in `parts`.
    """
    part = Part(words.held)
    part.digest = digest
    part.kind = kind
    part.data_bytes = size_bytes
    part.owner = owner_of(words, words.here)
    words.digest = digest
    words.kind = kind
    words.held_bytes = PART_BYTES + whole_words(size_bytes)
    words.outcome = Outcome.AGAIN
    words.step = 0
    begin_step(words)


@inline
def failed(words: Exchange, host: int) -> int:
    """Return the result for a failed system call: `IDLE` if it may be repeated, or `GONE`."""
    number = errno()
    if number == EAGAIN or number == EINTR:
        return IDLE
    words.errno = number
    words.link = host
    return Outcome.GONE


@inline
def two_vectors(
    words: Exchange, first: int, first_bytes: int, second: int, second_bytes: int
) -> int:
    """Fill in a message header for two pieces of memory; return its address."""
    vectors, message = words.vectors, words.message
    vectors[0] = first
    vectors[1] = first_bytes
    vectors[2] = second
    vectors[3] = second_bytes
    message[2] = vectors.address  # struct msghdr; all else is 0
    message[3] = 2
    return message.address


@inline
def _send_some(words: Exchange) -> int:
    """Send the rest of a step's message, as far as the kernel takes it."""
    sent, whole = words.sent, HEADER_BYTES + words.sent_header[3]
    if sent == whole:
        return IDLE
    fd, flags = np.int32(step_of(words).to), np.int32(MSG_DONTWAIT | MSG_NOSIGNAL)
    held = words.held
    if sent < HEADER_BYTES:
        start = words.sent_header.address + sent
        size_bytes = whole - HEADER_BYTES
        message = two_vectors(words, start, HEADER_BYTES - sent, held, size_bytes)
        taken = sendmsg(fd, message, flags)
    else:
        taken = send(fd, held + sent - HEADER_BYTES, whole - sent, flags)
    if taken < 0:
        return failed(words, (words.here + (1 << words.step)) % words.n_hosts)
    words.sent = sent + taken
    return MOVED


@inline
def _is_header_wrong(words: Exchange) -> bool:
    """Return whether the received header is not one of this step."""
    header, size_bytes = words.came_header, words.came_header[3]
    if header[0] != MAGIC or header[1] != words.number:
        return True
    if header[2] != words.step or size_bytes & 7 != 0:
        return True
    least_bytes = PART_BYTES * step_of(words).n_parts
    return size_bytes < least_bytes or size_bytes > words.capacity - words.held_bytes


@inline
def _receive_some(words: Exchange) -> int:
    """Receive the rest of a step's message, as far as it has come."""
    came, whole = words.came, HEADER_BYTES
    if came >= HEADER_BYTES:
        whole += words.came_header[3]
        if came == whole:
            return IDLE
    fd, flags = np.int32(step_of(words).origin), np.int32(MSG_DONTWAIT)
    place = words.held + words.held_bytes
    if came < HEADER_BYTES:
        start = words.came_header.address + came
        expected = min(words.comes, words.capacity - words.held_bytes)
        message = two_vectors(words, start, HEADER_BYTES - came, place, expected)
        got = recvmsg(fd, message, flags)
    else:
        got = recv(fd, place + came - HEADER_BYTES, whole - came, flags)
    if got < 0:
        return failed(words, sender_of(words))
    if got == 0:
        words.errno = 0
        words.link = sender_of(words)
        return Outcome.GONE
    words.came = came + got
    if came < HEADER_BYTES <= came + got:
        size_bytes = words.came_header[3]
        if _is_header_wrong(words) or came + got > HEADER_BYTES + size_bytes:
            words.link = sender_of(words)
            return Outcome.GARBLED
    return MOVED


@inline
def _end_step(words: Exchange) -> bool:
    """Go on to the next step if this one is over; return whether it was."""
    came, sent = words.came, words.sent
    if came < HEADER_BYTES or came < HEADER_BYTES + words.came_header[3]:
        return False
    if sent < HEADER_BYTES + words.sent_header[3]:
        return False
    words.held_bytes += came - HEADER_BYTES
    words.step += 1
    return True


@inline
def find_parts(words: Exchange) -> int:
    """Store where each host's data lies; return whether all hosts make the same call."""
    n_hosts, here, held = words.n_hosts, words.here, words.held
    end, at, result = words.held_bytes, 0, Outcome.AGREED
    for place in range(n_hosts):
        host = (here - place + n_hosts) % n_hosts
        part = Part(held + at)
        is_whole = end - at >= PART_BYTES
        size_bytes = part.data_bytes if is_whole else -1
        rest = end - at - PART_BYTES
        if size_bytes < 0 or size_bytes > rest or part.owner != owner_of(words, host):
            words.link = host
            return Outcome.GARBLED
        if part.digest != words.digest or part.kind != words.kind:
            result = Outcome.DIFFERS
        if size_bytes != words.parts[n_hosts + host]:
            result = Outcome.DIFFERS
        words.parts[host] = part.address + PART_BYTES
        at += PART_BYTES + whole_words(size_bytes)
    return Outcome.DIFFERS if words.kind == PartKind.FURTHER else result


@inline
def _sleep(words: Exchange, duration_ns: int) -> bool:
    """Sleep until something can move, for `duration_ns` at most; return whether a signal came."""
    fds, count, step = words.poll_fds, 0, step_of(words)
    came = words.came
    if came < HEADER_BYTES or came < HEADER_BYTES + words.came_header[3]:
        fds[count] = step.origin | (POLLIN << 32)  # {int32 fd, int16 events, int16 revents}
        count += 1
    if words.sent < HEADER_BYTES + words.sent_header[3]:
        fds[count] = step.to | (POLLOUT << 32)
        count += 1
    milliseconds = (duration_ns + MILLISECOND_NS - 1) // MILLISECOND_NS
    return poll(fds.address, count, np.int32(milliseconds)) < 0


@inline
def _move(words: Exchange) -> int:
    """Send and receive on a step's connections; return `MOVED`, `IDLE`, or how it has ended."""
    sent = _send_some(words)
    came = _receive_some(words)
    if came >= 0:
        return came
    return max(sent, came)


@inline
def yielded(words: Exchange, idle: int, time_ns: int) -> int:
    """Yield once; return the number of yields in vain, or `YIELDS` + 1 if no more are to follow."""
    sched_yield()
    return idle + 1 if now_ns(words) - time_ns <= TIME_SLICE_NS else YIELDS + 1


@inline
def go_on_until(words: Exchange, end_ns: int) -> int:
    """Go on with an exchange; return its `Outcome`, or `AGAIN` at `end_ns` or after a signal."""
    idle = 0
    while words.step < words.n_steps:
        result = _move(words)
        if result >= 0:
            return result
        if _end_step(words):
            if words.step < words.n_steps:
                begin_step(words)
            idle = 0
        elif result == MOVED:
            idle = 0
        else:
            if load64(words.abort) != 0:
                return Outcome.ABORTED
            time_ns = now_ns(words)
            if time_ns >= end_ns:
                return Outcome.AGAIN
            if idle > YIELDS:
                if _sleep(words, end_ns - time_ns):
                    return Outcome.AGAIN
            else:
                idle = yielded(words, idle, time_ns)
    return find_parts(words)


@inline
def go_on_as_told(words: Exchange, end_ns: int) -> int:
    """Go on with an exchange as `go_on_until` does, over whatever carries the messages."""
    if words.go_on != 0:
        return call_loop(words.go_on, words, end_ns)
    return go_on_until(words, end_ns)


@compiled_when_used()
def proceed(words: Exchange, slice_ns: int) -> int:
    """Go on with an exchange for one slice; store and return its `Outcome`."""
    outcome = go_on_as_told(words, now_ns(words) + slice_ns)
    words.outcome = outcome
    return outcome


@compiled_when_used()
def begin(words: Exchange, digest: int, kind: int) -> int:
    """Begin an exchange without data; return 0."""
    for host in range(words.n_hosts):
        words.parts[words.n_hosts + host] = 0
    begin_exchange(words, digest, kind, 0)
    return 0
