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
from gpucoll.group.host.noting import note_enqueued
from gpucoll.group.host.records import difference
from gpucoll.kernels.cpu.builtins import METH_NOARGS, builtin, capsule
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import (
    exchange32,
    exchange64,
    load32_acquire,
    load64,
    load64_acquire,
    signed32,
    store64_release,
)
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.flags import behind, is_aborted
from gpucoll.transport.shared.layout import Record
from gpucoll.transport.shared.steps import fill_record, note_begin
from gpucoll.transport.shared.words import Call, Context, State, Status

SEQUENCE = int(Context.enqueued_sequence)
"""Index in `EnqueuedCalls.words` of the last posted call's number: an int, found at once."""
_LINE, _RECORD_BYTES, _COMPARED = layout.LINE_BYTES, layout.RECORD_BYTES, layout.ENQUEUED_COMPARED


@inline
def _record_of(context: Context, rank: int, sequence: int) -> Record:
    """Return a rank's record of the call numbered `sequence`."""
    count = context.enqueued_count
    return Record(context.enqueued + (rank * count + (sequence & (count - 1))) * _RECORD_BYTES)


@inline
def _line_of(context: Context, rank: int) -> int:
    """Return the address of the word with the number of the last call that a rank has compared."""
    return context.enqueued_lines + rank * _LINE + _COMPARED


@inline
def _is_full(context: Context, sequence: int) -> bool:
    """Return whether some rank has not compared the call whose record would be overwritten."""
    oldest = sequence - context.enqueued_count
    if not behind(context.enqueued_seen, oldest):
        return False
    seen = sequence
    for rank in range(context.world_size):
        compared = signed32(load32_acquire(_line_of(context, rank)))
        if behind(compared, seen):
            seen = compared
    context.enqueued_seen = seen
    return behind(seen, oldest)


@inline
def post(context: Context, call: Call) -> int:
    """Write the record of a call; return a `Status` as `post_call` does."""
    if context.state == State.NEEDS_PYTHON:
        return Status.NOT_RUN
    if is_aborted(context):
        return Status.EVENT
    sequence = signed32(context.enqueued_sequence + 1)
    if _is_full(context, sequence):
        return Status.MORE
    record = _record_of(context, context.rank, sequence)
    fill_record(record, call, sequence)
    note_begin(context, record)
    record.sent = call.sent
    record.received = call.received
    exchange64(record.at.header, (call.digest << 32) | (sequence & 0xFFFFFFFF))
    store64_release(
        context.at.enqueued_sequence, sequence
    )  # a thread that compares sees the record
    return Status.OK


@compiled
def post_call(self: int, _: int) -> int:
    """Built-in without arguments; `self` is a capsule of a call block. Returns a `Status`.

    NOT_RUN: closed, forked or to be recovered; EVENT: aborted; MORE: the ring is full.
    """
    call = Call(capsule_pointer(self, 0))
    return new_integer(post(call.context, call))


@inline
def _compare_one(context: Context, sequence: int) -> int:
    """Compare all ranks' records of one call: OK, MISMATCH, or MORE if one is not posted yet."""
    me = context.rank
    mine = load64(_record_of(context, me, sequence).at.header)
    sent = received = 0
    status: int = Status.OK
    for rank in range(context.world_size):
        record = _record_of(context, rank, sequence)
        header = load64_acquire(record.at.header)
        sent += record.sent
        received += record.received
        if header == mine:
            continue
        if np.int32(header) != np.int32(mine):
            context.enqueued_late = rank
            return Status.MORE
        status = Status.MISMATCH  # go on: the error names every odd rank, so all must have posted
    return Status.MISMATCH if sent != received else status


@compiled
def compare_calls(context: Context) -> int:
    """Compare the next calls, as far as all ranks have posted them; return a `Status`. For Python.

    OK: all calls that this rank has posted are the same on every rank. MORE: those compared are the
    same, but a rank has not posted the next one (`Context.enqueued_late`). MISMATCH: the call after
    the last one compared differs.
    """
    line = _line_of(context, context.rank)
    compared = signed32(load32_acquire(line))
    posted = load64_acquire(context.at.enqueued_sequence)
    status: int = Status.OK
    context.enqueued_late = -1
    while status == Status.OK and behind(compared, posted):
        sequence = signed32(compared + 1)
        status = _compare_one(context, sequence)
        if status == Status.OK:
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
        block.words[Call.context] = self._context.ctypes.data
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
        return int(self._context[Context.enqueued_late])

    def note_over(self, sequence: int) -> None:
        """Note, for those that watch the job, that a call is over on the GPU."""
        note_enqueued(self._members, self._context, sequence)

    def note_pending(self, sequence: int, since_ns: int, *, has_begun: bool) -> None:
        """Note, for those that look at the job, the oldest call on the GPU, if it takes long."""
        members = self._members
        line = members.enqueued_offset(members.rank)
        members.store(line + layout.ENQUEUED_PENDING, sequence)
        members.store(line + layout.ENQUEUED_BEGUN, has_begun)
        members.store(line + layout.ENQUEUED_PENDING_NS, since_ns)

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
