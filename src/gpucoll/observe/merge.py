"""Joins the reports on the hosts of one job, so that it is judged as one.

A communicator on several hosts has an identity that is the same on all of them. Processes have
numbers of their host alone, so a merged job adds the host to each (`gpucoll.observe.look.Job`).
Who waits for ranks of another host is found here: the looks of one host name such ranks for
messages only.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gpucoll.observe.json_report import Report
from gpucoll.observe.look import HOST_SHIFT, Job, RankLook

__all__ = ["merge", "related"]


def merge(reports: Sequence[Report]) -> list[Report]:
    """Return one report for each job; the reports themselves become its parts.

    Of several looks at the same ranks the last one counts.
    """
    jobs = []
    for together in related(reports):
        newest = _newest(together)
        if len(newest) == 1:
            jobs.append(newest[0])
        else:
            newest.sort(key=lambda part: min(one.rank for one in part.job.ranks))
            jobs.append(_merged(newest))
    return jobs


def related(reports: Iterable[Report]) -> list[list[Report]]:
    """Return the reports of each job: they have communicators in common."""
    jobs: list[list[Report]] = []
    for report in reports:
        near = [job for job in jobs if any(_groups(report) & _groups(one) for one in job)]
        jobs = [job for job in jobs if not any(job is one for one in near)]
        jobs.append([*(each for job in near for each in job), report])
    return jobs


def _groups(report: Report) -> set[str]:
    return {*report.job.groups} - {""}


def _ranks_of(report: Report) -> set[tuple[str, int]]:
    """Return its ranks in communicators on several hosts: no other host has the same."""
    groups = report.job.groups
    found = {(groups[one.communicator], one.rank) for one in report.job.ranks}
    return {(group, rank) for group, rank in found if group}


def _newest(reports: Sequence[Report]) -> list[Report]:
    found: list[Report] = []
    for report in sorted(reports, key=lambda each: -each.job.taken_s):
        own = _ranks_of(report)
        if not any(own & _ranks_of(other) for other in found):
            found.append(report)
    return found


def _merged(parts: list[Report]) -> Report:
    places = _communicators_of(parts)
    shifted = [_shifted(part, place, places) for place, part in enumerate(parts)]
    by_place = sorted(places.values())
    named: dict[int, tuple[str | None, str, int]] = {}
    for place, part in enumerate(parts):
        job = part.job
        for number, facts in enumerate(zip(job.names, job.groups, job.totals, strict=True)):
            named.setdefault(places[_key(job, number, place)], facts)
    ranks = [one for job in shifted for one in job.ranks]
    total = named[0][2]
    job = Job(
        {pid: process for each in shifted for pid, process in each.processes.items()},
        {pid: share for each in shifted for pid, share in each.cpu.items()},
        sorted(ranks, key=lambda one: (one.communicator, one.rank)),
        [named[place][0] for place in by_place],
        total - len({one.rank for one in ranks if one.communicator == 0}),
        [named[place][1] for place in by_place],
        [named[place][2] for place in by_place],
        next((each.program for each in shifted if each.program), ""),
        max(each.taken_s for each in shifted),
        [part.job.hosts[0] for part in parts],
    )
    _resolve(job)
    stacks = {
        pid | place << HOST_SHIFT: stack
        for place, part in enumerate(parts)
        for pid, stack in part.stacks.items()
    }
    return Report(job, stacks, parts=parts)


def _key(job: Job, number: int, place: int) -> tuple[str, int, int]:
    """Return what identifies a communicator on all hosts, or one of a single host."""
    group = job.groups[number]
    return (group, 0, 0) if group else ("", place, number)


def _communicators_of(parts: list[Report]) -> dict[tuple[str, int, int], int]:
    """Return the number of each communicator in the merged job, those with most ranks first."""
    totals: dict[tuple[str, int, int], int] = {}
    for place, part in enumerate(parts):
        for number, total in enumerate(part.job.totals):
            totals.setdefault(_key(part.job, number, place), total)
    return {key: n for n, key in enumerate(sorted(totals, key=lambda key: -totals[key]))}


def _shifted(part: Report, place: int, places: dict[tuple[str, int, int], int]) -> Job:
    """Return a host's job with the merged job's numbers of processes and communicators."""
    job, at = part.job, place << HOST_SHIFT
    ranks = [
        replace(
            one,
            communicator=places[_key(job, one.communicator, place)],
            pid=one.pid | at,
            awaited=[pid | at for pid in one.awaited],
        )
        for one in job.ranks
    ]
    return dataclasses.replace(
        job,
        processes={pid | at: process for pid, process in job.processes.items()},
        cpu={pid | at: share for pid, share in job.cpu.items()},
        ranks=ranks,
    )


# --- who waits for whom between hosts -------------------------------------------------------------


def _resolve(job: Job) -> None:
    """Note for which processes of other hosts each rank waits."""
    members = defaultdict[int, dict[int, RankLook]](dict)
    streams = defaultdict[int, set[int]](set)
    for one in job.ranks:
        if one.stream is None:
            members[one.communicator][one.rank] = one
        else:
            streams[one.communicator].add(one.rank)
    for one in job.ranks:
        if one.awaits_other_hosts and job.groups[one.communicator]:
            _resolve_rank(job, one, members[one.communicator], streams[one.communicator])


def _resolve_rank(job: Job, one: RankLook, members: dict[int, RankLook], on_gpu: set[int]) -> None:
    others = {
        rank: other
        for rank, other in members.items()
        if other.pid >> HOST_SHIFT != one.pid >> HOST_SHIFT
    }
    if one.abroad:
        awaited = [others[rank] for rank in one.abroad if rank in others]
        one.awaits_other_hosts = len(awaited) < len(one.abroad)
    elif one.stream is not None:  # those that have enqueued the call have a look at their stream
        awaited = [other for rank, other in others.items() if rank not in on_gpu]
        one.awaits_other_hosts = len(members) < job.totals[one.communicator]
    else:
        awaited = [other for other in others.values() if not other.is_in_collective]
        one.awaits_other_hosts = len(members) < job.totals[one.communicator]
        if not awaited:
            one.unheard = sorted({other.pid >> HOST_SHIFT for other in others.values()})
    one.awaited = list(dict.fromkeys([*one.awaited, *(other.pid for other in awaited)]))
