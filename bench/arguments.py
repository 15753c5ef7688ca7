"""The command line of ``gpucoll-bench``: nccl-tests' flags where it has them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpucoll.bench.argument_types import choice, count, factor, peers, seconds, size, sizes
from gpucoll.bench.collectives import (
    COLLECTIVES,
    DTYPE_ALIASES,
    DTYPES,
    REDOPS,
    Collective,
    allows,
)
from gpucoll.bench.peers import PEERS

__all__ = ["Options", "parse"]

EXAMPLES = """\
examples:
  gpucoll-bench
  gpucoll-bench all_reduce --ranks 4 -b 4 -e 64M -f 4 -d float32 -o sum --symmetric --limit
  gpucoll-bench --compare mpich=/envs/mpich,openmpi=/envs/openmpi/bin/python --json result.json
  gpucoll-run -n 4 -m gpucoll.bench all_reduce -d bfloat16,float16

exit codes: 0 all right; 1 wrong results, or a failure while measuring; 2 nothing was measured
(wrong arguments, a peer that is not there); 130 interrupted
"""


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes
    ----------
    ranks : int or None
        None where nothing was said: as many as there are CPUs, or as the launcher started.
    sizes_bytes : tuple of int
        In the order to be measured.
    step : str
        How they follow each other, for the table's header.
    combinations : tuple of (str, str)
        dtype and reduction; ("none", "none") where a collective takes neither.
    reps, warmup : int or None
        Calls in a sample, and before the first; None: chosen by time.
    rounds : int
        Samples of each case.
    compare : dict
        Peer -> path of its Python, or None: the environment of this one.
    """

    collective: str
    ranks: int | None
    sizes_bytes: tuple[int, ...]
    step: str
    combinations: tuple[tuple[str, str], ...]
    root: int
    reps: int | None
    warmup: int | None
    rounds: int
    check: bool
    symmetric: bool
    plan: bool
    limit: bool
    compare: dict[str, str | None]
    json_path: Path | None
    timeout_s: float
    command_line: str

    @property
    def traits(self) -> Collective:
        """The row of the collective."""
        return COLLECTIVES[self.collective]

    @property
    def variants(self) -> list[str]:
        """What to measure of gpucoll, by the names that `rank.library.Call` uses."""
        extra = {"symmetric": self.symmetric, "plan": self.plan, "limit": self.limit}
        return ["private", *(name for name, wanted in extra.items() if wanted)]


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options; an argument that cannot be meant ends the program with exit code 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = build_parser()
    given = parser.parse_args(arguments)
    traits = COLLECTIVES[given.collective]
    refuse_contradictions(parser, given, traits)
    combinations = [("none", "none")]
    if traits.has_data:
        combinations = [(dtype, "none") for dtype in given.dtype]
    if traits.reduces:
        combinations = [(d, o) for d in given.dtype for o in given.redop if allows(d, o)]
    if not combinations:
        parser.error(f"-o {','.join(given.redop)} is not defined on -d {','.join(given.dtype)}")
    return Options(
        collective=given.collective,
        ranks=given.ranks,
        sizes_bytes=sizes(given.first, given.last, given.factor, given.increment)
        if traits.has_data else (0,),
        step=f"{given.increment}(bytes)" if given.increment else f"{given.factor:g}(factor)",
        combinations=tuple(combinations),
        root=given.root,
        reps=given.reps,
        warmup=given.warmup,
        rounds=given.rounds,
        check=bool(given.check),
        symmetric=given.symmetric,
        plan=given.plan,
        limit=given.limit,
        compare=given.compare,
        json_path=given.json,
        timeout_s=given.timeout,
        command_line=" ".join(["gpucoll-bench", *arguments]),
    )  # fmt: skip


def refuse_contradictions(
    parser: argparse.ArgumentParser, given: argparse.Namespace, traits: Collective
) -> None:
    """End the program where arguments that are right by themselves cannot be meant together."""
    if not traits.has_data and (given.symmetric or given.limit):
        parser.error(f"{given.collective} has no arrays: --symmetric and --limit mean nothing here")
    if given.plan and not traits.planned:
        parser.error(f"{given.collective} has no plan: --plan is for all_reduce")
    if given.last < given.first:
        parser.error(f"-e {given.last} is smaller than -b {given.first} (both in bytes)")
    if given.ranks is not None and not 0 <= given.root < given.ranks:
        last = given.ranks - 1
        parser.error(
            f"-r {given.root}: the root must be one of the {given.ranks} ranks, 0 to {last}"
        )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, which is also the help text."""
    parser = argparse.ArgumentParser(
        prog="gpucoll-bench",
        description="Measure collectives between the processes of this host, beside their peers, "
        "with the columns and definitions of nccl-tests.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("collective", nargs="?", default="all_reduce", choices=list(COLLECTIVES))
    add("--ranks", type=count(1), metavar="P", help="default: one for each usable CPU, 2 to 8")
    add("-b", dest="first", type=size, default=4, metavar="SIZE", help="smallest size in bytes (4)")
    add("-e", dest="last", type=size, default=64 << 20, metavar="SIZE", help="largest size (64M)")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("-f", dest="factor", type=factor, default=4.0, help="size times this (4)")
    step.add_argument("-i", dest="increment", type=size, metavar="SIZE", help="size plus this")
    add("-d", dest="dtype", type=choice(DTYPES, DTYPE_ALIASES), default=["float32"],
        help="dtype, a comma-separated list, or all (float32)")  # fmt: skip
    add("-o", dest="redop", type=choice(REDOPS, {}), default=["sum"],
        help="reduction, a comma-separated list, or all (sum)")  # fmt: skip
    add("-r", dest="root", type=count(0), default=0, help="root of a broadcast (0)")
    add("-n", dest="reps", type=count(1), metavar="ITERS",
        help="calls in a sample (as many as take about 15 ms, at least 3)")  # fmt: skip
    add("-w", dest="warmup", type=count(0), metavar="WARMUP",
        help="calls before the first sample (by time, at least 3)")  # fmt: skip
    add("-c", dest="check", type=int, choices=(0, 1), default=1, help="check the results (1)")
    add("--rounds", type=count(1), default=9, help="samples of each case, interleaved (9)")
    add("--symmetric", action="store_true", help="measure arrays from comm.empty as well")
    add("--plan", action="store_true", help="measure plan_all_reduce as well")
    add("--limit", action="store_true", help="measure the memory limit, and the fraction reached")
    add("--compare", type=peers, default={}, metavar="PEER[=PYTHON],...",
        help=f"measure these in the same run: {', '.join(PEERS)}; PYTHON is the Python, or the "
        "folder, of the environment that has it")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the results to this file")
    add("--timeout", type=seconds, default=60.0, metavar="SECONDS",
        help="after so long without an answer a library is given up (60)")  # fmt: skip
    return parser
