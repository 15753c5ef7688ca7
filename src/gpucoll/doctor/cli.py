"""``gpucoll-doctor``: look at this machine and say what works, what is used and what is missing."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from gpucoll.doctor.examination import Limits, examine
from gpucoll.doctor.text import render
from gpucoll.version import __version__

__all__ = ["main"]

PROGRAM = "gpucoll-doctor"

DESCRIPTION = """\
Say what was found on this machine, which libraries and backends are used and why, and what is
missing, with the command that installs it. Each probe runs in a process of its own, under a
deadline.
"""

EPILOG = """\
exit code: 0 when the CPU path works (with --no-self-test: when nothing that it needs is missing),
1 when it does not, 2 for a wrong command line. A missing GPU or library is no failure.
"""


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line: the usage above it would hide what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and exit with code 2."""
        self.exit(2, f"{PROGRAM}: {message} (see {PROGRAM} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``gpucoll-doctor`` and return the exit code."""
    options = _parser().parse_args(arguments)
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would complain again at its exit
        _say(f"cannot write the report: {error.strerror}")
        return 1
    return 0 if report["cpu_path_works"] else 1


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--json", action="store_true", help="print everything as JSON (keys: docs/doctor.md)"
    )
    parser.add_argument(
        "--no-self-test",
        action="store_true",
        help="do not start two processes to see that the CPU path works",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="S",
        help=f"how long each probe may take, in seconds (default: {Limits().probe_s:g})",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
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
