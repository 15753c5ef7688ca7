"""The command line of ``gpucoll-bench``: nccl-tests' flags where it has them."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpucoll.bench.argument_types import choice, count, factor, peers, seconds, size, sizes
from gpucoll.bench.collectives import COLLECTIVES, DTYPE_ALIASES, DTYPES, REDOPS, Collective
from gpucoll.bench.peers import PEERS
from gpucoll.bench.rank.arrays import KINDS
from gpucoll.bench.rank.inputs import STORAGE
from gpucoll.version import __version__

__all__ = ["Options", "parse"]

DETAILS = """\
A size is that of the larger side, as in nccl-tests: the whole output of all_gather and gather,
the whole input of reduce_scatter, scatter and all_to_all. These have a block for each rank: the
elements are rounded down to a multiple of the ranks, at least one for each. Bus bandwidth has
nccl-tests' factors; where it defines none (scan, exclusive_scan) it is the algorithm bandwidth.

send_recv     every rank to the next, and from the one before, at once
ping_pong     from rank 0 to rank 1 and back; the time is one way's
stream        8 messages from rank 0 to rank 1, then a reply of one element; the time is a message's

Other ranks wait in a barrier meanwhile. In-place forms are measured where a library has them.

examples:
  gpucoll-bench
  gpucoll-bench all_reduce --ranks 4 -b 4 -e 64M -f 4 -d float32 -o sum --symmetric --limit
  gpucoll-bench all_reduce --list 500 -b 4K -e 4K
  gpucoll-bench all --ranks 2 -f 16 --compare mpich=/envs/mpich,gloo=/envs/gloo --json result.json
  gpucoll-run -n 4 -m gpucoll.bench all_reduce,broadcast -d bfloat16,float16
  gpucoll-bench all_reduce -b 1K -e 1G --array cupy --symmetric --compare cupy-nccl,torch-nccl
  python -m gpucoll.bench.report result.json

exit codes: 0 all right; 1 wrong results, or a failure while measuring; 2 nothing was measured
(wrong arguments, a peer that is not there); 130 interrupted
"""


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes
    ----------
    collectives : tuple of str
        In the order to be measured.
    collective : str
        The one at hand: what depends on it (its traits, sizes, combinations, variants) is of this.
    ranks : int or None
        None where nothing was said: as many as there are CPUs, or as the launcher started.
    asked_sizes_bytes : tuple of int
        In the order to be measured.
    step : str
        How they follow each other, for the table's header.
    list_length : int
        Arrays in a list; 1: no list.
    reps, warmup : int or None
        Calls in a sample, and before the first; None: chosen by time.
    rounds : int
        Samples of each case.
    sample_s : float
        How long a sample should take where `reps` is None.
    array : str
        Whose arrays: "numpy", or on the ranks' GPUs "cupy" or "torch".
    left_out : tuple of str
        Dtypes that ``-d all`` means, and that are not to be had here.
    compare : dict
        Peer -> path of its Python, or None: the environment of this one.
    """

    collectives: tuple[str, ...]
    collective: str
    ranks: int | None
    asked_sizes_bytes: tuple[int, ...]
    step: str
    list_length: int
    dtypes: list[str]
    redops: list[str]
    root: int
    reps: int | None
    warmup: int | None
    rounds: int
    sample_s: float
    check: bool
    symmetric: bool
    plan: bool
    limit: bool
    array: str
    compare: dict[str, str | None]
    json_path: Path | None
    timeout_s: float
    command_line: str
    left_out: tuple[str, ...] = ()

    def each(self) -> Iterator[Options]:
        """Yield the options with one collective after the other at hand."""
        for collective in self.collectives:
            yield replace(self, collective=collective)

    @property
    def traits(self) -> Collective:
        """The row of the collective."""
        return COLLECTIVES[self.collective]

    @property
    def sizes_bytes(self) -> tuple[int, ...]:
        """The sizes to be measured; one of 0 where there are no arrays."""
        return self.asked_sizes_bytes if self.traits.has_data else (0,)

    @property
    def combinations(self) -> tuple[tuple[str, str], ...]:
        """The dtypes and reductions to be measured."""
        return self.traits.combinations(self.dtypes, self.redops)

    @property
    def variants(self) -> list[str]:
        """What to measure of gpucoll, by the names that `rank.library.Call` uses."""
        extra = {
            "symmetric": self.symmetric and self.traits.has_data,
            "plan": self.plan and self.traits.planned,
            "fused": self.list_length > 1,
            "limit": self.limit and self.traits.limited,
        }
        return ["private", *(name for name, wanted in extra.items() if wanted)]


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options; an argument that cannot be meant ends the program with exit code 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = build_parser()
    given = parser.parse_args(arguments)
    given.dtype, left_out = without_missing(given.dtype)
    refuse_contradictions(parser, given)
    return Options(
        collectives=tuple(given.collectives),
        collective=given.collectives[0],
        ranks=given.ranks,
        asked_sizes_bytes=sizes(given.first, given.last, given.factor, given.increment),
        step=f"{given.increment}(bytes)" if given.increment else f"{given.factor:g}(factor)",
        list_length=given.list,
        dtypes=given.dtype,
        redops=given.redop,
        root=given.root,
        reps=given.reps,
        warmup=given.warmup,
        rounds=given.rounds,
        sample_s=given.sample,
        check=bool(given.check),
        symmetric=given.symmetric,
        plan=given.plan,
        limit=given.limit,
        array=given.array,
        compare=given.compare,
        json_path=given.json,
        timeout_s=given.timeout,
        command_line=" ".join(["gpucoll-bench", *arguments]),
        left_out=left_out,
    )


def without_missing(dtypes: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Divide all dtypes, where all were asked for, into those that are there and the others.

    NumPy has some only through ml_dtypes. Who asks for one by name is told what to install.
    """
    if set(dtypes) != set(DTYPES) or importlib.util.find_spec("ml_dtypes") is not None:
        return dtypes, ()
    return [d for d in dtypes if d not in STORAGE], tuple(d for d in dtypes if d in STORAGE)


def refuse_contradictions(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End the program where arguments that are right by themselves cannot be meant together.

    Of several collectives, one at least must have what is asked for; all must have lists.
    """
    rows = [COLLECTIVES[name] for name in given.collectives]
    names = ", ".join(given.collectives)
    for name, row in zip(given.collectives, rows, strict=True):
        if not row.combinations(given.dtype, given.redop):
            asked = f"-o {','.join(given.redop)} is not defined on -d {','.join(given.dtype)}"
            parser.error(f"{name}: {asked}")
    if given.symmetric and not any(row.has_data for row in rows):
        parser.error(f"{names} has no arrays: --symmetric means nothing here")
    if given.plan and not any(row.planned for row in rows):
        parser.error(f"{names} has no plan: --plan means nothing here")
    if given.limit and not any(row.limited for row in rows):
        having = ", ".join(name for name, row in COLLECTIVES.items() if row.limited)
        parser.error(f"--limit: no memory limit is known of {names}, only of {having}")
    if given.list > 1 and not all(row.listed for row in rows):
        having = " and ".join(name for name, row in COLLECTIVES.items() if row.listed)
        parser.error(f"--list is for {having}, not for {names}")
    if given.list > 1 and (given.symmetric or given.plan or given.limit):
        parser.error("--list: one call beside many; leave --symmetric, --plan and --limit out")
    if given.limit and given.array != "numpy":
        parser.error("--limit is the host memory's, which arrays on GPUs do not go through")
    for name in given.compare:
        if PEERS[name].on_gpu != (given.array != "numpy"):
            where = "arrays on GPUs: give --array too" if PEERS[name].on_gpu else "host arrays only"
            parser.error(f"--compare {name} is for {where}")
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
        epilog=DETAILS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"gpucoll-bench {__version__}")
    add("collectives", nargs="?", default=["all_reduce"], type=choice(list(COLLECTIVES), {}),
        metavar="COLLECTIVE,...",
        help=f"one or several of {', '.join(COLLECTIVES)}, or all (all_reduce)")  # fmt: skip
    add(
        "--ranks",
        type=count(1),
        metavar="P",
        help="default: one for each usable CPU, 2 to 8; for each GPU",
    )
    add("-b", dest="first", type=size, default=4, metavar="SIZE", help="smallest size in bytes (4)")
    add("-e", dest="last", type=size, default=64 << 20, metavar="SIZE", help="largest size (64M)")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("-f", dest="factor", type=factor, default=4.0, help="size times this (4)")
    step.add_argument("-i", dest="increment", type=size, metavar="SIZE", help="size plus this")
    add("-d", dest="dtype", type=choice(DTYPES, DTYPE_ALIASES), default=["float32"],
        help="dtype, a comma-separated list, or all (float32)")  # fmt: skip
    add("-o", dest="redop", type=choice(REDOPS, {}), default=["sum"],
        help="reduction, a comma-separated list, or all (sum)")  # fmt: skip
    add("-r", dest="root", type=count(0), default=0, help="root, where there is one (0)")
    add_measuring(add)
    return parser


def add_measuring(add: Callable[..., object]) -> None:
    """Add the options that say how it is measured, beside what, and where the results go."""
    add("-n", dest="reps", type=count(1), metavar="ITERS",
        help="calls in a sample (as many as take --sample)")  # fmt: skip
    add("-w", dest="warmup", type=count(0), metavar="WARMUP",
        help="calls before the first sample (by time, at least 3)")  # fmt: skip
    add("-c", dest="check", type=int, choices=(0, 1), default=1, help="check the results (1)")
    add("--rounds", type=count(1), default=9, help="samples of each case, interleaved (9)")
    add("--sample", type=seconds, default=0.015, metavar="SECONDS",
        help="how long a sample takes where -n is not given (0.015), at least 3 calls")  # fmt: skip
    add("--list", type=count(2), default=1, metavar="N",
        help="N arrays of each size: one call with the list of them beside N calls")  # fmt: skip
    add("--symmetric", action="store_true", help="measure arrays from comm.empty as well")
    add("--plan", action="store_true", help="measure the plan_... of each as well")
    add("--limit", action="store_true",
        help="measure the memory limit, and the fraction reached: streaming in- and output without "
        "other ranks, where both have one size on every rank")  # fmt: skip
    add("--array", choices=tuple(KINDS), default="numpy",
        help="whose arrays: NumPy's on the host; CuPy's or PyTorch's on GPUs, one for each rank "
        "(numpy)")  # fmt: skip
    add("--compare", type=peers, default={}, metavar="PEER[=PYTHON],...",
        help=f"measure these in the same run: {', '.join(PEERS)}; PYTHON is the Python, or the "
        "folder, of the environment that has it")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the results to this file")
    add("--timeout", type=seconds, default=60.0, metavar="SECONDS",
        help="after so long without an answer a library is given up (60)")  # fmt: skip
