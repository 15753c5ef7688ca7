"""An exchange between the leaders of hosts through MPI, to check that all make the same call.

It has the same steps and parts as over connections (`gpucoll.transport.tcp.exchange`); each step's
message is an MPI message. A receiver has room for the largest message, so that no call of another
rank can make MPI write where it must not: what arrives is compared before anything else is done.
"""

from __future__ import annotations

from gpucoll.backends.mpi.steps import FIRST_POLLS, issue, next_request, poll_requests
from gpucoll.backends.mpi.words import EXCHANGE_TAG, MpiWords
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import load64, pause
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
from gpucoll.transport.tcp.exchange_words import Exchange, Outcome, Part


@inline
def _begin_messages(words: Exchange, mpi: MpiWords) -> None:
    """Begin a step's two messages."""
    comm, byte, held = mpi.communicator, mpi.byte, words.held
    row, at = step_of(words), words.held_bytes
    room, origin = words.capacity - at, row.origin
    issue(mpi, mpi.receive, held + at, room, byte, origin, EXCHANGE_TAG, comm, next_request(mpi))
    size_bytes, dest = words.sent_header[3], row.to
    issue(mpi, mpi.send, held, size_bytes, byte, dest, EXCHANGE_TAG, comm, next_request(mpi))


@inline
def _wait_until(words: Exchange, mpi: MpiWords, end_ns: int) -> int:
    """Poll until a step's messages are over, yielding to others; return an `Outcome`."""
    polls = 0
    while not poll_requests(mpi):
        polls += 1
        if polls < FIRST_POLLS:
            pause()
            continue
        if load64(words.abort) != 0:
            return Outcome.ABORTED
        if now_ns(words) >= end_ns:
            return Outcome.AGAIN
        yield_once()
    return Outcome.AGREED


@inline
def _end_step(words: Exchange) -> bool:
    """Count the parts that arrived; return whether their form is valid."""
    at, held = words.held_bytes, words.held
    for _ in range(step_of(words).n_parts):
        rest = words.capacity - at - PART_BYTES
        size_bytes = Part(held + at).data_bytes if rest >= 0 else -1
        if size_bytes < 0 or size_bytes > rest:
            words.link = sender_of(words)
            return False
        at += PART_BYTES + whole_words(size_bytes)
    words.held_bytes = at
    words.step += 1
    return True


@compiled_when_used(exchange.__name__)
def go_on_by_mpi(words: Exchange, end_ns: int) -> int:
    """Continue an exchange; return its `Outcome`, or `AGAIN` at `end_ns`.

    If an exchange is given up in the middle, its requests (`MpiWords.n_requests`) are left to MPI.
    """
    mpi = MpiWords(words.carrier)
    while words.step < words.n_steps:
        if mpi.n_requests == 0:
            _begin_messages(words, mpi)
        outcome: int = Outcome.AGREED
        if mpi.error == 0:
            outcome = _wait_until(words, mpi, end_ns)
        if mpi.error != 0:
            words.link = sender_of(words)
            words.errno = 0
            return Outcome.GONE
        if outcome != Outcome.AGREED:
            return outcome
        mpi.n_requests = 0
        if not _end_step(words):
            return Outcome.GARBLED
        if words.step < words.n_steps:
            begin_step(words)
    return find_parts(words)
