"""Follows the jobs of this host as they come and go, and counts what they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpucoll.errors import SharedMemoryError
from gpucoll.group.host.shrinking import Phase
from gpucoll.observe.counters import Numbers, Sample
from gpucoll.observe.look import MOMENT_S, look
from gpucoll.observe.meetings import Register
from gpucoll.observe.processes import pids_here
from gpucoll.observe.segments import Observed, find
from gpucoll.observe.verdict import judge
from gpucoll.observe.watch import Watch
from gpucoll.topology.processes import start_time
from gpucoll.transport.shared import layout

__all__ = ["READ_S", "Follower"]

READ_S = 1.0
"""How often calls are to be read: ranks note them for 3 s, and have room for 2,048."""
KEPT_S = 120.0
"""How long the counters of a job that has ended are kept, so that somebody still collects them."""
_MOST_COMMUNICATORS = 32
_MOST_LOOKING_S = 1.0
_OTHER = "other"


class Follower:
    """Watches all jobs, and has their numbers.

    Parameters
    ----------
    pids : function
        Returns the processes whose jobs are followed; by default all that may be looked at.
    kept_s : float
        For how long the counters of an ended job are kept.

    Attributes
    ----------
    samples : tuple of Sample
        The values as of the last `read` or `look`. Other threads may use it.
    unreadable : dict
        By process, why a segment of it can be read only in part, or not at all.
    """

    def __init__(
        self, pids: Callable[[], Sequence[int]] = pids_here, kept_s: float = KEPT_S
    ) -> None:
        self._pids, self._kept_s = pids, kept_s
        self._jobs: list[_Job] = []
        self.samples: tuple[Sample, ...] = ()
        self.unreadable: dict[int, str] = {}

    def look(self) -> None:
        """Find the jobs, and see how each is. Takes up to a second if there are many."""
        found = find(self._pids())
        self.unreadable = dict(found.unreadable)
        here = {segment.identity for segment in found.segments}
        known = {each.segment.identity for job in self._jobs for each in job.open}
        for job in self._jobs:
            for each in [each for each in job.open if each.segment.identity not in here]:
                job.end(each)
        for segment in sorted(found.segments, key=lambda one: -one.world_size):
            if segment.identity in known:
                segment.segment.unmap()
            else:
                self._job_of(segment).take(segment, self.unreadable)
        now_s = time.monotonic()
        self._jobs = [job for job in self._jobs if job.open or now_s < job.ended_s + self._kept_s]
        alive = [job for job in self._jobs if job.open]
        for job in alive:
            job.look(min(MOMENT_S, _MOST_LOOKING_S / len(alive)))
        self.read()

    def read(self) -> None:
        """Count the calls since the last time. Two readings may be `READ_S` apart."""
        for job in self._jobs:
            job.read()
        self.samples = tuple(sample for job in self._jobs for sample in job.numbers.samples())

    def close(self) -> None:
        """Stop watching, and release everything."""
        for job in self._jobs:
            while job.open:
                job.open.pop().close()

    def _job_of(self, segment: Observed) -> _Job:
        """Return the job of some processes: the one that has any of them, or a new one."""
        processes = {(pid, start_time(pid)) for pid in segment.pids}
        job = next((job for job in self._jobs if job.processes & processes), None)
        if job is None:
            name, taken = str(segment.pids[0]), {job.numbers.job_id for job in self._jobs}
            if name in taken:  # the kernel has given that number again
                name = f"{name}-{start_time(segment.pids[0])}"
            job = _Job(Numbers(name))
            self._jobs.append(job)
        job.processes |= processes
        return job


@dataclass
class _Communicator:
    """A communicator that is watched."""

    segment: Observed
    label: str
    watch: Watch | None
    """None: it cannot be watched."""
    register: Register
    ranks: list[str]
    seen: dict[str, int] = field(default_factory=dict)

    def new_events(self) -> Iterator[tuple[str, int]]:
        """Yield what has been counted in the segment since the last time."""
        segment = self.segment
        survivors = segment.load(layout.EVENT_SURVIVORS)
        errors = [
            rank
            for rank in range(segment.world_size)
            if segment.has_closed(rank) and segment.read_reason(rank)
        ]
        counts = {
            "mismatches": segment.load(layout.EVENT_WORD) & 0x7FFFFFFF,
            "rank_errors": len(errors),
            "shrinks": int(survivors != 0 and survivors & 0xFF == Phase.MADE),
            "grows": segment.load(layout.EVENT_GROWTH) & 1,
        }
        for name, count in counts.items():
            yield f"gpucoll_{name}_total", max(count - self.seen.get(name, 0), 0)
            self.seen[name] = max(count, self.seen.get(name, 0))

    def new_abort(self) -> int:
        """Return the code with which the communicator has broken since the last time, or 0."""
        code = self.segment.abort_word() & 0xFF
        before, self.seen["abort"] = self.seen.get("abort", 0), code
        return 0 if before else code

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()
        self.segment.segment.unmap()


@dataclass
class _Job:
    """A job, as long as it runs and for a while after."""

    numbers: Numbers
    processes: set[tuple[int, int]] = field(default_factory=set)
    open: list[_Communicator] = field(default_factory=list)
    ended_s: float = 0.0
    cpu_s: dict[int, float] = field(default_factory=dict)

    def take(self, segment: Observed, troubles: dict[int, str]) -> None:
        """Begin to watch a communicator."""
        watch = None
        try:
            watch = Watch([segment])
        except SharedMemoryError as error:
            troubles[segment.pids[0]] = str(error)
        taken = {each.label for each in self.open}
        free = (str(n) for n in range(_MOST_COMMUNICATORS) if str(n) not in taken)
        ranks = [str(segment.number(rank)) for rank in range(segment.world_size)]
        register = Register(segment.world_size)
        made = _Communicator(segment, next(free, _OTHER), watch, register, ranks)
        self.open.append(made)

    def end(self, communicator: _Communicator) -> None:
        """Count what its ranks have done at last, and release it."""
        self.open.remove(communicator)
        self._read(communicator)
        communicator.close()
        if not self.open:
            self.numbers.clear_gauges()
            self.ended_s = time.monotonic()

    def read(self) -> None:
        """Count what the ranks have done since the last time."""
        for communicator in self.open:
            self._read(communicator)

    def _read(self, one: _Communicator) -> None:
        if one.watch is not None:
            for calls in one.watch.read():
                self.numbers.add_calls(one.label, one.ranks, calls)
                self.numbers.add_meetings(one.label, one.ranks, one.register.add(calls))
        for name, more in one.new_events():
            self.numbers.add(name, more)
        if code := one.new_abort():
            self.numbers.add_abort(code)

    def look(self, moment_s: float) -> None:
        """See how the job is now."""
        self.open.sort(key=lambda each: -each.segment.world_size)
        seen = look([each.segment for each in self.open], moment_s)
        places = [each.label for each in self.open]
        self.numbers.set_gauges(seen, places, not judge(seen).is_healthy)
        for each in self.open:
            job, count = each.segment.job, each.segment.world_size + each.segment.n_elsewhere
            labels = (each.label, job.name, job.group)
            self.numbers.set_gauge("gpucoll_communicator_ranks", count, *labels)
        self.numbers.set_gauge("gpucoll_job_info", 1, _script_of(seen.program))
        for pid, process in seen.processes.items():
            if process is not None:
                more_s = max(process.cpu_s - self.cpu_s.get(pid, 0.0), 0.0)
                rank = str(seen.number(pid))
                self.numbers.add("gpucoll_process_cpu_seconds_total", more_s, rank)
        there = seen.processes.items()
        self.cpu_s = {pid: process.cpu_s for pid, process in there if process is not None}


def _script_of(program: str) -> str:
    """Return the name of a program without its arguments, which may contain secrets."""
    words = iter(program.split())
    for word in words:
        if word == "-c":  # the program itself follows
            return word
        if word in ("-W", "-X"):  # options of Python with a value
            next(words, "")
        elif not word.startswith("-"):
            return Path(word).name
    return ""
