"""gpucoll-run's command line: its own options, then a program with its arguments."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NamedTuple

from gpucoll import config
from gpucoll.command_line import OneLineParser, at_least_one
from gpucoll.launcher.elastic import DEFAULT_RESTARTS, Elastic
from gpucoll.launcher.job import BIND_MODES
from gpucoll.launcher.nodes import NodesError, Span, find_span, rank_counts
from gpucoll.terminal import columns

__all__ = ["Options", "parse"]

PROGRAM = "gpucoll-run"

DESCRIPTION = (
    "Start a program on several ranks of this host, watch them, and end them together. With "
    "--nodes they belong to a job over several hosts: start gpucoll-run on each of them."
)

EPILOG = """\
the program:
  script.py ARGUMENT ...     run by this Python interpreter
  -m module ARGUMENT ...     likewise, as with python -m
  program ARGUMENT ...       any executable, looked up on PATH

Each line that a rank prints is prefixed with its rank: [2] text. Rank 0 reads the launcher's
standard input. SIGINT (Ctrl-C), SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded to all ranks; a
second Ctrl-C kills them. SIGQUIT (Ctrl-\\) shows which rank makes the others wait, as gpucoll why
does, and the job goes on. If a rank fails, the others have the grace time to end by themselves.
Then they receive SIGTERM and, after the same time again, SIGKILL. Processes that a rank has started
and left running are ended with it. Ranks that wait in gpucoll.init for a rank that has ended fail,
even if its exit code was 0.

exit code: 0 if all ranks ended with 0; otherwise that of the rank that failed first, or 128 + N if
signal N killed it; 124 after --timeout; 1 if the ranks' output cannot be written; 2 for a wrong
command line.

several hosts: run gpucoll-run --nodes 2 --node-rank 0 --meet HOST:PORT -n 4 ... on HOST, and the
same with --node-rank 1 on the other host, with the same GPUCOLL_SECRET in both terminals. -n 4,2
starts 4 ranks on node 0 and 2 on node 1. Each launcher watches and ends the ranks of its own host.

elastic jobs: --elastic 2:4 starts 4 ranks. If one fails, the job goes on: another process takes its
place, joins the others (Communicator.grow), and its lines begin with [1#2], the second process in
the place of rank 1. The job fails when fewer than 2 members are left. Once a rank has ended with 0,
nothing is started again. With --nodes, 2:4 counts the ranks of all hosts.

OMP_NUM_THREADS is not set; if ranks are not bound, programs with thread pools may need it.
"""

TAKE_A_VALUE = {
    *("-n", "-np", "--ranks", "--nodes", "--node-rank", "--meet"),
    *("--bind", "--timeout", "--grace", "--elastic", "--restarts"),
}


class Options(NamedTuple):
    """A parsed and checked command line."""

    ranks: int
    """The number of ranks to start here."""
    bind: str
    prefix: bool
    timeout_s: float | None
    grace_s: float
    command: list[str]
    span: Span | None = None
    """Which ranks these are, if the job runs on several hosts."""
    elastic: Elastic | None = None
    """Whether and how the job goes on after failures."""


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
    )
    add_options(parser)
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", help="run a module, as python -m does"
    )
    return parser


def add_options(parser: OneLineParser) -> None:
    """Add the options that precede the program."""
    parser.add_argument(
        "-n",
        "-np",
        "--ranks",
        type=counts,
        metavar="RANKS",
        help="number of ranks to start; with several hosts on each of them, or a list: 4,2",
    )
    parser.add_argument(
        "--nodes", type=at_least_one, metavar="N", help="number of hosts of the job (default: 1)"
    )
    parser.add_argument(
        "--node-rank", type=whole, metavar="I", help="the number of this host, from 0 on"
    )
    parser.add_argument(
        "--meet",
        metavar="HOST:PORT",
        help=(
            "where the hosts' ranks meet: an address and a free port of node 0, or file:///PATH "
            "on a file system that all hosts share (default: GPUCOLL_MEET)"
        ),
    )
    parser.add_argument(
        "--elastic",
        type=least_and_most,
        metavar="MIN:MAX",
        help="start MAX ranks, and start again what fails while at least MIN are left",
    )
    parser.add_argument(
        "--restarts",
        type=whole,
        metavar="N",
        help=(
            "with --elastic: how many processes this launcher starts again; after that, places "
            f"stay empty (default: {DEFAULT_RESTARTS})"
        ),
    )
    parser.add_argument(
        "--bind",
        choices=BIND_MODES,
        default="auto" if config.binding_allowed() else "none",
        help=(
            "auto: bind ranks to disjoint sets of CPUs if there are enough; none: do not bind "
            "(default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--prefix", action="store_true", default=True, help="prefix each line with [rank] (default)"
    )
    parser.add_argument(
        "--no-prefix", dest="prefix", action="store_false", help="show lines without a prefix"
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="S",
        help="end all ranks after this many seconds (default: never)",
    )
    parser.add_argument(
        "--grace",
        type=seconds,
        metavar="S",
        help="grace time in seconds (default: GPUCOLL_GRACE_S, or 5)",
    )


def whole(text: str) -> int:
    """Parse a whole number."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def counts(text: str) -> list[int]:
    """Parse one number of ranks, or a list of them."""
    try:
        return rank_counts(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a whole number of at least 1 nor a list of them"
        ) from None


def least_and_most(text: str) -> tuple[int, int]:
    """Parse the numbers of ranks of an elastic job."""
    words = text.split(":")
    if len(words) == 2 and all(word.isdecimal() for word in words):
        least, most = int(words[0]), int(words[1])
        if 1 <= least <= most:
            return least, most
    raise argparse.ArgumentTypeError(
        f"{text!r} is not MIN:MAX, two whole numbers with 1 <= MIN <= MAX"
    )


def seconds(text: str) -> float:
    """Parse a time in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def parse(arguments: list[str]) -> Options:
    """Parse a command line; if it is wrong, exit with code 2 and one line."""
    own, rest = split(arguments)
    parser = make_parser()
    known = parser.parse_args(own)
    if known.ranks is None and known.elastic is None:
        parser.error("the following arguments are required: -n/-np/--ranks")
    try:
        grace_s = known.grace if known.grace is not None else seconds(str(config.grace_s()))
    except (ValueError, argparse.ArgumentTypeError):
        parser.error(f"{config.GRACE_S}={os.environ[config.GRACE_S]} is not a number of seconds")
    if known.module is not None:
        command = [*python_command(), "-m", known.module, *rest]
    elif rest:
        command = program_command(parser, rest[0], rest[1:])
    else:
        parser.error("there is no program to run: add a script.py, -m module or an executable")
    try:
        ranks, span = find_span(ranks_of(known), known.nodes, known.node_rank, known.meet)
        elastic = elastic_of(known, span.world_size if span else ranks)
    except NodesError as error:
        parser.error(str(error))
    return Options(ranks, known.bind, known.prefix, known.timeout, grace_s, command, span, elastic)


def ranks_of(known: argparse.Namespace) -> list[int]:
    """Return the numbers of ranks, which -n gives, or --elastic for one host."""
    if known.ranks is not None:
        ranks: list[int] = known.ranks
        return ranks
    if (known.nodes or 1) > 1:
        raise NodesError(
            "--elastic counts the ranks of all hosts: with --nodes, give -n, the number on each"
        )
    return [known.elastic[1]]


def elastic_of(known: argparse.Namespace, total: int) -> Elastic | None:
    """Return the options of an elastic job that has this many ranks at its start, if it is one."""
    if known.elastic is None:
        if known.restarts is not None:
            raise NodesError("--restarts is for elastic jobs: add --elastic MIN:MAX")
        return None
    least, most = known.elastic
    if most != total:
        raise NodesError(
            f"--elastic {least}:{most} is a job of {most} ranks, but -n makes it {total}: the "
            "numbers must agree"
        )
    restarts = DEFAULT_RESTARTS if known.restarts is None else known.restarts
    return Elastic(least, most, restarts)


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into gpucoll-run's options and the program with its arguments.

    The program's own options must not be parsed, and argparse cannot stop at the first positional
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
    """Return the command that runs a script or an executable."""
    if program.endswith(".py"):
        if not os.path.isfile(program):
            parser.error(f"no such file: {program}")
        return [*python_command(), program, *arguments]
    found = which(program)
    if found is None:
        if os.path.exists(program):
            parser.error(f"{program} is neither a .py file nor executable")
        parser.error(f"no such program: {program}")
    return [found, *arguments]


def python_command() -> list[str]:
    """Return the words before a script or ``-m module`` that run it in Python."""
    prepared = ["-m", "gpucoll.integrations.jax"] if config.is_for_jax() else []
    return [sys.executable, *prepared]


def which(program: str) -> str | None:
    """Return the path of an executable: from PATH, unless its name contains a folder.

    It replaces `shutil.which`, whose module takes longer to import than everything else here.
    """
    folders = [""] if os.path.dirname(program) else os.get_exec_path()
    for folder in folders:
        path = os.path.join(folder, program)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None
