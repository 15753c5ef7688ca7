"""The syntax of ``gpucoll-bench``'s arguments: sizes, counts, lists, peers."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Mapping, Sequence

from gpucoll.bench.peers import PEERS

__all__ = ["choice", "count", "factor", "peers", "seconds", "size", "sizes"]


def size(text: str) -> int:
    """Convert a size such as 4, 1K, 64M or 1G to bytes, in powers of 1024 as in nccl-tests."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    power = "kmgt".index(match[2]) + 1 if match and match[2] else 0
    value = float(match[1]) * 1024**power if match else 0.0
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4, 1K, 64M or 1G")
    return int(value)


def count(least: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers of at least `least`."""

    def convert(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return convert


def factor(text: str) -> float:
    """Convert a step factor, which must be above 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 1")
    return value


def seconds(text: str) -> float:
    """Convert a number of seconds, which must be above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def choice(
    known: Sequence[str],
    aliases: Mapping[str, str],
    groups: Mapping[str, Sequence[str]] | None = None,
    others: Sequence[str] = (),
) -> Callable[[str], list[str]]:
    """Return an argparse type for comma-separated lists of known names.

    `groups` are names that stand for several; if there are none, ``all`` stands for all. `others`
    are accepted, too, and stay as they are.
    """
    several = {"all": known} if groups is None else groups
    if groups is None:
        also = "all for all of them"
    else:
        also = f"for several of them {', '.join(groups)}"

    def hint(name: str) -> str:
        for names in ([*known, *several], others):
            if near := difflib.get_close_matches(name, names, 1):
                return f": did you mean {near[0]}?"
        return f"; known are {', '.join(known)} (or {also})"

    def convert(text: str) -> list[str]:
        names: list[str] = []
        for name in text.strip(", ").split(","):
            name = name.strip()
            names += several.get(name, [aliases.get(name, name)])
        for name in names:
            if name not in known and name not in others:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown{hint(name)}")
        return list(dict.fromkeys(names))

    return convert


def peers(text: str) -> dict[str, str | None]:
    """Parse ``mpich=/path/to/python,gloo`` into peer -> path, None for a peer without a path."""
    wanted: dict[str, str | None] = {}
    for item in text.split(","):
        name, given, place = item.partition("=")
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; known are {', '.join(PEERS)}")
        if given and not place:
            raise argparse.ArgumentTypeError(
                f"{item!r}: the path of a Python must follow the equals sign"
            )
        if name in wanted:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        wanted[name] = place or None
    return wanted


def sizes(first: int, last: int, factor: float, increment: int | None) -> tuple[int, ...]:
    """Return the sizes in bytes from `first` to `last`, by a factor or by an increment."""
    found = [first]
    while True:
        step = found[-1] + increment if increment else int(found[-1] * factor)
        following = max(step, found[-1] + 1)  # 1 byte times 1.5 would remain 1
        if following > last:
            return tuple(found)
        found.append(following)
