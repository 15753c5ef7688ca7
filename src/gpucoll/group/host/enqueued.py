"""The records of calls on GPU arrays: posted in a fraction of a microsecond, compared later.

A call that is enqueued on a stream cannot wait for the other ranks. It writes its record into this
rank's ring, the {sequence, digest} word last, and goes on. Later a thread, or a caller that asks
whether calls succeeded, finds out how far all ranks have posted the same calls (`compare_calls`). A
rank's ring is full while the slowest rank has not compared the oldest call in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.entries.collectives import capsule_pointer, new_integer
from gpucoll.group.host.members import Members
from gpucoll.group.host.records import difference
from gpucoll.kernels.cpu.builtins import METH_NOARGS, builtin, capsule
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import (
    exchange32,
    exchange64,
    get,
    load32_acquire,
    load64,
    load64_acquire,
    put,
    signed32,
    store64_release,
)
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.flags import behind, is_aborted
from gpucoll.transport.shared.layout import Record
from gpucoll.transport.shared.steps import DIGEST, RANK, WORLD_SIZE, fill_record
from gpucoll.transport.shared.words import Call, Context, State, Status

__all__ = ["SEQUENCE", "EnqueuedCalls", "compare_calls", "post", "post_call"]

SEQUENCE = int(Context.ENQUEUED_SEQUENCE)
"""Index in `EnqueuedCalls.words` of the number of the last call that this rank posted."""

_LINE, _RECORD_BYTES, _COMPARED = layout.LINE_BYTES, layout.RECORD_BYTES, layout.ENQUEUED_COMPARED
_OK, _EVENT, _MISMATCH = int(Status.OK), int(Status.EVENT), int(Status.MISMATCH)
_NOT_RUN, _MORE = int(Status.NOT_RUN), int(Status.MORE)
_STATE, _NEEDS_PYTHON = int(Context.STATE), int(State.NEEDS_PYTHON)
_LINES, _RECORDS, _COUNT = (
    int(Context.ENQUEUED_LINES),
    int(Context.ENQUEUED),
    int(Context.ENQUEUED_COUNT),
)
_SEQUENCE, _SEEN, _LATE = (
    int(Context.ENQUEUED_SEQUENCE),
    int(Context.ENQUEUED_SEEN),
    int(Context.ENQUEUED_LATE),
)
_CONTEXT, _CALL_SENT, _CALL_RECEIVED = int(Call.CONTEXT), int(Call.SENT), int(Call.RECEIVED)
_HEADER, _SENT, _RECEIVED = int(Record.HEADER), int(Record.SENT), int(Record.RECEIVED)


@inline
def _record_of(context, rank, sequence):
    """Return the address of a rank's record of the call numbered `sequence`."""
    count = get(context, _COUNT)
    return get(context, _RECORDS) + (rank * count + (sequence & (count - 1))) * _RECORD_BYTES


@inline
def _line_of(context, rank):
    """Return the address of the word with the number of the last call that a rank has compared."""
    return get(context, _LINES) + rank * _LINE + _COMPARED


@inline
def _is_full(context, sequence):
    """Return whether some rank has not compared the call whose record would be overwritten."""
    oldest = sequence - get(context, _COUNT)
    if not behind(get(context, _SEEN), oldest):
        return False
    seen = sequence
    for rank in range(get(context, WORLD_SIZE)):
        compared = signed32(load32_acquire(_line_of(context, rank)))
        if behind(compared, seen):
            seen = compared
    put(context, _SEEN, seen)
    return behind(seen, oldest)


@inline
def post(context, call):
    """Write the record of a call; return a `Status` as `post_call` does."""
    if get(context, _STATE) == _NEEDS_PYTHON:
        return _NOT_RUN
    if is_aborted(context):
        return _EVENT
    sequence = signed32(get(context, _SEQUENCE) + 1)
    if _is_full(context, sequence):
        return _MORE
    record = _record_of(context, get(context, RANK), sequence)
    fill_record(record, call, sequence)
    put(record, _SENT, get(call, _CALL_SENT))
    put(record, _RECEIVED, get(call, _CALL_RECEIVED))
    exchange64(record + 8 * _HEADER, (get(call, DIGEST) << 32) | (sequence & 0xFFFFFFFF))
    store64_release(context + 8 * _SEQUENCE, sequence)  # a thread that compares sees the record
    return _OK


@compiled
def post_call(self, _):
    """Built-in without arguments; `self` is a capsule of a call block. Returns a `Status`.

    NOT_RUN: closed, forked or to be recovered; EVENT: aborted; MORE: the ring is full.
    """
    call = capsule_pointer(self, 0)
    return new_integer(post(get(call, _CONTEXT), call))


@inline
def _compare_one(context, sequence):
    """Compare all ranks' records of one call: OK, MISMATCH, or MORE if one is not posted yet."""
    me = get(context, RANK)
    mine = load64(_record_of(context, me, sequence) + 8 * _HEADER)
    sent = received = 0
    status = _OK
    for rank in range(get(context, WORLD_SIZE)):
        record = _record_of(context, rank, sequence)
        header = load64_acquire(record + 8 * _HEADER)
        sent += get(record, _SENT)
        received += get(record, _RECEIVED)
        if header == mine:
            continue
        if np.int32(header) != np.int32(mine):
            put(context, _LATE, rank)
            return _MORE
        status = _MISMATCH  # go on: the error names every odd rank, so all must have posted
    return _MISMATCH if sent != received else status


@compiled
def compare_calls(context):
    """Compare the next calls, as far as all ranks have posted them; return a `Status`. For Python.

    OK: all calls that this rank has posted are the same on every rank. MORE: those compared are the
    same, but a rank has not posted the next one (`Context.ENQUEUED_LATE`). MISMATCH: the call after
    the last one compared differs.
    """
    line = _line_of(context, get(context, RANK))
    compared = signed32(load32_acquire(line))
    posted = load64_acquire(context + 8 * _SEQUENCE)
    status = _OK
    put(context, _LATE, -1)
    while status == _OK and behind(compared, posted):
        sequence = signed32(compared + 1)
        status = _compare_one(context, sequence)
        if status == _OK:
            compared = sequence
    exchange32(line, compared)
    return status


class EnqueuedCalls:
    """This rank's ring of calls on GPU arrays, and how far all ranks agree.

    Parameters
    ----------
    members : Members
        The ranks; their segment has memory for these records.
    context : array
        The context of this rank's group.
    """

    def __init__(self, members: Members, context: npt.NDArray[np.int64]) -> None:
        self._members = members
        self._context = context
        self.words: Any = context.data
        """A view of the context: reading an item gives an int, in half of NumPy's time."""

    @property
    def sequence(self) -> int:
        """The number of the last call that this rank posted."""
        number: int = self.words[SEQUENCE]
        return number

    @property
    def compared(self) -> int:
        """The number of the last call that was the same on every rank."""
        members = self._members
        word = members.load(members.enqueued_offset(members.rank) + layout.ENQUEUED_COMPARED)
        return difference(word & 0xFFFFFFFF, 0)

    def is_compared(self, sequence: int) -> bool:
        """Return whether this call was the same on every rank."""
        return difference(self.compared, sequence) >= 0

    @property
    def has_uncompared(self) -> bool:
        """Whether this rank has posted calls that have not been compared on all ranks."""
        return difference(self.compared, self.sequence) < 0

    def poster(self, block: CallBlock) -> Callable[[], int]:
        """Return the built-in that posts this call and returns a `Status`; keep the block."""
        block.words[Call.CONTEXT] = self._context.ctypes.data
        post: Callable[[], int] = builtin(
            post_call.address, METH_NOARGS, capsule(block.words.ctypes.data)
        )
        return post

    def compare(self) -> Status:
        """Compare as far as all ranks have posted; return OK, MORE (a rank is late) or MISMATCH."""
        with self._members.held():
            return Status(compare_calls.ctypes(self._context.ctypes.data))

    @property
    def late_rank(self) -> int:
        """The rank that the last `compare` found late, or -1."""
        return int(self._context[Context.ENQUEUED_LATE])

    # --- connecting -------------------------------------------------------------------------------

    def say_failed(self) -> None:
        """Tell the ranks that wait for this rank's GPU that it will not connect."""
        members = self._members
        members.store(members.enqueued_offset(members.rank) + layout.ENQUEUED_FAILED, 1)

    def failed_ranks(self) -> list[int]:
        """Return the ranks that have reported that their GPU will not connect."""
        members = self._members
        return [
            rank
            for rank in range(members.world_size)
            if members.load(members.enqueued_offset(rank) + layout.ENQUEUED_FAILED)
        ]
