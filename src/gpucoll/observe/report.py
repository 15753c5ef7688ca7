"""Writes the report on a failure, which a rank waits for: `gpucoll.group.host.report`."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpucoll.observe import stacks
from gpucoll.observe.look import jobs_of, look
from gpucoll.observe.processes import pids_here
from gpucoll.observe.segments import find
from gpucoll.observe.stacks import Stack
from gpucoll.observe.text import lines_of
from gpucoll.observe.verdict import judge
from gpucoll.version import __version__

__all__ = ["main", "report_on"]

_WAITING, _RAISING = "/gpucoll/group/host/report.py:", "/gpucoll/group/"
_ADVICE = "un gpucoll why --json there, and gpucoll why --merge here"
_LATER = {
    f"r{_ADVICE}": "the reports of their hosts show them",
    f"R{_ADVICE}": "Their hosts' reports show why",
}
"""What a report says instead of an advice that it comes too late for."""
_CALM = "No rank had been waiting before: the error above is the cause."


def main(arguments: Sequence[str]) -> int:
    """Write a report: FILE, the rank's PID, a limit in seconds; the error comes from stdin."""
    path, pid, limit_s = Path(arguments[0]), int(arguments[1]), float(arguments[2])
    signal.setitimer(signal.ITIMER_REAL, limit_s)  # the rank may be gone by then
    until = time.monotonic() + limit_s
    text = report_on(pid, sys.stdin.buffer.read().decode(), until)
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A new file: in a folder for all users, somebody may have put a link there.
        with part.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(part, path)
    except OSError as error:
        print(f"{path.parent}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def report_on(pid: int, error: str, until: float) -> str:
    """Return the report on the job of a process that raises an error.

    Parameters
    ----------
    pid : int
        The process.
    error : str
        The text of its error.
    until : float
        The time, by the monotonic clock, at which the report must be there.
    """
    found = find(pids_here())
    try:
        jobs = [
            look(job)
            for job in jobs_of(found.segments)
            if any(pid in segment.pids for segment in job)
        ]
    finally:
        found.close()
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    lines = [f"gpucoll {__version__} on {os.uname()[1]}, process {pid}, {when}.", "", error, ""]
    for job in jobs:
        verdict = judge(job, 0.0)
        if verdict.is_healthy:
            verdict = replace(verdict, text=_CALM)
        seen = stacks.read_stacks(job.living, (until - time.monotonic()) / 2)
        seen = {each: _without_report(stack) for each, stack in seen.items()}
        lines += lines_of(job, verdict, seen, tree=bool(seen))
    if missing := stacks.missing():
        lines.append(f"  ({missing})")
    text = "\n".join([*lines, ""])
    for advice, instead in _LATER.items():
        text = text.replace(advice, instead)
    return text


def _without_report(stack: Stack) -> Stack:
    """Return the stack as it was before the rank began to wait for its report."""
    frames = stack.frames
    if any(_WAITING in frame for frame in frames):
        frames = (*itertools.takewhile(lambda frame: _RAISING not in frame, frames),)
    return replace(stack, frames=frames)
