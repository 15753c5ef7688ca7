"""``gpucoll-doctor``: examine this machine; report what works, what is used and what is missing."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from gpucoll.command_line import OneLineParser
from gpucoll.doctor.examination import Limits, examine
from gpucoll.doctor.text import render
from gpucoll.errors import GpucollError

__all__ = ["main"]

PROGRAM = "gpucoll-doctor"

DESCRIPTION = """\
Report what was found on this machine, which libraries and backends are used and why, and what is
missing, with the command that installs it. Each probe runs in its own process, under a deadline.
"""

EPILOG = """\
exit code: 0 if the CPU path works (with --no-self-test: if nothing that it needs is missing), 1 if
it does not, 2 for a wrong command line. A missing GPU or library is no failure. With --reach: 0 if
the other host was reached, else 1.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``gpucoll-doctor`` and return the exit code."""
    options = make_parser().parse_args(arguments)
    if options.listen or options.reach:
        return _between_hosts(options)
    limits = Limits(options.timeout) if options.timeout else Limits()
    try:
        report = examine(limits, not options.no_self_test, _say)
    except KeyboardInterrupt:
        return 130
    if options.json:
        text = json.dumps(report, indent=2) + "\n"
    else:
        text = render(report, _wants_colour())
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except OSError as error:  # the disk is full
        # or Python would fail again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _say(f"cannot write the report: {error.strerror}")
        return 1
    return 0 if report["cpu_path_works"] else 1


def _between_hosts(options: argparse.Namespace) -> int:
    from gpucoll.doctor.reach import UnreachableError, listen, reach

    def say(state: str, name: str, text: str) -> None:
        print(f"  {state:<4} {name:<15} {text}", flush=True)

    timeout_s = options.timeout or Limits().probe_s
    try:
        if options.listen:
            listen(options.listen, say, timeout_s)
        else:
            reach(options.reach, say, timeout_s)
    except (UnreachableError, GpucollError) as error:
        say("bad", "failed", str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def make_parser() -> OneLineParser:
    """Return the parser of this command's arguments."""
    parser = OneLineParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", action="store_true", help="print everything as JSON (keys: docs/doctor.md)"
    )
    parser.add_argument(
        "--no-self-test",
        action="store_true",
        help="do not start two processes to test the CPU path",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="S",
        help=f"time limit of each probe, in seconds (default: {Limits().probe_s:g})",
    )
    between = parser.add_mutually_exclusive_group()
    between.add_argument(
        "--listen",
        metavar="ADDRESS:PORT",
        help="answer --reach from other hosts at this address, until Ctrl-C",
    )
    between.add_argument(
        "--reach",
        metavar="HOST:PORT",
        help=(
            "test whether ranks here can reach ranks on a host where --listen runs (both need the "
            "job's secret in GPUCOLL_SECRET or GPUCOLL_SECRET_FILE)"
        ),
    )
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _wants_colour() -> bool:
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not is_plain


def _say(line: str) -> None:
    print(f"{PROGRAM}: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
