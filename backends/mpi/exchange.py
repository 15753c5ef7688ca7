"""An exchange between the leaders of hosts through MPI, to check that all make the same call.

It has the same steps and parts as over connections (`gpucoll.transport.tcp.exchange`); each step's
message is an MPI message. A receiver has room for the largest message, so that no call of another
rank can make MPI write where it must not: what arrives is compared before anything else is done.
"""

from __future__ import annotations

from gpucoll.backends.mpi.steps import (
    BYTE,
    COMMUNICATOR,
    ERROR,
    FIRST_POLLS,
    N_REQUESTS,
    RECEIVE,
    SEND,
    issue,
    next_request,
    poll_requests,
)
from gpucoll.backends.mpi.words import EXCHANGE_TAG
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import get, load64, pause, put
from gpucoll.transport.shared.flags import yield_once
from gpucoll.transport.tcp import exchange
from gpucoll.transport.tcp.exchange import (
    PART_BYTES,
    begin_step,
    find_parts,
    now_ns,
    sender_of,
    step_of,
    whole_words,
)
from gpucoll.transport.tcp.exchange_words import Outcome, Word

_STEP, _N_STEPS, _CARRIER = int(Word.STEP), int(Word.N_STEPS), int(Word.CARRIER)
_HELD, _HELD_BYTES, _CAPACITY = int(Word.HELD), int(Word.HELD_BYTES), int(Word.CAPACITY)
_MESSAGE_BYTES, _ABORT = int(Word.SENT_HEADER) + 3, int(Word.ABORT)
_LINK, _ERRNO = int(Word.LINK), int(Word.ERRNO)
_AGREED, _AGAIN, _GONE = int(Outcome.AGREED), int(Outcome.AGAIN), int(Outcome.GONE)
_ABORTED, _GARBLED = int(Outcome.ABORTED), int(Outcome.GARBLED)


@inline
def _begin_messages(words, mpi):
    """Begin a step's two messages."""
    comm, byte, held = get(mpi, COMMUNICATOR), get(mpi, BYTE), get(words, _HELD)
    row, at = step_of(words), get(words, _HELD_BYTES)
    room, origin = get(words, _CAPACITY) - at, get(row, 1)
    issue(
        mpi, RECEIVE, held + at, room, byte, origin, EXCHANGE_TAG, comm, next_request(mpi), 0, 0, 0
    )
    size_bytes, dest = get(words, _MESSAGE_BYTES), get(row, 0)
    issue(mpi, SEND, held, size_bytes, byte, dest, EXCHANGE_TAG, comm, next_request(mpi), 0, 0, 0)


@inline
def _wait_until(words, mpi, end_ns):
    """Poll until a step's messages are over, yielding to others; return an `Outcome`."""
    polls = 0
    while not poll_requests(mpi):
        polls += 1
        if polls < FIRST_POLLS:
            pause()
            continue
        if load64(get(words, _ABORT)) != 0:
            return _ABORTED
        if now_ns(words) >= end_ns:
            return _AGAIN
        yield_once()
    return _AGREED


@inline
def _end_step(words):
    """Count the parts that arrived; return whether their form is valid."""
    at, held = get(words, _HELD_BYTES), get(words, _HELD)
    for _ in range(get(step_of(words), 2)):
        rest = get(words, _CAPACITY) - at - PART_BYTES
        size_bytes = get(held + at, 2) if rest >= 0 else -1
        if size_bytes < 0 or size_bytes > rest:
            put(words, _LINK, sender_of(words))
            return False
        at += PART_BYTES + whole_words(size_bytes)
    put(words, _HELD_BYTES, at)
    put(words, _STEP, get(words, _STEP) + 1)
    return True


@compiled_when_used(exchange.__name__)
def go_on_by_mpi(words, end_ns):
    """Continue an exchange; return its `Outcome`, or `AGAIN` at `end_ns`.

    If an exchange is given up in the middle, its requests are left to MPI: see `N_REQUESTS`.
    """
    mpi = get(words, _CARRIER)
    while get(words, _STEP) < get(words, _N_STEPS):
        if get(mpi, N_REQUESTS) == 0:
            _begin_messages(words, mpi)
        outcome = _AGREED
        if get(mpi, ERROR) == 0:
            outcome = _wait_until(words, mpi, end_ns)
        if get(mpi, ERROR) != 0:
            put(words, _LINK, sender_of(words))
            put(words, _ERRNO, 0)
            return _GONE
        if outcome != _AGREED:
            return outcome
        put(mpi, N_REQUESTS, 0)
        if not _end_step(words):
            return _GARBLED
        if get(words, _STEP) < get(words, _N_STEPS):
            begin_step(words)
    return find_parts(words)
