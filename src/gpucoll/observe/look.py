"""One look at a job: where each rank stands, twice within a moment, and what its process does."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from gpucoll.group.host.records import difference
from gpucoll.group.host.whereabouts import Standing, Whereabouts, last_call, numbered
from gpucoll.observe.joining import Joining
from gpucoll.observe.processes import Process, process_of, program_of
from gpucoll.observe.segments import Observed
from gpucoll.observe.sockets import Traffic, traffic_of
from gpucoll.observe.streams import Pending, is_behind, pending_of, rows_without
from gpucoll.rendezvous.marks import Wait
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.layout import Doing

__all__ = ["Job", "Part", "RankLook", "jobs_of", "look", "look_once"]

T = TypeVar("T")
Part: TypeAlias = "Observed | Joining | Wait"
"""What a job consists of: communicators, ranks that have none yet, and waits in tables."""
P = TypeVar("P", bound=Part)

_PLACES: list[type] = [Observed, Joining, Wait]
"""In this order they stand in a job."""

ABROAD = "waiting for other hosts"
HOST_SHIFT = 32
"""Kernels number processes below 2**22."""
MOMENT_S = 0.2
"""The time between the two looks: CPU shares are measured over it."""
BUSY = 0.5
"""From which share of the moment on a process works all the time, or would if it had a CPU."""


@dataclass
class RankLook:
    """One rank of one communicator.

    Attributes
    ----------
    communicator : int
        The communicator's place among those of the job.
    rank : int
        Its number in the communicator, as errors give it.
    text : str
        Where it stands: completes "rank 1 is ...".
    is_in_call : bool
        Whether it stands in a collective or message.
    awaited : list of int
        The processes for which it waits there.
    awaits_other_hosts : bool
        Whether it also waits for ranks of other hosts that were not looked at.
    abroad : list of int
        The ranks of other hosts that can be the other end of its message.
    is_in_collective : bool
        Whether it stands in a collective, alone or besides a message.
    unheard : list of int
        The hosts whose ranks are all in its collective, and whose data it still waits for; only
        known if they were looked at, too.
    has_traffic : bool
        Whether data moves on TCP connections of its process, its program's own among them.
    unacknowledged : list of str
        The addresses of hosts that do not acknowledge what its process has sent them.
    missing : list of int
        The numbers of ranks for which it also waits, and of which no process is known.
    since_s : float or None
        For how long it has been waiting there; None if it does not wait, or not for long.
    calls : int
        The number of its last collective.
    has_moved : bool
        Whether within the moment its call or message changed, or what it has done for it, or it
        worked for it without a pause.
    closed : str or None
        Why it has closed the communicator; empty: by its program; None: it has not.
    stream : str or None
        For its call on the GPU: ``"before"``, the stream has not reached it, or ``"in"``. None: all
        the above is about the rank itself.
    """

    communicator: int
    rank: int
    pid: int
    text: str
    is_in_call: bool
    awaited: list[int] = field(default_factory=list)
    awaits_other_hosts: bool = False
    abroad: list[int] = field(default_factory=list)
    is_in_collective: bool = False
    unheard: list[int] = field(default_factory=list)
    has_traffic: bool = False
    unacknowledged: list[str] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    since_s: float | None = None
    calls: int = 0
    has_moved: bool = False
    closed: str | None = None
    stream: str | None = None


@dataclass
class Job:
    """Processes that are connected by communicators, as they were at one moment.

    Attributes
    ----------
    processes : dict
        The process of each number; None: it has ended.
    cpu : dict
        The share of a CPU that each used within the moment.
    ranks : list of RankLook
        Of all communicators, the one with the most ranks first; of several, the oldest one.
    names : list of str or None
        The name of each communicator, or empty; None for ranks that have no communicator yet.
    elsewhere : int
        The number of ranks of the largest communicator that are on other hosts and were not looked
        at.
    groups, totals : list
        For each communicator what is the same on all of its hosts (empty: it is on one), and the
        number of its ranks on all of them.
    program : str
        The program that they run.
    taken_s : float
        When they were looked at, by the wall clock.
    hosts : list of str
        The hosts' names. If there are several, processes have numbers of their own, with the
        host's place in this list above the lowest 32 bits.
    silent : dict
        The ranks of each host that was asked and has not answered, by its name.
    """

    processes: dict[int, Process | None]
    cpu: dict[int, float]
    ranks: list[RankLook]
    names: list[str | None]
    elsewhere: int
    groups: list[str] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    program: str = ""
    taken_s: float = 0.0
    hosts: list[str] = field(default_factory=list)
    silent: dict[str, list[int]] = field(default_factory=dict)

    def spelled(self, pid: int) -> str:
        """Return the kernel's number of a process, and its host if there are several."""
        where = f" on {self.hosts[pid >> HOST_SHIFT]}" if len(self.hosts) > 1 else ""
        return f"{pid & (1 << HOST_SHIFT) - 1}{where}"

    def number(self, pid: int) -> int:
        """Return the rank of a process in the first communicator that has it."""
        return next(one.rank for one in self.ranks if one.pid == pid)

    def place(self, one: RankLook) -> str:
        """Return where a rank stands, with its communicator if that is not the first one."""
        name = self.names[one.communicator] or one.communicator
        return f"{one.text} of communicator {name}" if one.communicator else one.text

    @property
    def pids(self) -> list[int]:
        """The processes, by rank."""
        return sorted(self.processes, key=self.number)

    @property
    def living(self) -> list[int]:
        """The processes that have not ended, by rank."""
        there = self.processes.items()
        living = {pid for pid, each in there if each is not None and not each.has_ended}
        return [pid for pid in self.pids if pid in living]


def jobs_of(parts: Iterable[P]) -> list[list[P]]:
    """Return the parts of each job: those that have processes in common belong together."""
    jobs: list[list[P]] = []
    for part in parts:
        near = [job for job in jobs if any(_linked(part) & _linked(one) for one in job)]
        jobs = [job for job in jobs if not any(job is one for one in near)]
        jobs.append([part, *(each for job in near for each in job)])
    for job in jobs:  # the first communicator of a program has all its ranks
        job.sort(key=lambda each: (_PLACES.index(type(each)), -_size(each), _made_ns(each)))
    return jobs


def _size(part: Part) -> int:
    return 0 if isinstance(part, Wait) else part.world_size


def _made_ns(part: Part) -> int:
    return part.made_ns if isinstance(part, Observed) else 0


def _linked(part: Part) -> set[int]:
    return {*part.pids, *(part.linked if isinstance(part, Joining) else ())}


def look(parts: Sequence[Part], moment_s: float = MOMENT_S) -> Job:
    """Look twice at the communicators of a job."""
    segments = [part for part in parts if isinstance(part, Observed)]
    pids = _pids_of(parts)
    before = {pid: process_of(pid) for pid in pids}
    begun_s = time.monotonic()
    first = [[_progress(segment, rank) for rank in _ranks(segment)] for segment in segments]
    pending = [[pending_of(segment, rank) for rank in _ranks(segment)] for segment in segments]
    spanning = {pid: None for each in segments if each.n_elsewhere for pid in each.pids}
    traffic = traffic_of(spanning)
    time.sleep(moment_s)
    after = {pid: process_of(pid) for pid in pids}
    passed_s = time.monotonic() - begun_s
    busy = set[int]()
    for pid, process in after.items():
        earlier = before[pid]
        wanted_s = process.wanted_s - earlier.wanted_s if process and earlier else 0.0
        if wanted_s > BUSY * passed_s > 0:
            busy.add(pid)
    job = _job_of(parts, after, first, pending, busy)
    _note_traffic(job.ranks, traffic, traffic_of(spanning))
    for pid, process in after.items():
        earlier = before[pid]
        if process is not None and earlier is not None:
            job.cpu[pid] = (process.cpu_s - earlier.cpu_s) / passed_s
    return job


def look_once(parts: Sequence[Part]) -> Job:
    """Look once, without a pause: neither what moves nor the use of CPUs is known then."""
    return _job_of(parts, {pid: process_of(pid) for pid in _pids_of(parts)}, None, None, set())


def _pids_of(parts: Sequence[Part]) -> list[int]:
    return list(dict.fromkeys(pid for part in parts for pid in part.pids))


def _job_of(
    parts: Sequence[Part],
    processes: dict[int, Process | None],
    first: list[list[tuple[int, ...]]] | None,
    pending: list[list[Pending | None]] | None,
    busy: set[int],
) -> Job:
    ranks = []
    segments = [part for part in parts if isinstance(part, Observed)]
    for place, segment in enumerate(segments):
        whereabouts = Whereabouts(segment)
        for rank in _ranks(segment):
            one = _rank_look(segment, place, rank, whereabouts)
            if first is not None and one.closed is None:
                is_busy = one.is_in_call and one.pid in busy
                one.has_moved = is_busy or _progress(segment, rank) != first[place][rank]
            ranks.append(one)
    for place, segment in enumerate(segments):
        ranks += _stream_looks(segment, place, None if pending is None else pending[place])
    meetings = [part for part in parts if isinstance(part, Joining)]
    for place, meeting in enumerate(meetings, len(segments)):
        ranks += _meeting_looks(meeting, place)
    for wait in (part for part in parts if isinstance(part, Wait)):
        ranks += _wait_looks(wait, len(segments) + len(meetings), {one.pid for one in ranks})
    _name_calls_abroad(ranks)
    jobs = [segment.job for segment in segments]
    return Job(
        processes,
        {},
        ranks,
        [*(job.name for job in jobs), *(None for _ in meetings), None],
        _n_elsewhere(parts),
        [*(job.group for job in jobs), *(meeting.group for meeting in meetings), ""],
        [
            *(job.total or job.world_size for job in jobs),
            *(each.world_size for each in meetings),
            0,
        ],
        next(filter(None, map(program_of, processes)), ""),
        time.time(),
        [next((job.host for job in jobs if job.host), socket.gethostname())],
    )


def _n_elsewhere(parts: Sequence[Part]) -> int:
    """Return how many ranks of a job's first part are on other hosts."""
    if not parts:
        return 0
    first = parts[0]
    if isinstance(first, Joining):
        return len(first.missing) if first.spans_hosts else 0
    return first.n_elsewhere if isinstance(first, Observed) else 0


def _ranks(segment: Observed) -> range:
    return range(segment.world_size)


def _progress(segment: Observed, rank: int) -> tuple[int, ...]:
    """Return what changes whenever a rank does something for a call, and only then."""
    place, line = segment.layout, rank * layout.LINE_BYTES
    words = (place.filled + line, place.read + line, segment.status_offset(rank))
    # The other half of each word says whether ranks sleep on it.
    values = [segment.load(offset) & 0xFFFFFFFF for offset in words]
    last, is_in_it = last_call(segment, rank)
    return (*values, last or 0, is_in_it, *_message_progress(segment, rank))


def _message_progress(segment: Observed, rank: int) -> tuple[int, ...]:
    """Return what changes while the message that a rank waits for moves; empty: it awaits none."""
    place = segment.layout
    doing = [int(word) for word in segment.bell_words(rank)[layout.BELL_DOING // 8 :]]
    if not doing[Doing.kind]:
        return ()
    peer = doing[Doing.peer]
    others = range(place.ends) if peer < 0 else [peer] if peer < place.ends else []
    pairs = [(rank, other) for other in others] + [(other, rank) for other in others]
    mailboxes = [receiver * place.ends + sender for receiver, sender in pairs]
    taken = [
        segment.load(place.mailboxes + each * place.mailbox_stride + layout.MAILBOX_TAIL)
        for each in mailboxes
        if segment.load(place.opened + 8 * each)
    ]
    return (*doing[: Doing.n_words], *taken)


def _rank_look(segment: Observed, place: int, rank: int, whereabouts: Whereabouts) -> RankLook:
    pid, number = segment.pids[rank], segment.number(rank)
    last = _tried(lambda: last_call(segment, rank)[0], None)
    one = RankLook(place, number, pid, "in a call that cannot be read", False, calls=last or 0)
    if segment.has_closed(rank):
        one.closed = segment.read_reason(rank)
        one.text = "no longer in this communicator: it has closed it"
        return one
    found: list[Standing] = _tried(lambda: [whereabouts.standing_of(rank)], [])
    for standing in found:
        one.text, one.is_in_call = standing.text, standing.is_in_call
        one.awaited = [segment.pids[each] for each in standing.awaited if each < segment.world_size]
        others = [each for each in standing.awaited if each >= segment.world_size]
        one.abroad = [segment.number(each) for each in others]
        one.awaits_other_hosts = bool(others)
        one.is_in_collective = last_call(segment, rank)[1]
    abroad_ns = segment.load(segment.status_offset(rank) + layout.STATUS_ABROAD)
    if abroad_ns and not one.is_in_call:
        one.is_in_call = one.is_in_collective = one.awaits_other_hosts = True
        one.text = f"{ABROAD}, {one.text.partition('; ')[2]}"
    if one.is_in_call:
        one.since_s = _since_s(segment, rank, last)
    return one


def _stream_looks(
    segment: Observed, place: int, before: list[Pending | None] | None
) -> Iterator[RankLook]:
    """Yield the ranks whose GPU has not ended a call for long."""
    everyone = [pending_of(segment, rank) for rank in _ranks(segment)]
    for rank, pending in enumerate(everyone):
        if pending is None:
            continue
        late = rows_without(segment, pending.sequence)
        where = "on the GPU in" if pending.has_begun else "on the GPU for work before"
        one = RankLook(
            place,
            segment.number(rank),
            segment.pids[rank],
            f"waiting {where} {numbered(pending.called, pending.sequence)}",
            True,
            since_s=max(time.monotonic_ns() - pending.since_ns, 0) / 1e9,
            has_moved=before is not None and before[rank] != pending,
            stream="in" if pending.has_begun else "before",
        )
        if late or not pending.has_begun:
            behind = late
        else:
            behind = [r for r, other in enumerate(everyone) if is_behind(other, pending)]
        one.awaited = [segment.pids[row] for row in behind if row < segment.world_size]
        one.awaits_other_hosts = len(one.awaited) < len(behind)
        yield one


def _meeting_looks(meeting: Joining, place: int) -> Iterator[RankLook]:
    """Yield where the ranks of a meeting stand: those that wait, and those that have not come."""
    late = [*meeting.absent.values()]
    is_elsewhere = bool(meeting.missing) and meeting.spans_hosts
    for number, mark in meeting.waiting.items():
        one = RankLook(place, number, mark.pid, f"waiting in {meeting.call}", True)
        one.since_s = max(time.monotonic_ns() - mark.since_ns, 0) / 1e9
        one.awaits_other_hosts, one.is_in_collective = is_elsewhere, True
        one.missing = [] if is_elsewhere else meeting.missing
        if not late and not meeting.missing:  # all have come, and none has left yet
            one.awaited = [pid for pid in meeting.come.values() if pid != mark.pid]
        else:
            one.awaited = late
        yield one
    text = (
        f"not in {meeting.call} yet"
        if meeting.call
        else "in no communicator: it has not called init, or has closed what it had"
    )
    for number, pid in meeting.absent.items():
        yield RankLook(place, number, pid, text, False)


def _wait_looks(wait: Wait, place: int, known: set[int]) -> Iterator[RankLook]:
    """Yield where a rank stands that waits in a table, and those for which it waits."""
    yield RankLook(
        place,
        wait.rank,
        wait.pid,
        wait.text,
        True,
        [*wait.awaited.values()],
        wait.awaits_other_hosts,
        since_s=max(time.monotonic_ns() - wait.since_ns, 0) / 1e9,
    )
    for rank, pid in wait.awaited.items():
        if pid not in known:
            yield RankLook(place, rank, pid, "in no call of gpucoll that is known", False)


def _note_traffic(
    ranks: list[RankLook], before: dict[int, Traffic], after: dict[int, Traffic]
) -> None:
    for one in ranks:
        if one.awaits_other_hosts and one.pid in after:
            one.has_traffic = before[one.pid].queues != after[one.pid].queues
            one.unacknowledged = [*after[one.pid].unacknowledged]


def _name_calls_abroad(ranks: list[RankLook]) -> None:
    """Show leaders that wait for other hosts in the call in which their own hosts' ranks wait."""
    calls = {one.communicator: one.text for one in ranks if one.is_in_collective and one.awaited}
    for one in ranks:
        if one.text.startswith(ABROAD):
            one.text = calls.get(one.communicator, one.text)


def _since_s(segment: Observed, rank: int, sequence: int | None) -> float | None:
    """Return for how long a rank has been waiting; None: it is not known to wait."""
    now_ns = time.monotonic_ns()
    since_ns = [segment.load(segment.status_offset(rank) + layout.STATUS_ABROAD)]
    bell = segment.bell_words(rank)[layout.BELL_DOING // 8 :]
    if bell[Doing.kind]:
        since_ns.append(int(bell[Doing.since_ns]))
    line = segment.status_offset(rank) + layout.STATUS_SINCE
    noted_ns, noted = segment.load(line), segment.load(line + 8)
    if sequence is not None and noted_ns and difference(noted, sequence) == 0:
        since_ns.append(noted_ns)
    waits = [(now_ns - each) / 1e9 for each in since_ns if 0 < each <= now_ns]
    return max(waits, default=None)


def _tried(function: Callable[[], T], otherwise: T) -> T:
    """Return what a function reads; `otherwise` if the words are of no rank's making."""
    try:
        return function()
    except (ValueError, KeyError, IndexError, OverflowError):
        return otherwise
