"""``gpucoll why``: who makes a running job wait, and where."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from gpucoll.command_line import OneLineParser
from gpucoll.observe import stacks
from gpucoll.observe.look import Job, Part, jobs_of, look
from gpucoll.observe.processes import ancestors_of, pids_here
from gpucoll.observe.segments import Found, find
from gpucoll.observe.stacks import Stack, read_stacks
from gpucoll.observe.text import as_json, lines_of
from gpucoll.observe.verdict import PATIENCE_S, Verdict, judge

__all__ = ["main", "make_parser"]

EXIT_HEALTHY, EXIT_STUCK, EXIT_NONE = 0, 1, 2
MOST_CALLERS = 8
WATCH_S = 2.0

DESCRIPTION = """\
Say who makes a running job wait. Looks at the jobs of this user on this host, without stopping
them: their ranks write where they are into memory that this command maps for reading.
"""
EPILOG = """\
exit code: 0 if the jobs move, 1 if ranks of one wait for longer than --patience, 2 if there is no
job or the command line is wrong.
"""

Report = tuple[Job, Verdict, dict[int, Stack]]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = OneLineParser(
        prog="gpucoll why",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "pid",
        nargs="?",
        type=int,
        metavar="PID",
        help="one job: a process of it, or of its launcher (default: all jobs)",
    )
    parser.add_argument(
        "--stacks", action="store_true", help="show the Python stacks of all ranks, as one tree"
    )
    parser.add_argument("--watch", action="store_true", help="look again and again, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="S",
        help="report waits of at least this many seconds (default: %(default)g)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    given = make_parser().parse_args(arguments)
    try:
        code = _once(given)
        while given.watch and code != EXIT_NONE:
            time.sleep(WATCH_S)
            print()
            code = _once(given)
    except KeyboardInterrupt:
        return 130
    return code


def _once(given: argparse.Namespace) -> int:
    found = find(pids_here())
    try:
        reports = [_report(job, given) for job in jobs_of(found.parts) if is_meant(job, given.pid)]
    finally:
        found.close()
    _tell_unreadable(found, given.pid)
    if not reports:
        what = f"process {given.pid} belongs to no job" if given.pid else "there is no job"
        print(f"gpucoll why: {what} that this user may look at on this host", file=sys.stderr)
        return EXIT_NONE
    if given.json:
        print(as_json(reports))
    else:
        texts = ["\n".join(lines_of(*report, given.stacks)) for report in reports]
        print("\n\n".join(texts))
        if stacks.missing() and any(not verdict.is_healthy for _, verdict, _ in reports):
            print(f"  ({stacks.missing()})")
    return max(EXIT_HEALTHY if verdict.is_healthy else EXIT_STUCK for _, verdict, _ in reports)


def told(pids: Sequence[int]) -> str:
    """Return the report on the jobs of these processes, without stacks; empty if there is none."""
    found = find(pids)
    try:
        jobs = [look(job) for job in jobs_of(found.parts)]
    finally:
        found.close()
    return "\n\n".join("\n".join(lines_of(job, judge(job), {}, False)) for job in jobs)


def is_meant(job: list[Part], pid: int | None) -> bool:
    """Return whether the command is about this job."""
    if pid is None:
        return True
    return any(pid in ancestors_of(each) for part in job for each in part.pids)


def _report(parts: list[Part], given: argparse.Namespace) -> Report:
    job = look(parts)
    verdict = judge(job, given.patience)
    wanted = job.pids if given.stacks else _speakers(job, verdict)
    there = [pid for pid in wanted if job.processes[pid] is not None]
    return job, verdict, read_stacks(there)


def _speakers(job: Job, verdict: Verdict) -> list[int]:
    """Return the processes whose callers are shown: one of each group of ranks that stand alike."""
    if verdict.kind == "moving":
        return []
    if verdict.kind == "outside":
        return job.pids[:MOST_CALLERS]
    by_text: dict[str, int] = {}
    for one in job.ranks:
        by_text.setdefault(one.text, one.pid)
    return list(dict.fromkeys(by_text.values()))[:MOST_CALLERS]


def _tell_unreadable(found: Found, pid: int | None) -> None:
    """Tell of segments that cannot be read, if nothing else was found or one of them is meant."""
    for process, text in found.unreadable.items():
        if pid == process or (pid is None and not found.segments):
            print(f"gpucoll why: process {process} cannot be read: {text}", file=sys.stderr)
