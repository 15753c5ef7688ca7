"""Looks at a job again and again, and keeps the numbers of its ranks and communicators."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gpucoll.errors import SharedMemoryError
from gpucoll.observe.gpus import Gpus, GpuUse
from gpucoll.observe.look import Job, RankLook, jobs_of, look_once
from gpucoll.observe.processes import Process, pids_here, process_of, program_of
from gpucoll.observe.rates import KEPT_S, Pending, Rates, Sample, called, mean_of
from gpucoll.observe.segments import Found, Observed, find
from gpucoll.observe.verdict import ends_of
from gpucoll.observe.watch import CALL, Watch
from gpucoll.observe.why import is_meant

__all__ = ["Communicator", "RankRow", "Sampler", "Snapshot", "state_of"]

_BUSY = 0.5
_LONG_S = 0.5
"""Shorter waits are not told."""
_LATE = 0.01
"""A rank that made the others wait for a smaller share of the time is not named as the slowest."""


@dataclass(frozen=True)
class RankRow:
    """One process, with the sums over its communicators. Shares are of time; bytes are bytes."""

    rank: int
    pid: int
    state: str
    calls_per_s: float
    bytes_per_s: float
    in_calls: float
    waiting: float
    held_up: float
    cpu: float
    rss_bytes: int
    gpu: GpuUse | None = None


@dataclass(frozen=True)
class Communicator:
    """One communicator: the ranks on this host."""

    name: str
    n_ranks: int
    calls_per_s: float
    slowest: int | None
    """The rank that the others waited for in the last seconds."""
    held_up: float
    last: str
    """The last call that ended; empty: there was none."""
    last_bytes: int


@dataclass(frozen=True)
class Snapshot:
    """What is shown.

    Attributes
    ----------
    program : str
        What the ranks run.
    rows : list of RankRow
        By rank.
    communicators : list of Communicator
        The one with the most ranks first.
    is_sampled : bool
        Whether ranks made more calls than they could note, so that shares are of a part of them.
    elsewhere, other_jobs : int
        How many ranks are on other hosts, and how many more jobs there are.
    """

    program: str = ""
    rows: list[RankRow] = field(default_factory=list)
    communicators: list[Communicator] = field(default_factory=list)
    is_sampled: bool = False
    elsewhere: int = 0
    other_jobs: int = 0


class _Watched:
    """A communicator that is being watched."""

    def __init__(self, segment: Observed) -> None:
        self.segment = segment
        self.watch = Watch([segment])
        self.rates = Rates(segment.world_size, time.monotonic_ns())

    def close(self) -> None:
        self.watch.close()
        self.segment.segment.unmap()


class Sampler:
    """Watches one job: its communicators on this host, those that come later, too.

    Parameters
    ----------
    pid : int, optional
        A process of the job, or of its launcher; without it the job with the most ranks.
    kept_s : float
        Over how many seconds `snapshot` may be asked for.
    """

    def __init__(self, pid: int | None = None, kept_s: float = KEPT_S) -> None:
        self.trouble = ""
        """Why a communicator cannot be watched; empty: all are."""
        self._pid, self._kept_s = pid, max(kept_s, KEPT_S)
        self._watched: dict[tuple[int, int], _Watched] = {}
        self._pids: set[int] = set()
        self._other_jobs = 0
        self._gpus = Gpus()
        self._processes: dict[int, list[tuple[int, Process]]] = {}
        self._job: Job | None = None
        found = self.find()
        self.unreadable = found.unreadable

    # --- which communicators there are ------------------------------------------------------------

    def find(self) -> Found:
        """Look for communicators of the job that are new, or gone."""
        # A communicator that comes later has one of the processes that are known.
        found = find(sorted(self._pids) or pids_here())
        jobs = [job for job in jobs_of(found.segments) if self._is_ours(job)]
        jobs.sort(key=lambda job: -len({pid for segment in job for pid in segment.pids}))
        if self._pids:  # all that is left of it, in however many parts
            chosen = [segment for job in jobs for segment in job]
        else:
            chosen = jobs[0] if jobs else []
            self._other_jobs = max(len(jobs) - 1, 0)
        here = {segment.identity for segment in chosen}
        for identity in [each for each in self._watched if each not in here]:
            self._watched.pop(identity).close()
        for segment in found.segments:
            if segment.identity in here and segment.identity not in self._watched:
                self._take(segment)
            else:
                segment.segment.unmap()
        if self._watched:
            self._pids = {pid for each in self._watched.values() for pid in each.segment.pids}
        self._processes = {pid: self._processes[pid] for pid in self._pids & {*self._processes}}
        return found

    def _is_ours(self, job: list[Observed]) -> bool:
        if self._pids:
            return any(self._pids & {*segment.pids} for segment in job)
        return is_meant(job, self._pid)

    def _take(self, segment: Observed) -> None:
        try:
            self._watched[segment.identity] = _Watched(segment)
        except SharedMemoryError as error:
            self.trouble = str(error)
            segment.segment.unmap()
        for pid in {*segment.pids} - {*self._processes}:
            self._keep(pid, process_of(pid), time.monotonic_ns())

    @property
    def has_ended(self) -> bool:
        """Whether there is no communicator, or no process of one."""
        if not self._watched:
            return True
        processes = () if self._job is None else self._job.processes.values()
        return bool(processes) and all(each is None or each.has_ended for each in processes)

    # --- looks ------------------------------------------------------------------------------------

    def sample(self) -> None:
        """Look at all ranks. More than 3 s may not pass between two calls."""
        watched = sorted(self._watched.values(), key=lambda each: -each.segment.world_size)
        self._watched = {each.segment.identity: each for each in watched}
        job = self._job = look_once([each.segment for each in watched])
        now_ns = time.monotonic_ns()
        pending = _pending_of(job, [each.segment for each in watched], now_ns)
        for each, own in zip(watched, pending, strict=True):
            calls = each.watch.read()[0]
            each.rates.add(calls, own, time.monotonic_ns(), self._kept_s)
        for pid, process in job.processes.items():
            self._keep(pid, process, now_ns)
        self._gpus.read()

    def _keep(self, pid: int, process: Process | None, now_ns: int) -> None:
        """Keep what a process was at a moment: the use of a CPU is a difference."""
        if process is not None:
            kept = self._processes.setdefault(pid, [])
            kept.append((now_ns, process))
            while len(kept) > 2 and kept[1][0] < now_ns - self._kept_s * 1e9:
                kept.pop(0)

    def snapshot(self, over_s: float = 1.0) -> Snapshot:
        """Return the means over the last seconds; `sample` must have been called."""
        job = self._job
        assert job is not None
        watched = list(self._watched.values())
        now_ns = max(each.rates.looked_ns for each in watched)
        since_ns = now_ns - int(over_s * 1e9)
        means = [mean_of(each.rates.samples, each.rates.n_ranks, since_ns) for each in watched]
        rows = [self._row(job, pid, means, since_ns) for pid in job.pids]
        return Snapshot(
            next(filter(None, map(program_of, job.pids)), ""),
            rows,
            [_communicator(job, place, each) for place, each in enumerate(watched)],
            any(mean.is_sampled for mean in means),
            job.elsewhere,
            self._other_jobs,
        )

    def _row(self, job: Job, pid: int, means: list[Sample], since_ns: int) -> RankRow:
        sums = np.zeros(5)
        for each, mean in zip(self._watched.values(), means, strict=True):
            for rank in [r for r, other in enumerate(each.segment.pids) if other == pid]:
                sums[:2] += [mean.calls[rank], mean.size_bytes[rank]] / np.maximum(
                    mean.seconds, 1e-9
                )
                sums[2:] += mean.in_calls[rank], mean.waiting[rank], mean.held_up[rank]
        process, cpu = job.processes[pid], self._cpu(pid, since_ns)
        calls, size_bytes, *shares = sums.tolist()
        in_calls, waiting, held_up = (min(share, 1.0) for share in shares)
        return RankRow(
            job.number(pid),
            pid,
            state_of([one for one in job.ranks if one.pid == pid], process, cpu),
            calls,
            size_bytes,
            in_calls,
            waiting,
            held_up,
            cpu,
            0 if process is None else process.rss_bytes,
            self._gpus.used_by(pid),
        )

    def _cpu(self, pid: int, since_ns: int) -> float:
        """Return the share of a CPU that a process has used since a moment."""
        kept = self._processes.get(pid, [])
        if len(kept) < 2:
            return 0.0
        begun = [place for place, (at_ns, _) in enumerate(kept[:-1]) if at_ns <= since_ns]
        first_ns, first = kept[begun[-1] if begun else 0]
        last_ns, last = kept[-1]
        return (last.cpu_s - first.cpu_s) / ((last_ns - first_ns) / 1e9)

    def calls_of(self, pid: int) -> npt.NDArray[np.void]:
        """Return the newest calls of a process that are known, by communicator."""
        found = [
            each.rates.recent(rank)
            for each in self._watched.values()
            for rank, other in enumerate(each.segment.pids)
            if other == pid
        ]
        return np.concatenate([np.zeros(0, CALL), *found])

    def close(self) -> None:
        """Stop watching, and unmap everything."""
        while self._watched:
            self._watched.popitem()[1].close()
        self._gpus.close()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- what a look tells ----------------------------------------------------------------------------


def _pending_of(job: Job, segments: list[Observed], now_ns: int) -> list[Pending]:
    """Return, for each communicator, what its ranks are in and whom they wait for."""
    found = []
    for communicator, segment in enumerate(segments):
        places = {pid: place for place, pid in enumerate(segment.pids)}
        looks = [one for one in job.ranks if one.communicator == communicator]
        late = [one for one in looks if one.since_s is not None]
        ends = {*ends_of(job, late)} if late else set[int]()
        texts = {(one.pid, one.stream): _call_text(one) for one in looks}
        in_call, waiting, awaited = np.zeros((3, len(places)), np.int64)
        for one in late:
            place = places[one.pid]
            since_ns = now_ns - int((one.since_s or 0.0) * 1e9)
            if one.stream is None:
                in_call[place] = since_ns
            # All others may be in the same call as well: then data is on its way.
            if one.awaits_other_hosts or any(
                pid in ends or texts.get((pid, one.stream)) != _call_text(one)
                for pid in one.awaited
            ):
                waiting[place] = min(waiting[place] or since_ns, since_ns)
        if waiting.any():
            since_ns = waiting[waiting > 0].min()
            awaited[[places[pid] for pid in ends if pid in places]] = since_ns
        found.append(Pending(in_call, waiting, awaited))
    return found


def _call_text(one: RankLook) -> str:
    return one.text.removeprefix("waiting ")


_CALL = re.compile(r"(?:waiting )?(?:on the GPU )?(?:in|for work before) ([\w ]+?) ?\(")


def state_of(looks: list[RankLook], process: Process | None, cpu: float) -> str:
    """Return where a process stands, in a few words."""
    if process is None or process.has_ended:
        return "has ended"
    if process.is_stopped:
        return "stopped"
    in_calls = [one for one in looks if one.is_in_call]
    if in_calls:
        one = max(in_calls, key=lambda one: one.since_s or 0.0)
        call = _CALL.match(one.text)
        where = "waits for other hosts" if one.awaits_other_hosts else "in a call"
        if call:
            gpu = "" if one.stream is None else "GPU: "
            where = f"{gpu}{'before' if one.stream == 'before' else 'in'} {call[1]}"
        return f"{where}, {one.since_s:.1f} s" if (one.since_s or 0.0) >= _LONG_S else where
    if looks and all(one.closed is not None for one in looks):
        return "has closed"
    return "computes" if cpu >= _BUSY else "sleeps"


def _communicator(job: Job, place: int, watched: _Watched) -> Communicator:
    """Return one communicator; the slowest rank is that of all samples that are kept."""
    segment, rates = watched.segment, watched.rates
    recent = rates.samples[-1]
    kept = mean_of(rates.samples, rates.n_ranks, rates.looked_ns - int(KEPT_S * 1e9))
    late = int(kept.held_up.argmax())
    share = float(kept.held_up[late])
    return Communicator(
        job.names[place] or (f"communicator {place}" if place else "all ranks"),
        segment.world_size,
        float(recent.calls.max()) / recent.seconds,
        segment.number(late) if share >= _LATE else None,
        share,
        ""
        if rates.last is None
        else called(int(rates.last["kind"]), int(rates.last["collective"])),
        0 if rates.last is None else int(rates.last["size_bytes"]),
    )
