"""``gpucoll why``: who makes a running job wait, and where."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpucoll.command_line import OneLineParser, seconds_between
from gpucoll.observe import stacks
from gpucoll.observe.ask import ask
from gpucoll.observe.json_report import Report, ReportError, as_json, from_json
from gpucoll.observe.look import Job, Part, jobs_of, look
from gpucoll.observe.merge import merge, related
from gpucoll.observe.processes import ancestors_of, pids_here, user_of
from gpucoll.observe.segments import Observed, find
from gpucoll.observe.stacks import LIMIT_S, read_stacks
from gpucoll.observe.text import lines_of
from gpucoll.observe.verdict import PATIENCE_S, Verdict, judge

__all__ = ["main", "make_parser"]

EXIT_HEALTHY, EXIT_STUCK, EXIT_NONE = 0, 1, 2
MOST_CALLERS = 8
WATCH_S = 2.0
ASKED_STACKS_S = 2.0
"""For stacks with `--local`: another host may wait, for 4 s at most, and rather lacks a stack."""

DESCRIPTION = """\
Say who makes a running job wait. Looks at the jobs of this user on this host, without stopping
them: their ranks write where they are into memory that this command maps for reading.
"""
EPILOG = """\
exit code: 0 if the jobs move, 1 if ranks of one wait for longer than --patience, 2 if there is no
job or the command line is wrong.
"""


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
    parser.add_argument(
        "--local", action="store_true", help="look at this host alone: ask no other host of a job"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--merge",
        nargs="+",
        metavar="FILE",
        help="look at no process, but judge as one what --json has printed on several hosts; "
        "-: standard input",
    )
    parser.add_argument(
        "--patience",
        type=seconds_between(0, 86400),
        default=PATIENCE_S,
        metavar="S",
        help="report waits of at least this many seconds (default: %(default)g)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    if given.merge and (given.pid is not None or given.watch or given.local):
        parser.error("--merge looks at no process: it cannot be used with PID, --watch or --local")
    try:
        if given.merge:
            return _merge_files(given)
        code = _once(given)
        while given.watch and code != EXIT_NONE:
            time.sleep(WATCH_S)
            code = _once(given, is_first=False)
    except ReportError as error:
        print(f"gpucoll why: {error}", file=sys.stderr)
        return EXIT_NONE
    except KeyboardInterrupt:
        return 130
    return code


def _once(given: argparse.Namespace, is_first: bool = True) -> int:
    found = find(pids_here())
    try:
        jobs = [job for job in jobs_of(found.parts) if is_meant(job, given.pid)]
        reports = [_report(job, given) for job in jobs]
    finally:
        found.close()
    if given.pid is not None or not found.segments:
        tell_unreadable("gpucoll why", found.unreadable, given.pid)
    if not reports:
        what = none_text(given.pid) if is_first else "the job has ended"
        print(f"gpucoll why: {what}", file=sys.stderr)
        return EXIT_NONE
    if not is_first:
        print()
    merged = merge(reports) if given.local else _with_other_hosts(jobs, reports)
    code = _tell(merged, given)
    if not given.json and code == EXIT_STUCK and stacks.missing():
        print(f"  ({stacks.missing()})")
    return code


def _with_other_hosts(jobs: list[list[Part]], reports: list[Report]) -> list[Report]:
    """Ask the other hosts of each job; return one report for each job."""
    here = {id(report): job for report, job in zip(reports, jobs, strict=True)}
    found, silent = [*reports], dict[str, dict[str, list[int]]]()
    for report in merge(reports):
        parts = [part for own in report.parts or [report] for part in here[id(own)]]
        spanning = [part for part in parts if isinstance(part, Observed) and part.job.group]
        if report.job.elsewhere and spanning:
            answers, silent[spanning[0].job.group] = ask(spanning[0])
            group = spanning[0].job.group
            found += [one for one in answers if group in one.job.groups]
    merged = merge(found)
    for report in merged:
        for group, hosts in silent.items():
            if group in report.job.groups:
                report.job.silent = hosts
    return merged


def _tell(reports: list[Report], given: argparse.Namespace) -> int:
    """Print the verdicts on some jobs; return the exit code."""
    judged = [(report, judge(report.job, given.patience)) for report in reports]
    if given.json:
        print(as_json(judged), flush=True)
    else:
        texts = [
            "\n".join(lines_of(report.job, verdict, report.stacks, given.stacks))
            for report, verdict in judged
        ]
        print("\n\n".join(texts), flush=True)
    return max(EXIT_HEALTHY if verdict.is_healthy else EXIT_STUCK for _, verdict in judged)


def _merge_files(given: argparse.Namespace) -> int:
    """Judge what `--json` has printed on several hosts."""
    by_file = [(name, _read(name)) for name in given.merge]
    reports = [report for _, found in by_file for report in found]
    jobs = related(reports)
    for name, found in by_file:
        others = [one for other, more in by_file if other != name for one in more]
        mine = [job for job in jobs if any(one is report for one in job for report in found)]
        if others and not any(one is other for job in mine for one in job for other in others):
            hosts = ", ".join(sorted({one.job.hosts[0] for one in found})) or "no host"
            raise ReportError(
                f"{name} (of {hosts}) is of another job than the other files: merge files that "
                "gpucoll why --json has printed on the hosts of one job"
            )
    if not reports:
        raise ReportError("the files have no job")
    return _tell(merge(reports), given)


def _read(name: str) -> list[Report]:
    """Return the reports in a file; ReportError names the file."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
        return from_json(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{name} cannot be read: {error}") from None
    except ReportError as error:
        raise ReportError(f"{name} {error}") from None


def told(pids: Sequence[int]) -> str:
    """Return the report on the jobs of these processes, without stacks; empty if there is none."""
    found = find(pids)
    try:
        jobs = [look(job) for job in jobs_of(found.parts)]
    finally:
        found.close()
    return "\n\n".join("\n".join(lines_of(job, judge(job), {}, False)) for job in jobs)


def none_text(pid: int | None) -> str:
    """Return that there is no job, or none with this process, and why."""
    user = user_of(pid) if pid else None
    if pid and user is None:
        return f"there is no process {pid} on this host"
    if user is not None and os.geteuid() not in (0, user):
        return (
            f"process {pid} belongs to user {user}: the kernel lets that user and root look at it, "
            f"and refuses it to user {os.geteuid()}"
        )
    what = f"process {pid} belongs to no job" if pid else "there is no job"
    return f"{what} that this user may look at on this host"


def is_meant(job: Sequence[Part], pid: int | None) -> bool:
    """Return whether the command is about this job."""
    if pid is None:
        return True
    return any(pid in ancestors_of(each) for part in job for each in part.pids)


def _report(parts: list[Part], given: argparse.Namespace) -> Report:
    job = look(parts)
    wanted = job.pids if given.stacks else _speakers(job, judge(job, given.patience))
    there = [pid for pid in job.living if pid in wanted]
    return Report(job, read_stacks(there, ASKED_STACKS_S if given.local else LIMIT_S))


def _speakers(job: Job, verdict: Verdict) -> list[int]:
    """Return the processes whose callers are shown: one of each group of ranks that stand alike."""
    # A host whose ranks all wait, or do not wait, may have the one that other hosts wait for.
    if verdict.kind == "moving" and not job.elsewhere:
        return []
    if verdict.kind == "outside":
        return job.pids[:MOST_CALLERS]
    by_text: dict[str, int] = {}
    for one in job.ranks:
        by_text.setdefault(one.text, one.pid)
    return list(dict.fromkeys(by_text.values()))[:MOST_CALLERS]


def tell_unreadable(command: str, unreadable: Mapping[int, str], pid: int | None) -> None:
    """Tell why segments of the process that is meant, or of any if none is, cannot be read."""
    for process, text in unreadable.items():
        if pid in (None, process):
            print(f"{command}: process {process} cannot be read: {text}", file=sys.stderr)
