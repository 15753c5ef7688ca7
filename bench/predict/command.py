"""``gpucoll-bench --predict``: what to predict, from the command line to the printed lines."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpucoll.command_line import at_least_one
from gpucoll.errors import ArgumentError

__all__ = ["Prediction", "add_arguments", "predicted_lines", "read_arguments"]


class Prediction(NamedTuple):
    """What to predict.

    Attributes
    ----------
    ranks : tuple of int
        The numbers of ranks.
    per_host : int or None
        How many ranks each host has; None: as many as were measured on one host, or one.
    link : (float, float) or None
        Latency in seconds and bytes per second of the network between hosts, if given.
    sources : tuple of Path
        Kept results to fit; empty: the results of this run.
    tune : bool
        Whether to tell which limits of the schedules would be better.
    """

    ranks: tuple[int, ...]
    per_host: int | None
    link: tuple[float, float] | None
    sources: tuple[Path, ...]
    tune: bool


def _ranks(text: str) -> tuple[int, ...]:
    """Convert ``64,1024`` to numbers of ranks."""
    words = text.split(",")
    if not all(re.fullmatch(r"\d+", word) and 2 <= int(word) <= 1_000_000 for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers of ranks, from 2 to 1000000, such as 64,1024,10000"
        )
    return tuple(map(int, words))


def _link(text: str) -> tuple[float, float]:
    """Convert ``25,10`` to seconds and bytes per second."""
    try:
        latency_us, gbit = map(float, text.split(","))
    except ValueError:
        latency_us = gbit = math.nan
    if not (0 <= latency_us < math.inf and 0 < gbit < math.inf):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not latency in us and bandwidth in Gbit/s of a link, such as 25,10"
        )
    return latency_us * 1e-6, gbit * 1e9 / 8


def add_arguments(add: Callable[..., object]) -> None:
    """Add the options of predictions."""
    add("--predict", type=_ranks, metavar="RANKS,...",
        help="predict all_reduce for these numbers of ranks, from this run or from --from: time, "
        "95 %% interval, what dominates; a lower bound without contention (docs/prediction.md)"
    )  # fmt: skip
    add("--hosts-of", type=at_least_one, metavar="N",
        help="predict hosts of N ranks (as many as were measured on a host)")  # fmt: skip
    add("--link", type=_link, metavar="LATENCY_US,GBIT",
        help="predict for this network between hosts: the one-way latency of a small message, and "
        "the bandwidth of a host in each direction")  # fmt: skip
    add("--from", dest="sources", type=Path, action="append", default=[], metavar="FILE",
        help="predict from this result of --json instead of measuring; may be repeated: one of a "
        "host, one of several hosts")  # fmt: skip
    add("--tune", action="store_true",
        help="with --predict: also tell which limit of the schedules would be better")  # fmt: skip


def read_arguments(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Prediction | None:
    """Return what to predict; None: nothing. Contradictions end the program with code 2."""
    if given.predict is None:
        for name, value in (
            ("--hosts-of", given.hosts_of),
            ("--link", given.link),
            ("--from", given.sources),
            ("--tune", given.tune),
        ):
            if value:
                parser.error(f"{name} is for predictions: add --predict RANKS,...")
        return None
    if given.collectives != ["all_reduce"]:
        parser.error(f"--predict knows all_reduce only, not {', '.join(given.collectives)}")
    if given.array != "numpy" or given.list > 1:
        parser.error("--predict is for single arrays on the host: leave --array and --list out")
    if given.sources:
        for name in ("json", "csv", "plot", "html", "ranks", "compare"):
            if getattr(given, name):
                parser.error(f"--from measures nothing: leave --{name} out")
    if given.hosts_of is not None:
        wrong = [ranks for ranks in given.predict if ranks % given.hosts_of]
        if wrong:
            parser.error(
                f"--hosts-of {given.hosts_of}: {wrong[0]} ranks cannot be divided among such hosts"
            )
    return Prediction(given.predict, given.hosts_of, given.link, tuple(given.sources), given.tune)


def predicted_lines(
    asked: Prediction, sizes: Sequence[int], results: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield the lines of predictions.

    Parameters
    ----------
    asked : Prediction
        What to predict.
    sizes : sequence of int
        The sizes to predict, in bytes.
    results : dict or None
        The content of this run's JSON; None: the sources are read.
    """
    # Simulations are loaded only when they are asked for.
    from gpucoll.bench.predict import kept, prediction, table, tuning
    from gpucoll.bench.predict.composition import Case

    if results is None:
        seen = [one for path in asked.sources for one in kept.read(path)]
    else:
        seen = kept.observed_in(results)
        if not seen:
            raise ArgumentError(
                "a prediction needs measured all_reduces of several ranks: --ranks 2"
            )
    known = prediction.learn(seen, asked.link)
    on_one = [one.case.ranks for one in seen if one.case.hosts == 1]
    per_host = asked.per_host or max(on_one, default=seen[0].case.per_host)
    cases = []
    for ranks in asked.ranks:
        here = min(per_host, ranks)
        here = here if ranks % here == 0 else 1
        cases += [Case(size, ranks, ranks // here) for size in sizes]
    yield from table.lines(known, [prediction.predict(case, known) for case in cases])
    if asked.tune:
        yield from tuning.lines(known.machine, cases)
