"""What `gpucoll why` prints: the verdict, then groups of ranks, the odd ones first."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpucoll.observe.look import Job, RankLook
from gpucoll.observe.stacks import Stack, tree_of
from gpucoll.observe.verdict import Verdict
from gpucoll.wording import range_of_ranks

__all__ = ["as_json", "lines_of", "program_of"]

_STATES = {"R": "runs", "S": "sleeps", "D": "waits for the kernel", "T": "stopped", "t": "debugged"}
_MOST_GROUPS = 16


def lines_of(job: Job, verdict: Verdict, stacks: dict[int, Stack], tree: bool) -> Iterator[str]:
    """Yield the report on a job, line by line.

    Parameters
    ----------
    job : Job
        The looks.
    verdict : Verdict
        What they mean.
    stacks : dict
        The stacks that were read, by process.
    tree : bool
        Whether to show them all, as a tree.
    """
    yield " ".join([verdict.text, *_places(job, verdict, stacks)])
    yield ""
    yield f"{_title(job)}:"
    groups = _groups_of(job)
    for ranks in groups[:_MOST_GROUPS]:
        yield from _group_lines(job, ranks, stacks)
    if len(groups) > _MOST_GROUPS:
        yield f"  and {len(groups) - _MOST_GROUPS} more groups (--json shows all)"
    if job.elsewhere:
        yield f"  {job.elsewhere} more ranks are on other hosts: run gpucoll why there"
    if tree:
        yield ""
        yield from tree_of({job.number(pid): stacks[pid] for pid in job.pids if pid in stacks})


def _places(job: Job, verdict: Verdict, stacks: dict[int, Stack]) -> Iterator[str]:
    """Yield where the ranks to look at are in their program."""
    found = {
        stacks[pid].caller for pid in job.pids if pid in stacks and job.number(pid) in verdict.ranks
    }
    if verdict.kind == "waiting" and found - {""}:
        yield f"It is at {', '.join(sorted(found - {''}))}."
    everywhere = {stack.caller for stack in stacks.values()} - {""}
    if verdict.kind == "outside" and everywhere:
        yield f"{'They are' if len(job.pids) > 1 else 'It is'} at {', '.join(sorted(everywhere))}."


def _title(job: Job) -> str:
    count = len(job.processes)
    program = next(filter(None, map(program_of, job.pids)), "")
    ranks = "1 rank" if count == 1 else f"{count} ranks"
    return f"{ranks} of {program}" if program else ranks


def program_of(pid: int) -> str:
    """Return the program that a process runs, without the interpreter."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return ""
    program = words[1:] if words and Path(words[0]).name.startswith("python") else words
    return " ".join(program)[:60]


def _groups_of(job: Job) -> list[list[RankLook]]:
    """Return the ranks that stand alike, the smallest groups first."""
    groups = defaultdict[tuple[object, ...], list[RankLook]](list)
    idle, listed = {one.pid for one in job.ranks if one.is_in_call}, set[int]()
    for one in job.ranks:
        is_listed = one.pid in listed
        listed.add(one.pid)
        if is_listed and (not one.is_in_call or one.closed is not None):
            continue  # in no call of a further communicator: nothing to tell
        if not one.communicator and not one.is_in_call and one.pid in idle:
            continue  # it is in a call of another communicator
        process = job.processes[one.pid]
        state = process.state if process is not None and process.state in "TtZ" else ""
        groups[one.communicator, one.text, process is None, state].append(one)
    return sorted(groups.values(), key=len)


def _group_lines(job: Job, ranks: list[RankLook], stacks: dict[int, Stack]) -> Iterator[str]:
    first = ranks[0]
    name = job.names[first.communicator]
    is_further = first.communicator and name is not None
    of = f" of communicator {name or first.communicator}" if is_further else ""
    waits = [one.since_s for one in ranks if one.since_s is not None]
    how_long = f", for {max(waits):.1f} s" if waits else ""
    yield f"  {range_of_ranks([one.rank for one in ranks])}{of}: {first.text}{how_long}"
    yield f"      {_processes_text(job, ranks)}"
    callers = {stacks[one.pid].caller for one in ranks if one.pid in stacks} - {""}
    yield from (f"      at {caller}" for caller in sorted(callers))


def _processes_text(job: Job, ranks: list[RankLook]) -> str:
    shown = []
    for one in ranks[:4]:
        process = job.processes[one.pid]
        if process is None or process.has_ended:
            shown.append(f"process {one.pid} has ended")
            continue
        swap = f", {process.swap_bytes >> 20} MiB swapped" if process.swap_bytes >> 20 else ""
        state = _STATES.get(process.state, process.state)
        share, memory = job.cpu.get(one.pid, 0.0), process.rss_bytes >> 20
        shown.append(f"process {one.pid} {state}, {share:.0%} CPU, {memory} MiB{swap}")
    more = [f"{len(ranks) - 4} more"] if len(ranks) > 4 else []
    return "; ".join(shown + more)


def as_json(jobs: list[tuple[Job, Verdict, dict[int, Stack]]]) -> str:
    """Return everything that was found, as JSON."""
    found: list[dict[str, Any]] = [
        {
            "verdict": asdict(verdict) | {"is_healthy": verdict.is_healthy},
            "ranks": [asdict(one) for one in job.ranks],
            "processes": {
                pid: None if process is None else asdict(process) | {"cpu": job.cpu.get(pid, 0.0)}
                for pid, process in job.processes.items()
            },
            "stacks": {pid: asdict(stack) for pid, stack in stacks.items()},
            "ranks_elsewhere": job.elsewhere,
        }
        for job, verdict, stacks in jobs
    ]
    return json.dumps(found, indent=2)
