"""Find where ranks stand: in which call or message, if any, by the words in the segment.

The words are read when a communicator has been given up. No rank begins anything any more then, so
the words still tell what each rank was doing at that moment.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpucoll.collectives import Collective
from gpucoll.group.host.records import describe_call, describe_enqueued, difference
from gpucoll.group.host.segment_view import SegmentView
from gpucoll.topology.processes import process_of
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.layout import Doing, Record
from gpucoll.transport.shared.words import Kind
from gpucoll.types import dtype_name

MOST_SHOWN = 8
"""Further groups of ranks are only counted, so that people can read the error."""
DEADLOCK = "So they wait for each other"


class Standing(NamedTuple):
    """What one rank is doing.

    Attributes
    ----------
    text : str
        Completes "rank 1 is ...".
    is_in_call : bool
        Whether it stands in a collective or message of this communicator.
    awaited : tuple of int
        The ranks that it waits for there.
    sequence : int or None
        The number of the collective, if the rank stands in one and in no message.
    """

    text: str
    is_in_call: bool
    awaited: tuple[int, ...] = ()
    sequence: int | None = None


class Whereabouts:
    """Looks up where ranks stand, one by one; keeps what several lookups need."""

    def __init__(self, members: SegmentView) -> None:
        self._members = members
        self._late: dict[int, tuple[list[int], list[int]]] = {}

    def standing_of(self, rank: int) -> Standing:
        """Return where a rank stands."""
        members, message = self._members, describe_message(self._members, rank)
        awaited = [] if message is None else awaited_by_message(members, rank)
        sends = pending_send(members, rank)
        is_told = message is not None and message.startswith("send")
        beside = "" if sends is None or is_told else f"; {sends[0]}"
        last, is_in_it = last_call(members, rank)
        if last is None or not is_in_it:
            if message is None:
                return Standing(_absence_of(members, rank, last) + beside, False)
            return Standing(f"waiting in {message}{beside}", True, tuple(awaited))
        called = numbered(describe_call(members, rank, last), last)
        awaited += self._awaited_in(rank, last)
        if message is not None:
            text = f"waiting in {message} and in {called}{beside}"
            return Standing(text, True, tuple(awaited))
        text = f"waiting in {called}" if awaited else f"in {called}"
        return Standing(text + beside, True, tuple(awaited), None if beside else last)

    def _awaited_in(self, rank: int, sequence: int) -> list[int]:
        if sequence not in self._late:
            self._late[sequence] = late_for(self._members, sequence)
        missing, unfinished = ([r for r in late if r != rank] for late in self._late[sequence])
        return missing or unfinished


def _absence_of(members: SegmentView, rank: int, last: int | None) -> str:
    """Describe a rank that is in no call or message, by its last calls.

    The text does not report that the rank is gone. A rank that misses it reports it as lost
    instead; otherwise the rank went only after the deadline.
    """
    calls, enqueued = [], last_enqueued(members, rank)
    if last is not None and not (enqueued is not None and _connects(members, rank, last)):
        calls.append(numbered(describe_call(members, rank, last), last))
    if enqueued is not None:
        called = numbered(describe_enqueued(members, rank, enqueued), enqueued)
        calls.append(f"{called} on GPU arrays")
    before = f"the last collective: {' and '.join(calls)}" if calls else "no collective before"
    return f"in no call of this communicator; {before}"


def _connects(members: SegmentView, rank: int, sequence: int) -> bool:
    """Return whether a call only connected the GPUs for a call on GPU arrays."""
    with members.held():
        collective = int(members.record_words(rank, sequence)[Record.collective])
        return collective == Collective.CONNECT


def numbered(called: str | None, sequence: int) -> str:
    """Return a call with its sequence number."""
    return f"{called or 'a call'} (#{sequence})"


def is_stopped(members: SegmentView, rank: int) -> bool:
    """Return whether a rank's process was stopped, by a signal or a debugger."""
    process = process_of(members.pids[rank])
    return process is not None and process.is_stopped


# --- collectives ----------------------------------------------------------------------------------


def last_call(members: SegmentView, rank: int) -> tuple[int | None, bool]:
    """Return the number of the last call that a rank has recorded, and whether it is still in it.

    None: it has made no call.
    """
    with members.held():
        records = members.all_records(rank).copy()
    place = _last_of(records)
    if place is None:
        return None, False
    is_in_it = int(records[place, Record.state]) in layout.UNFINISHED
    return difference(int(records[place, Record.sequence]), 0), is_in_it


def present_call(members: SegmentView, rank: int) -> int | None:
    """Return the number of the collective that a rank stands in; None: it stands in none.

    A rank ends its calls in order, so this is the first unfinished one of those that it has posted.
    """
    last, is_in_it = last_call(members, rank)
    if last is None or not is_in_it:
        return None
    with members.held():
        records = members.all_records(rank).copy()
    numbers = records[np.isin(records[:, Record.state], layout.UNFINISHED), Record.sequence]
    return min(
        (difference(number, 0) for number in numbers.tolist()),
        key=lambda number: difference(number, last),
    )


def last_enqueued(members: SegmentView, rank: int) -> int | None:
    """Return the number of the last call on GPU arrays that a rank has recorded."""
    with members.held():
        records = members.all_enqueued(rank).copy()
    place = _last_of(records)
    return None if place is None else difference(int(records[place, Record.sequence]), 0)


def _last_of(records: npt.NDArray[np.int64]) -> int | None:
    """Return the place of the record with the greatest number; None: there is no record."""
    places = np.flatnonzero(records[:, Record.collective])
    if not places.size:
        return None
    sequences = records[places, Record.sequence].astype(np.int32)
    ahead = sequences - sequences[0]  # numbers may have wrapped, so compare their differences
    return int(places[ahead.argmax()])


def late_for(members: SegmentView, sequence: int) -> tuple[list[int], list[int]]:
    """Return the ranks that have not arrived at a call, and those that have not finished it."""
    everyone = range(members.world_size)
    missing = [
        rank
        for rank in everyone
        if difference(members.header_word(rank, sequence) & 0xFFFFFFFF, sequence) < 0
    ]
    unfinished = [
        rank
        for rank in everyone
        if difference(_done_word(members, rank) & 0xFFFFFFFF, sequence) < 0
    ]
    return missing, unfinished


def _done_word(members: SegmentView, rank: int) -> int:
    """Return the word {last call that a rank has finished, its waiters}."""
    return members.load(members.status_offset(rank) + layout.STATUS_DONE)


# --- messages -------------------------------------------------------------------------------------


def _doing(members: SegmentView, rank: int) -> list[int]:
    with members.held():
        words = members.bell_words(rank)[layout.BELL_DOING // 8 :]
        return [int(word) for word in words[: Doing.n_words]]


def describe_message(members: SegmentView, rank: int) -> str | None:
    """Return the message that a rank waits for, or sends, as a call; None: there is none."""
    doing = _doing(members, rank)
    kind, peer, tag = doing[Doing.kind], doing[Doing.peer], doing[Doing.tag]
    if kind == 0:
        return None
    who = "ANY_SOURCE" if peer < 0 else str(members.number(peer))
    what = "ANY_TAG" if tag < 0 else str(tag)
    size = f"{dtype_name(doing[Doing.dtype])}, {doing[Doing.size_bytes]} bytes, "
    end = "dest" if kind == Kind.SEND else "source"
    name = Kind(kind).name.lower()
    if kind in (Kind.PROBE, Kind.TAKE):
        name, size = "recv or probe", ""
    more = doing[Doing.further]
    beside = f" and {more} more message{'s' if more > 1 else ''}" if more else ""
    return f"{name}({size}{end}={who}, tag={what}){beside}"


def message_timeout_s(members: SegmentView, rank: int) -> float:
    """Return the deadline of the message that a rank waits for, in seconds."""
    return _doing(members, rank)[Doing.timeout_ns] / 1e9


def pending_send(members: SegmentView, rank: int) -> tuple[str, int] | None:
    """Return a rank's first send that waits for its receive, and that send's destination; or None.

    This does not depend on what the rank itself is doing.
    """
    doing = _doing(members, rank)
    if not doing[Doing.sends]:
        return None
    peer, tag = doing[Doing.send_peer], doing[Doing.send_tag]
    return f"its send to rank {members.number(peer)}, tag {tag}, waits for its receive", peer


def awaited_by_message(members: SegmentView, rank: int) -> list[int]:
    """Return the ranks that can be the other end of the message that a rank waits for."""
    peer = _doing(members, rank)[Doing.peer]
    others = [other for other in range(members.layout.ends) if other != rank]
    return others if peer < 0 else [peer]


# --- all together ---------------------------------------------------------------------------------


def trace(members: SegmentView, gave_up: int, late: list[int], sequence: int | None = None) -> str:
    """Describe where the ranks stand that a rank was waiting for, and those that they wait for.

    Parameters
    ----------
    members : SegmentView
        The ranks.
    gave_up : int
        The rank that was waiting.
    late : list of int
        The ranks that it was waiting for.
    sequence : int, optional
        The collective in which it was waiting. Ranks that stand in the same collective are left
        out.

    Returns
    -------
    str
        Sentences to append, each after a full stop; empty if there is nothing to add.
    """
    standings: dict[int, Standing] = {}
    whereabouts = Whereabouts(members)
    pending = [rank for rank in late if rank != gave_up]
    while pending:
        rank = pending.pop(0)
        if rank not in standings and rank < members.world_size:  # of other hosts nothing is here
            standings[rank] = whereabouts.standing_of(rank)
            pending += [peer for peer in standings[rank].awaited if peer != gave_up]
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, standing in sorted(standings.items()):
        is_same = sequence is not None and standing.sequence == sequence
        stopped = f", and stopped (process {members.pids[rank]})"
        if is_stopped(members, rank):
            by_text[standing.text + stopped].append(rank)
        elif not is_same:
            by_text[standing.text].append(rank)
    told = [_sentence(members.spelled(ranks), len(ranks), text) for text, ranks in by_text.items()]
    if len(told) > MOST_SHOWN:
        told[MOST_SHOWN:] = [f"{len(told) - MOST_SHOWN} further groups of ranks are elsewhere"]
    sends = pending_send(members, gave_up)
    if sends is not None and not (describe_message(members, gave_up) or "").startswith("send"):
        told.append(f"Rank {members.number(gave_up)} itself: {sends[0]}")
    awaited = {peer for standing in standings.values() for peer in standing.awaited}
    if told and gave_up in awaited and all(item.is_in_call for item in standings.values()):
        told.append(DEADLOCK)
    return "".join(f". {text}" for text in told)


def _sentence(who: str, n_ranks: int, text: str) -> str:
    return f"{who[0].upper()}{who[1:]} {'is' if n_ranks == 1 else 'are'} {text}"
