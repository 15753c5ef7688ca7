"""Ranks without a communicator: those that wait in ``init``, and those that have not come yet.

Ranks that wait have marked themselves (`gpucoll.rendezvous.marks`). Ranks that have not come are
processes whose launcher has given them the same job, or ranks of the communicator that is split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpucoll import config
from gpucoll.observe.processes import ancestors_of
from gpucoll.rendezvous.environments import Launched, launched_as
from gpucoll.rendezvous.marks import Mark
from gpucoll.topology.processes import process_of

if TYPE_CHECKING:
    from gpucoll.observe.segments import Observed

__all__ = ["Joining", "joining_of", "launched_of"]

_SIGNS = (b"RANK=", f"{config.SLURM_RANK}=".encode())
"""What is in the environment of each process that a launcher has started as a rank."""


@dataclass
class Joining:
    """Ranks that meet, or processes of a launcher that are in no communicator.

    Attributes
    ----------
    call : str
        The call in which ranks wait for others; empty: none waits.
    world_size : int
        The number of ranks that are to meet.
    waiting : dict
        The marks of the ranks that wait, by number.
    come : dict
        The processes of all ranks that have come, by number; some may be further than those that
        wait.
    absent : dict
        The processes of ranks that have not come, by number, as far as they are known.
    missing : list of int
        The numbers of ranks that have not come, and whose processes are not known.
    spans_hosts : bool
        Whether these may be on other hosts.
    linked : list of int
        Further processes of the same job.
    group : str
        The same on all hosts of a meeting that spans hosts; else empty.
    """

    call: str
    world_size: int
    waiting: dict[int, Mark] = field(default_factory=dict)
    come: dict[int, int] = field(default_factory=dict)
    absent: dict[int, int] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    spans_hosts: bool = False
    linked: list[int] = field(default_factory=list)
    group: str = ""

    @property
    def pids(self) -> list[int]:
        """The processes that wait, or are waited for."""
        return [*(mark.pid for mark in self.waiting.values()), *self.absent.values()]


def joining_of(
    marks: Sequence[Mark], segments: Sequence[Observed], launched: Mapping[int, Launched]
) -> list[Joining]:
    """Return who waits for whom outside of segments.

    Parameters
    ----------
    marks : sequence of Mark
        Of processes that wait.
    segments : sequence of Observed
        The communicators that were found.
    launched : mapping
        By process, as which rank a launcher has started it.
    """
    ranks = _ranks_of(launched)
    latest = {mark.pid: mark for mark in sorted(marks, key=lambda mark: mark.since_ns)}
    groups = defaultdict[str, list[Mark]](list)
    for mark in marks:
        groups[mark.group].append(mark)
    found = []
    for group in groups.values():
        meeting = Joining(group[0].call, len(group[0].numbers), spans_hosts=group[0].spans_hosts)
        meeting.group = group[0].group if meeting.spans_hosts else ""
        meeting.come = {mark.rank: mark.pid for mark in group}
        meeting.waiting = {mark.rank: mark for mark in group if latest[mark.pid] is mark}
        known = _processes_of(group, segments, launched, ranks)
        for number in sorted({*group[0].numbers} - meeting.come.keys()):
            if number in known:
                meeting.absent[number] = known[number]
            else:
                meeting.missing.append(number)
        if meeting.waiting:
            found.append(meeting)
    present = {*latest, *(pid for segment in segments for pid in segment.pids)}
    present |= {pid for meeting in found for pid in meeting.absent.values()}
    of_gpucoll = {pid: one for pid, one in launched.items() if one.is_gpucolls}
    return found + _outside(_ranks_of(of_gpucoll), present)


def _processes_of(
    group: list[Mark],
    segments: Sequence[Observed],
    launched: Mapping[int, Launched],
    ranks: Mapping[str, Mapping[int, list[int]]],
) -> dict[int, int]:
    """Return the processes of the ranks that are to meet, by number, as far as they are known."""
    for segment in segments:  # the communicator that is split
        numbers = {pid: segment.number(rank) for rank, pid in enumerate(segment.pids)}
        if all(numbers.get(mark.pid) == mark.rank for mark in group):
            return {number: pid for pid, number in numbers.items()}
    started = [launched.get(mark.pid) for mark in group]
    first = started[0]
    if first is None or first.world_size != len(group[0].numbers):
        return {}
    for mark, one in zip(group, started, strict=True):
        if one is None or (one.job, one.rank) != (first.job, mark.rank):
            return {}  # these ranks have numbers of their own
    return {number: pids[0] for number, pids in ranks[first.job].items()}


def _outside(ranks: Mapping[str, Mapping[int, list[int]]], present: set[int]) -> list[Joining]:
    """Return the ranks of gpucoll's launchers that are in no communicator and wait nowhere."""
    found = []
    for by_number in ranks.values():
        here = {rank: [*pids] for rank, pids in by_number.items() if {*pids} & present}
        absent = {rank: pids[0] for rank, pids in by_number.items() if rank not in here}
        if absent:
            linked = [pid for pids in here.values() for pid in pids]
            size = len(by_number)
            found.append(Joining("", size, absent=absent, linked=linked))
    return found


# --- processes of launchers -----------------------------------------------------------------------


def launched_of(pids: Iterable[int]) -> dict[int, Launched]:
    """Return, of these processes, those that a launcher has started as ranks."""
    environments = {pid: found for pid in pids if (found := _environment_of(pid))}

    def launcher_of(pid: int) -> int:
        own = environments[pid].get(config.PMI_RANK)
        above = ancestors_of(pid)[1:]
        return next((a for a in above if environments.get(a, {}).get(config.PMI_RANK) != own), 0)

    started = {
        pid: launched_as(environment, partial(launcher_of, pid))
        for pid, environment in environments.items()
    }
    return {pid: one for pid, one in started.items() if one is not None}


def _environment_of(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started; empty: of no rank, or hidden."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    if not any(sign in data for sign in _SIGNS):
        return {}
    pairs = (line.partition("=") for line in data.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs}


def _ranks_of(launched: Mapping[int, Launched]) -> dict[str, dict[int, list[int]]]:
    """Return the processes of each rank of each job, the one that is most likely the rank first.

    Processes that a rank has started inherit its environment, and so does a shell that a launcher
    has started to start the rank.
    """
    found = defaultdict[str, dict[int, list[int]]](dict)
    for pid, one in launched.items():
        found[one.job].setdefault(one.rank, []).append(pid)
    for by_rank in found.values():
        for pids in by_rank.values():
            pids.sort(key=_order)
    return found


def _order(pid: int) -> tuple[bool, int]:
    process = process_of(pid)
    if process is None or process.has_ended:
        return True, pid
    return not process.name.startswith("python"), process.started_ticks
