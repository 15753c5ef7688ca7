"""Recover from a mismatch: agree on a common sequence number, or break the communicator.

The ranks can go on if every one of them raises the mismatch in the call that differed. The rank
that detects it increments the generation in the event word, once per mismatch. Each rank that sees
the event answers it in its status line with its own sequence and chunk numbers, and raises the
error. At its next call it waits until all ranks have answered, and takes the greatest numbers. So
nothing that a rank had already posted can be mistaken for something new.

A rank that has, or may have, ended the differing call raises the error in a later one. Its program
and those of the others are then one call apart, and their next calls might match each other by
accident. A rank that detects such a mismatch therefore aborts the communicator
(docs/decisions/0061).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gpucoll.errors import MismatchError
from gpucoll.group.host import diagnosis
from gpucoll.group.host.records import difference
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.layout import Abort, Record, RecordState
from gpucoll.transport.shared.words import Context, State

if TYPE_CHECKING:
    from gpucoll.group.host.group import HostGroup

_LONGEST_PAUSE_S = 0.01


def pending_event(group: HostGroup) -> int:
    """Return the segment's event word: {generation: 32 bits, sequence: 32 bits}."""
    return group.members.load(layout.EVENT_WORD)


def announce(group: HostGroup) -> None:
    """Announce the mismatch that this rank has found, unless another rank has."""
    sequence = int(group.context[Context.mismatched])
    if any(_may_have_gone_on(group, rank, sequence) for rank in range(group.world_size)):
        group.abort(Abort.MISMATCH, sequence=sequence)
        return
    seen = int(group.context[Context.event_seen])
    generation = (seen + 1) & 0x7FFFFFFF
    group.members.compare_exchange(layout.EVENT_WORD, seen, generation | (sequence << 32))


def _may_have_gone_on(group: HostGroup, rank: int, sequence: int) -> bool:
    """Return whether a rank raises the mismatch of this call in a later one, or may do so.

    All ranks that check this within the call get the same result. By then the headers of all ranks
    have come, and from then on a record becomes `DONE` only from `GOES_AHEAD`.
    """
    if group.spans_hosts:
        return False
    words = group.members.record_words(rank, sequence)
    if difference(int(words[Record.sequence]), sequence) != 0:
        return True
    return int(words[Record.state]) in (RecordState.DONE, RecordState.GOES_AHEAD)


def answer(group: HostGroup) -> MismatchError:
    """Answer the pending event, and return the error for it."""
    event = pending_event(group)
    sequence = difference(event >> 32, 0)
    if _may_have_gone_on(group, group.rank, sequence):  # `announce` has ruled this out
        group.abort(Abort.MISMATCH, sequence=sequence)
        group.raise_if_aborted()
    error = diagnosis.mismatch_error(group, sequence)
    group.add_report(error)  # while all ranks are still in that call
    _leave_calls(group, sequence)
    group.context[Context.event_seen] = event
    group.context[Context.state] = State.NEEDS_PYTHON
    place = _place(event)
    words = group.members.status_words(group.rank)
    words[place // 8 + 1] = group.context[Context.sequence]
    words[place // 8 + 2] = group.context[Context.chunk]
    group.members.store(group.members.status_offset(group.rank) + place, event)
    return error


def _leave_calls(group: HostGroup, sequence: int) -> None:
    """Note in this rank's records that it has left this call and those after it.

    Calls that it has posted ahead get new numbers later.
    """
    last = int(group.context[Context.sequence])
    for number in range(sequence, sequence + difference(last, sequence) + 1):
        words = group.members.record_words(group.rank, number)
        if int(words[Record.state]) in layout.UNFINISHED:
            words[Record.state] = RecordState.LEFT


def _place(event: int) -> int:
    return layout.STATUS_ACKNOWLEDGED[event & 1]


def recover(group: HostGroup, timeout_s: float) -> None:
    """Wait until every rank has answered the last event; agree on where to go on."""
    event = int(group.context[Context.event_seen])
    place = _place(event) // 8
    deadline = time.monotonic() + timeout_s
    pause_s = 0.0001
    while not all(_has_answered(group, rank, event) for rank in range(group.world_size)):
        _check_going_on(group, event, deadline)
        time.sleep(pause_s)  # rare and short: not worth a futex of its own
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    numbers, chunks = zip(*_answers(group, place), strict=True)
    mine = int(group.context[Context.sequence])
    ahead = max(difference(number, mine) for number in numbers)
    sequence = difference(mine + ahead + layout.RING, 0)
    group.context[Context.sequence] = sequence
    group.context[Context.verified] = sequence
    group.context[Context.chunk] = max(chunks) + layout.STAGES
    group.go_on()


def _answers(group: HostGroup, place: int) -> list[tuple[int, int]]:
    """Return the sequence and chunk numbers of every rank's answer."""
    with group.members.held():
        lines = [group.members.status_words(rank) for rank in range(group.world_size)]
        return [(int(line[place + 1]), int(line[place + 2])) for line in lines]


def _has_answered(group: HostGroup, rank: int, event: int) -> bool:
    """Return whether a rank has answered this event; if so, its numbers may be read."""
    members = group.members
    return members.load(members.status_offset(rank) + _place(event)) == event


def _check_going_on(group: HostGroup, event: int, deadline: float) -> None:
    group.check_open()  # another thread may close it meanwhile
    # A rank that is gone now may have answered before it went, so its answer is read afterwards.
    gone = [rank for rank in group.members.gone_ranks() if not _has_answered(group, rank, event)]
    if gone:
        group.break_with(Abort.LOST, gone[0])
    if time.monotonic() > deadline:
        group.break_with(Abort.DEADLINE, group.rank)
    group.raise_if_aborted()
