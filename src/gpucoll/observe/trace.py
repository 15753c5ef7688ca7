"""``gpucoll trace``: the calls of a running job, as a file for Perfetto."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gpucoll.command_line import OneLineParser, at_least_one, seconds_between
from gpucoll.errors import SharedMemoryError
from gpucoll.observe.look import Part, jobs_of
from gpucoll.observe.processes import pids_here, program_of
from gpucoll.observe.recording import Recording, record
from gpucoll.observe.segments import Found, Observed, find
from gpucoll.observe.trace_merge import MergeError, merge
from gpucoll.observe.tracks import encode
from gpucoll.observe.why import is_meant, none_text, tell_unreadable

__all__ = ["main", "make_parser"]

EXIT_WRITTEN, EXIT_FAILED, EXIT_NONE = 0, 1, 2
EXIT_INTERRUPTED = 130
MOST_CALLS = 200_000

DESCRIPTION = """\
Record the calls of a running job for some seconds, and write them as a file that
https://ui.perfetto.dev opens. The job goes on meanwhile.
"""
EPILOG = """\
Ctrl-C ends the recording and writes what there is.
exit code: 0 if the file was written, 1 if that failed, 2 if there is no job, if PID is needed, or
if the command line is wrong.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = OneLineParser(
        prog="gpucoll trace",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "pid",
        nargs="?",
        type=int,
        metavar="PID",
        help="a process of the job, or of its launcher (needed if there are several jobs)",
    )
    parser.add_argument(
        "--seconds",
        type=seconds_between(0.05, 86400),
        default=5.0,
        metavar="S",
        help="how long to record (default: %(default)g)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpucoll.pftrace"),
        metavar="FILE",
        help="the file to write (default: %(default)s)",
    )
    parser.add_argument(
        "--most",
        type=at_least_one,
        default=MOST_CALLS,
        metavar="N",
        help="record at most N calls: 400 bytes of memory and 200 of the file each "
        "(default: %(default)d)",
    )
    parser.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="record nothing, but put files of several hosts into one, with their clocks aligned",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    if given.merge is not None and given.pid is not None:
        parser.error("--merge records nothing: it cannot be used with PID")
    return _record(given) if given.merge is None else _merge(given)


def _merge(given: argparse.Namespace) -> int:
    try:
        aligned = merge(given.merge, given.out)
    except (OSError, MergeError) as error:
        return _fail(str(error), EXIT_FAILED)
    print(f"{given.out}: in the time of {given.merge[0]}")
    for each in aligned:
        print(
            f"  {each.path}: {each.offset_ns / 1e9:+.6f} s, with an error of at most "
            f"{each.error_ns / 1e3:.1f} us ({each.n_calls} calls in common)"
        )
    return EXIT_WRITTEN


def _record(given: argparse.Namespace) -> int:
    found = find(pids_here())
    try:
        jobs = [_in_order(job) for job in jobs_of(found.parts) if is_meant(job, given.pid)]
        jobs = [job for job in jobs if job]
        if len(jobs) != 1:
            return _fail(_trouble(jobs, found, given.pid), EXIT_NONE)
        recording = _write(jobs[0], given)
    except SharedMemoryError as error:
        return _fail(str(error), EXIT_FAILED)
    except OSError as error:
        return _fail(f"{given.out} cannot be written: {error.strerror}", EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail(f"{given.out} has only a part of the calls", EXIT_INTERRUPTED)
    finally:
        found.close()
    print(_summary(recording, given.out))
    return EXIT_WRITTEN


def _write(job: list[Observed], given: argparse.Namespace) -> Recording:
    with given.out.open("wb") as file:
        try:
            recording = record(job, given.seconds, given.most)
            for part in encode(recording):
                file.write(part)
            file.flush()
        except (SharedMemoryError, OSError):
            if given.out.is_file():  # not a device
                given.out.unlink()
            raise
    return recording


def _in_order(job: list[Part]) -> list[Observed]:
    """Return the communicators as all hosts number them: large ones first, then the older ones."""
    segments = [each for each in job if isinstance(each, Observed)]
    return sorted(segments, key=lambda each: (-each.world_size, int(Path(each.path).name)))


def _fail(text: str, code: int) -> int:
    print(f"gpucoll trace: {text}", file=sys.stderr)
    return code


def _trouble(jobs: list[list[Observed]], found: Found, pid: int | None) -> str:
    """Say why there is no job, or which ones there are."""
    if not jobs:
        tell_unreadable("gpucoll trace", found.unreadable, pid)
        return none_text(pid)
    several = ", ".join(
        f"{job[0].pids[0]} ({job[0].world_size} ranks of {program_of(job[0].pids[0])})"
        for job in jobs
    )
    return f"there are {len(jobs)} jobs: give a process of one, such as {several}"


def _summary(recording: Recording, path: Path) -> str:
    first = recording.segments[0]
    seconds = (recording.ended_ns - recording.begun_ns) / 1e9
    count = len({pid for segment in recording.segments for pid in segment.pids})
    ranks = "1 rank" if count == 1 else f"{count} ranks"
    lines = [f"{path}: {recording.n_calls:,} calls of {ranks} in {seconds:.1f} s"]
    if left_out := recording.n_left_out:
        lines.append(
            f"  {left_out:,} more calls were left out, as the tracks 'calls left out' show: there "
            "was no room for them, or they came faster than this command could read them"
        )
    if first.n_elsewhere:
        others = first.n_elsewhere
        more = "1 more rank is" if others == 1 else f"{others} more ranks are"
        lines.append(f"  {more} on other hosts: run gpucoll trace there as well")
    return "\n".join(lines)
