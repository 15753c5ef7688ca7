"""The outcome of a run: each call's median ratio to the best peer, and where a peer is faster.

Reads the entries of the JSON's ``results``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpucoll.bench.estimates import ENOUGH_ROUNDS, Ratio, Samples, ratio
from gpucoll.bench.results import OWN, PARTS, SIDES

__all__ = [
    "SIDE_TITLES",
    "Entry",
    "Side",
    "Summary",
    "by_size",
    "call_title",
    "few_rounds",
    "grouped",
    "is_own",
    "is_part",
    "ratio_to_best",
    "samples",
    "several_ranks",
    "size_text",
    "summaries",
    "title",
]

Entry = dict[str, Any]  # an entry of the JSON's results
Side = dict[str, Any]  # its out_of_place or in_place
SIDE_TITLES = {"out_of_place": "out of place", "in_place": "in place"}


@dataclass(frozen=True)
class Summary:
    """One of gpucoll's calls over all its sizes.

    Attributes
    ----------
    call, side, title : str
        Which call: ``all_reduce float32 sum``, ``in place``, ``gpucoll symmetric``.
    median : float
        The median over the sizes of the ratio to the best peer; below 1 gpucoll is faster.
    sizes : int
        The number of sizes.
    slower : tuple of (int, Ratio, str)
        The sizes in bytes whose interval is entirely above 1.0, with the ratio and the best peer.
    """

    call: str
    side: str
    title: str
    median: float
    sizes: int
    slower: tuple[tuple[int, Ratio, str], ...]

    @property
    def slower_text(self) -> str:
        """The sizes at which a peer is faster, as text."""
        texts = [f"{size_text(size)}: {found} {best}" for size, found, best in self.slower]
        return "; ".join(texts) or "none"

    def __str__(self) -> str:
        return (
            f"{self.call}, {self.side}: {self.title} / best {self.median:.2f} (median of "
            f"{self.sizes} sizes); above 1.0: {self.slower_text}"
        )


def summaries(entries: list[Entry]) -> Iterator[Summary]:
    """Yield a summary for each of gpucoll's calls that has a peer."""
    for call, found in grouped(entries, several_ranks(entries)).items():
        for side in SIDES:
            titles = list(dict.fromkeys(title(entry) for entry in found if entry[side]))
            for name in titles:
                if is_own(name) and not is_part(name):
                    yield from summary(call, found, side, name)


def few_rounds(entries: Iterable[Entry]) -> str:
    """Return what to know of the intervals of too few rounds; nothing if there are enough."""
    sides = [entry[side] for entry in entries for side in SIDES if entry[side]]
    rounds = min((len(side["samples_us"][0]) for side in sides), default=ENOUGH_ROUNDS)
    if rounds >= ENOUGH_ROUNDS:
        return ""
    return (
        f"Intervals are too narrow, because the number of rounds is {rounds}: measure with "
        f"--rounds {ENOUGH_ROUNDS} or more."
    )


def summary(call: str, entries: list[Entry], side: str, name: str) -> Iterator[Summary]:
    """Yield the summary of one call, if it has peers."""
    ratios = []
    for size, sides in by_size(entries, side).items():
        peers = [title for title in sides if not is_own(title) and not is_part(title)]
        if (found := ratio_to_best(sides, name, peers)) is not None:
            ratios.append((size, *found))
    if ratios:
        median = float(np.median([found.value for _, found, _ in ratios]))
        slower = tuple(one for one in ratios if one[1].low > 1)
        yield Summary(call, SIDE_TITLES[side], name, median, len(ratios), slower)


def grouped(entries: Iterable[Entry], has_ranks: bool = False) -> dict[str, list[Entry]]:
    """Return the entries by `call_title`."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(call_title(entry, has_ranks), []).append(entry)
    return groups


def several_ranks(entries: Iterable[Entry]) -> bool:
    """Return whether the numbers of ranks differ, so that titles must have them."""
    return len({entry["ranks"] for entry in entries}) > 1


def call_title(entry: Entry, has_ranks: bool = False) -> str:
    """Return collective, dtype, reduction and length of lists: ``all_reduce float32 sum``.

    With `has_ranks`, the number of ranks, too.
    """
    words = [entry["collective"], entry["type"], entry["redop"]]
    call = " ".join(word for word in words if word != "none")
    length = entry.get("list_length", 1)
    call += f", list of {length}" if length > 1 else ""
    return f"{call}, {entry['ranks']} ranks" if has_ranks else call


def by_size(entries: list[Entry], side: str) -> dict[int, dict[str, Side]]:
    """Return one side of the entries by size and title."""
    sizes: dict[int, dict[str, Side]] = {}
    for entry in entries:
        if entry[side]:
            sizes.setdefault(entry["size"], {})[title(entry)] = entry[side]
    return sizes


def title(entry: Entry) -> str:
    """Return the name of a row."""
    library: str = entry["library"]
    return library if entry["placement"] == "private" else f"{library} {entry['placement']}"


def is_own(name: str) -> bool:
    """Return whether a title names a call of gpucoll's."""
    return name.split()[0] in OWN


def is_part(name: str) -> bool:
    """Return whether a title names a part of a pattern, measured alone."""
    return name.split()[-1] in PARTS


def ratio_to_best(
    sides: dict[str, Side], name: str, others: Sequence[str], longest: bool = False
) -> tuple[Ratio, str] | None:
    """Return the ratio of one call's time to the best of the others', and that other.

    With `longest`, return the ratio to the longest of the others.
    """
    others = [other for other in others if other in sides]
    if name not in sides or not others:
        return None
    choose = max if longest else min
    chosen = choose(others, key=lambda other: float(sides[other]["time"]))
    compared = [samples(sides[other]) for other in others]
    return ratio(samples(sides[name]), compared, longest), chosen


def samples(side: Side) -> Samples:
    """Return the samples of one side of an entry."""
    return np.array(side["samples_us"], dtype=np.float64)


def size_text(size_bytes: int) -> str:
    """Format a size in powers of 1024."""
    for power, unit in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if size_bytes >= 1 << power and size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power} {unit}"
    return str(size_bytes)
