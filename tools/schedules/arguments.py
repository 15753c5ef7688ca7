"""The command line of ``python tools/schedules``."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gpucoll.algorithms.choice import RULES
from gpucoll.bench.predict.simulation import Network
from gpucoll.collectives import Collective, Data
from schedules.hierarchy import Inside

MOST_HOSTS: Final = 1024
"""The costs of all ranks of a ring of this many hosts take some seconds."""
_UNITS: Final = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3}
_MORE_UNITS: Final = {"MB": 10**6, "GB": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    collective: Collective
    hosts: int
    ranks_per_host: int
    size_bytes: int
    algorithm: str | None
    rank: int | None
    root: int
    commutative: bool
    ordered: bool
    svg: str | None
    network: Network
    inside: Inside


def size_in_bytes(text: str) -> int:
    """Return the number of bytes for "1MiB", "32 KiB", "1000"."""
    match = _SIZE.fullmatch(text.strip())
    factor = {**_UNITS, **_MORE_UNITS}.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: 1000, 32KiB, 1MiB or 1GiB are")
    return round(float(match[1]) * factor)


def count_up_to(most: int, least: int = 1) -> Callable[[str], int]:
    """Return a function that reads an integer from `least` to `most`."""

    def read(text: str) -> int:
        number = int(text) if re.fullmatch(r"\d+", text) else -1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number from {least} to {most}")
        return number

    return read


def positive(text: str) -> float:
    """Return a number above 0."""
    return _number(text, "a number above 0", lambda number: number > 0)


def not_negative(text: str) -> float:
    """Return a number from 0 on."""
    return _number(text, "a number from 0 on", lambda number: number >= 0)


def _number(text: str, wanted: str, fits: Callable[[float], bool]) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and fits(number)):
        raise argparse.ArgumentTypeError(f"{text!r}: {wanted} is needed")
    return number


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python tools/schedules",
        description="Print the schedule of a collective between hosts: what each host does in each "
        "step, what it costs, and how long a model predicts it to take. Ranks are hosts here.",
    )
    names = sorted(one.spelled for one in RULES)
    parser.add_argument("collective", choices=names, metavar="COLLECTIVE", help=", ".join(names))
    whole = count_up_to(MOST_HOSTS)
    parser.add_argument("--hosts", type=whole, default=4, help="default: %(default)s")
    parser.add_argument("--ranks-per-host", type=whole, default=1, help="default: %(default)s")
    parser.add_argument(
        "--bytes",
        type=size_in_bytes,
        default=1 << 20,
        metavar="SIZE",
        help="size of the larger array of a rank, as 1000, 32KiB, 1MiB; default: 1MiB",
    )
    parser.add_argument("--algorithm", metavar="NAME", help="default: the one that is chosen")
    of_hosts = count_up_to(MOST_HOSTS - 1, least=0)
    parser.add_argument("--rank", type=of_hosts, help="print this rank only")
    parser.add_argument("--root", type=of_hosts, default=0, help="default: %(default)s")
    parser.add_argument("--not-commutative", action="store_true", help="choose for such an op")
    parser.add_argument("--ordered", action="store_true", help="combine rank by rank, in order")
    parser.add_argument("--svg", metavar="FILE", help="draw it, too (up to 16 hosts)")
    _add_model(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the model of the network."""
    model = parser.add_argument_group("the model")
    for name, reads, default, what in (
        ("--latency-us", not_negative, 25.0, "latency of a message between hosts"),
        ("--gbit-s", positive, 1.0, "bandwidth of a host in each direction"),
        ("--inside-latency-us", not_negative, 5.0, "latency of a step inside a host"),
        ("--inside-gbyte-s", positive, 5.0, "bandwidth of each rank inside a host"),
    ):
        model.add_argument(
            name, type=reads, default=default, metavar="N", help=f"{what}; default: %(default)g"
        )


def parse(arguments: Sequence[str] | None) -> Options:
    """Parse the command line; if it is wrong, exit with code 2 and a message."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    for name in ("rank", "root"):
        number = getattr(given, name)
        if number is not None and number >= given.hosts:
            parser.error(f"--{name} {number}: with {given.hosts} hosts, 0 to {given.hosts - 1}")
    collective = Collective[given.collective.upper()]
    rate = given.gbit_s * 1e9 / 8
    return Options(
        collective,
        given.hosts,
        given.ranks_per_host,
        0 if collective.data == Data.NOTHING else given.bytes,
        given.algorithm,
        given.rank,
        given.root,
        not given.not_commutative,
        given.ordered,
        given.svg,
        Network.of_rate(given.latency_us * 1e-6, rate),
        Inside(given.inside_latency_us * 1e-6, given.inside_gbyte_s * 1e9),
    )
