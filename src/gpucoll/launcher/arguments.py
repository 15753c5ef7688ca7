"""gpucoll-run's command line: its own options, then a program with options of its own."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import NoReturn

from gpucoll import config
from gpucoll.launcher.job import BIND_MODES
from gpucoll.launcher.nodes import NodesError, Span, find_span, rank_counts
from gpucoll.launcher.terminal import columns
from gpucoll.version import __version__

__all__ = ["Options", "parse"]

PROGRAM = "gpucoll-run"

DESCRIPTION = (
    "Start a program on several ranks of this host, watch them, and end them together. With "
    "--nodes they are part of a job over several hosts, on each of which gpucoll-run is started."
)

EPILOG = """\
the program:
  script.py ARGUMENT ...     run by this Python interpreter
  -m module ARGUMENT ...     likewise, as python -m does
  program ARGUMENT ...       anything that can be executed, looked up on PATH

Every line that a rank prints gets its rank in front: [2] text. The launcher's standard input goes
to rank 0. SIGINT (Ctrl-C), SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are handed on to all ranks; a
second Ctrl-C kills them. When a rank fails, the others get the grace time to end by themselves,
then SIGTERM, then, after the same time again, SIGKILL. What a rank started and left running is
ended with it. Ranks that wait in gpucoll.init for one that has ended, with exit code 0 too, fail.

exit code: 0 when all ranks ended with 0; else that of the rank that failed first, 128 + N if signal
N killed it; 124 after --timeout; 1 when what they print cannot be written; 2 for a wrong command
line.

several hosts: gpucoll-run --nodes 2 --node-rank 0 --meet HOST:PORT -n 4 ... on HOST, and the same
with --node-rank 1 on the other, with the same GPUCOLL_SECRET in both terminals. -n 4,2 starts 4
ranks on node 0 and 2 on node 1. Each launcher watches and ends the ranks of its own host.

OMP_NUM_THREADS is not set: programs with thread pools may want to set it when ranks are not bound.
"""

TAKE_A_VALUE = {
    *("-n", "-np", "--ranks", "--nodes", "--node-rank", "--meet"),
    *("--bind", "--timeout", "--grace"),
}


@dataclass(frozen=True)
class Options:
    """A command line, understood and checked."""

    ranks: int
    """To be started here."""
    bind: str
    prefix: bool
    timeout_s: float | None
    grace_s: float
    command: list[str]
    span: Span | None = None
    """Which of them all, where the job is one over several hosts."""


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line: the usage above it would hide what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and exit with code 2."""
        self.exit(2, f"{PROGRAM}: {message} (see {PROGRAM} --help)\n")


class Formatter(argparse.RawDescriptionHelpFormatter):
    """As wide as the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=columns() - 2)


def make_parser() -> OneLineParser:
    """Return the parser of gpucoll-run's own options."""
    parser = OneLineParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} -n RANKS [options] (script.py | -m module | program) [argument ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    add_options(parser)
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", help="run a module, as python -m does"
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    return parser


def add_options(parser: OneLineParser) -> None:
    """Add what stands before the program."""
    parser.add_argument(
        "-n",
        "-np",
        "--ranks",
        type=counts,
        required=True,
        metavar="RANKS",
        help="number of ranks to start; over several hosts on each, or a list: 4,2",
    )
    parser.add_argument(
        "--nodes", type=rank_count, metavar="N", help="number of hosts of the job (default: 1)"
    )
    parser.add_argument(
        "--node-rank", type=whole, metavar="I", help="which of them this is, from 0 on"
    )
    parser.add_argument(
        "--meet",
        metavar="HOST:PORT",
        help="where the hosts' ranks meet: an address and a free port of node 0, or file:///PATH "
        "on a file system that all share (default: GPUCOLL_MEET)",
    )
    parser.add_argument(
        "--bind",
        choices=BIND_MODES,
        default="auto" if config.binding_allowed() else "none",
        help="auto: bind ranks to disjoint sets of CPUs if there are enough; none: do not "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--prefix",
        action="store_true",
        default=True,
        help="put [rank] in front of each line (default)",
    )
    parser.add_argument(
        "--no-prefix", dest="prefix", action="store_false", help="show lines as they are"
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="S",
        help="end all ranks after so many seconds (default: never)",
    )
    parser.add_argument(
        "--grace",
        type=seconds,
        metavar="S",
        help="grace time in seconds (default: GPUCOLL_GRACE_S, or 5)",
    )


def rank_count(text: str) -> int:
    """Return a number of ranks."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def whole(text: str) -> int:
    """Return a whole number."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def counts(text: str) -> list[int]:
    """Return numbers of ranks."""
    try:
        return rank_counts(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from 1 on, nor a list of such"
        ) from None


def seconds(text: str) -> float:
    """Return a time in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def parse(arguments: list[str]) -> Options:
    """Understand a command line; exit with code 2 and one line if it is wrong."""
    own, rest = split(arguments)
    parser = make_parser()
    known = parser.parse_args(own)
    try:
        grace_s = known.grace if known.grace is not None else seconds(str(config.grace_s()))
    except (ValueError, argparse.ArgumentTypeError):
        parser.error(f"{config.GRACE_S}={os.environ[config.GRACE_S]} is not a number of seconds")
    if known.module is not None:
        command = [sys.executable, "-m", known.module, *rest]
    elif rest:
        command = program_command(parser, rest[0], rest[1:])
    else:
        parser.error(
            "which program is to be run? A script.py, -m module or an executable is missing"
        )
    try:
        ranks, span = find_span(known.ranks, known.nodes, known.node_rank, known.meet)
    except NodesError as error:
        parser.error(str(error))
    return Options(ranks, known.bind, known.prefix, known.timeout, grace_s, command, span)


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Divide a command line into gpucoll-run's options and the program with its arguments.

    The program's options must not be looked at, and argparse has no way to stop at the first
    argument.
    """
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            return arguments[:position], arguments[position + 1 :]
        if word.startswith("-m") and word != "-":
            end = position + (2 if word == "-m" else 1)
            return arguments[:end], arguments[end:]
        if not word.startswith("-"):
            break
        position += 2 if word in TAKE_A_VALUE else 1
    return arguments[:position], arguments[position:]


def program_command(parser: OneLineParser, program: str, arguments: list[str]) -> list[str]:
    """Return the command line that runs a script or an executable."""
    if program.endswith(".py"):
        if not os.path.isfile(program):
            parser.error(f"no such file: {program}")
        return [sys.executable, program, *arguments]
    found = which(program)
    if found is None:
        if os.path.exists(program):
            parser.error(f"{program} is neither a .py file nor executable")
        parser.error(f"no such program: {program}")
    return [found, *arguments]


def which(program: str) -> str | None:
    """Return the path of an executable, looked up on PATH unless it names a folder.

    As `shutil.which`, whose module takes longer to import than everything else here.
    """
    folders = [""] if os.path.dirname(program) else os.get_exec_path()
    for folder in folders:
        path = os.path.join(folder, program)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None
