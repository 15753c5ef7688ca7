"""``gpucoll-bench compare``: what became slower between two runs, and what became faster."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpucoll.bench.changes import Change, Pair, Run, changes, spread
from gpucoll.bench.estimates import Samples
from gpucoll.bench.kept import MACHINE, CannotReadError, Content, read
from gpucoll.bench.results import LIMITS, SIDES
from gpucoll.bench.summary import SIDE_TITLES, call_title, is_part, samples, size_text, title
from gpucoll.bench.table import time_text
from gpucoll.command_line import OneLineParser

__all__ = ["main", "make_parser"]

EXIT_NOT_SLOWER, EXIT_SLOWER, EXIT_CANNOT = 0, 1, 2
LEAST_ROUNDS = 4  # with fewer, equal rounds can look as different as any others

EPILOG = """\
A call is slower if the whole 95 % interval of new / base is above 1 + threshold, and if the change
is among those that a test of all calls together finds. If two runs differ by their rounds alone,
that test finds a slower call in about 5 % of comparisons, however many calls there are, and a
faster one as often.

Two runs of an unchanged program differ by more than their rounds: memory lies elsewhere, the
machine is in another state. Times that gpucoll has no part in show by how much. If both files have
at least 8 times of peers (--compare) or of limits (--limit), intervals include it; otherwise only
the threshold allows for it, and many comparisons of an unchanged program find a slower call.
--relative-to divides out what those times have in common.

exit code: 0 if nothing is slower, 1 if something is, 2 if the files cannot be compared
"""


class CannotCompareError(Exception):
    """The files cannot be compared; the message says why."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = OneLineParser(
        prog="gpucoll-bench compare",
        description="Say which calls became slower, and which faster, between two runs that "
        "gpucoll-bench --json kept.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("base", type=Path, metavar="BASE.json", help="the earlier run")
    add("new", type=Path, metavar="NEW.json", help="the later run")
    add("--threshold", type=percent, default=0.05, metavar="PERCENT",
        help="the smallest change that counts (5%%): smaller ones come and go between runs of the "
        "same program")  # fmt: skip
    add("--relative-to", metavar="PEER|best|limit",
        help="compare ratios to this peer, the best peer, or the memory limit instead of times: a "
        "machine that became slower slows these down, too")  # fmt: skip
    add("--force", action="store_true", help="compare although machines or ranks differ")
    add("--json", action="store_true", help="print everything as JSON")
    return parser


def percent(text: str) -> float:
    """Convert ``5%`` or ``5`` to 0.05."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*%?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage such as 5%")
    return float(match[1]) / 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    given = make_parser().parse_args(arguments)
    try:
        base, new = read(given.base), read(given.new)
        notes = list(differences(base, new, given.force))
        found = compared(base, new, given.threshold, given.relative_to)
    except (CannotReadError, CannotCompareError) as error:
        print(f"gpucoll-bench compare: {error}", file=sys.stderr)
        return EXIT_CANNOT
    if given.json:
        print(json.dumps(as_json(found, notes), indent=1))
    else:
        for path, content in ((given.base, base), (given.new, new)):
            about = content["environment"]
            print(f"# {path.name}: {about['date'][:16].replace('T', ' ')}, "
                  f"gpucoll {about.get('gpucoll', '?')}, {about['ranks']} ranks")  # fmt: skip
        for line in lines_of(found, notes):
            print(line)
    return EXIT_SLOWER if any(one.change.verdict > 0 for one in found.calls) else EXIT_NOT_SLOWER


# --- what is compared -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """One call of one library."""

    call: str
    side: str
    size: int
    title: str


@dataclass(frozen=True)
class Compared:
    """One of gpucoll's calls in both runs; times in microseconds."""

    place: Place
    base_us: float
    new_us: float
    change: Change


@dataclass(frozen=True)
class Comparison:
    """Two runs, compared.

    Attributes
    ----------
    controls : dict
        The median of new over base, and the number of calls, of each peer and limit.
    spread : float or None
        See `changes.spread`.
    missing : dict
        "base" or "new" -> the number of gpucoll's calls that only this file has.
    """

    threshold: float
    relative_to: str | None
    calls: list[Compared]
    controls: dict[str, tuple[float, int]]
    spread: float | None
    missing: dict[str, int]


def compared(base: Content, new: Content, threshold: float, relative_to: str | None) -> Comparison:
    """Compare two runs.

    Raises
    ------
    CannotCompareError
        No call of gpucoll's is in both, or none beside what the comparison is relative to.
    """
    first, second = times_of(base), times_of(new)
    unchanged = {one for one in first if not is_gpucoll(one.title)} & second.keys()
    unchanged = {one for one in unchanged if same_version(base, new, one.title)}
    own = [one for one in first if is_gpucoll(one.title) and one in second]
    if not own:
        raise CannotCompareError(
            f"no call of gpucoll's is in both files, with the same size: {calls_in(first)} in "
            f"base, {calls_in(second)} in new"
        )
    pairs = pairs_of(own, unchanged, first, second, relative_to)
    if not pairs:
        names = ", ".join(sorted({one.title for one in unchanged})) or "neither peers nor limits"
        raise CannotCompareError(
            f"--relative-to {relative_to}: no call has it in both files, in the same version; "
            f"both files have {names}"
        )
    controls = pairs_of(sorted(unchanged, key=str), unchanged, first, second, relative_to)
    found = changes(list(pairs.values()), list(controls.values()), threshold)
    by_title: dict[str, list[float]] = {}
    for one, pair in pairs_of(unchanged, set(), first, second, None).items():
        by_title.setdefault(one.title, []).append(pair.log_ratio)
    return Comparison(
        threshold,
        relative_to,
        [
            Compared(place, Run(first[place]).time_us, Run(second[place]).time_us, change)
            for place, change in zip(pairs, found, strict=True)
        ],
        {name: (float(np.exp(np.median(by_title[name]))), len(by_title[name]))
         for name in sorted(by_title)},
        spread(list(controls.values())),
        {
            name: sum(is_gpucoll(one.title) for one in mine.keys() - other.keys())
            for name, mine, other in (("base", first, second), ("new", second, first))
        },
    )  # fmt: skip


def times_of(content: Content) -> dict[Place, Samples]:
    """Return the samples of each call, peer and limit."""
    return {
        Place(call_title(entry), side, entry["size"], title(entry)): samples(entry[side])
        for entry in [*content["results"], *content["limit"]]
        for side in SIDES
        if entry[side] and not is_part(title(entry))
    }


def pairs_of(
    places: Iterable[Place],
    references: set[Place],
    base: dict[Place, Samples],
    new: dict[Place, Samples],
    relative_to: str | None,
) -> dict[Place, Pair]:
    """Return the calls as pairs, without those that lack what they are to be relative to."""
    by_call: dict[tuple[str, str, int], list[Place]] = {}
    for one in sorted(references, key=str):
        by_call.setdefault((one.call, one.side, one.size), []).append(one)
    found = {}
    for place in places:
        others = by_call.get((place.call, place.side, place.size), [])
        chosen = [one for one in others if one != place and is_reference(one.title, relative_to)]
        if chosen or relative_to is None:
            found[place] = Pair(
                *(Run(run[place], tuple(run[one] for one in chosen)) for run in (base, new))
            )
    return found


def is_reference(name: str, relative_to: str | None) -> bool:
    """Return whether times are divided by those of a peer or a limit."""
    if relative_to == "limit":
        return name in LIMITS
    return name not in LIMITS if relative_to == "best" else name == relative_to


def is_gpucoll(name: str) -> bool:
    """Return whether gpucoll made the call: `OWN`, and gpucoll-bound and gpucoll-numpy."""
    return name.split()[0].partition("-")[0] == "gpucoll"


def same_version(base: Content, new: Content, name: str) -> bool:
    """Return whether a peer has the same version in both runs; limits have none."""
    first, second = (one["environment"]["libraries"].get(name) for one in (base, new))
    return bool(first == second)


def calls_in(places: Iterable[Place]) -> str:
    """Return the names of gpucoll's calls, shortened."""
    names = list(dict.fromkeys(one.call for one in places if is_gpucoll(one.title)))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def differences(base: Content, new: Content, force: bool) -> Iterator[str]:
    """Yield notes on how the runs differ.

    Raises
    ------
    CannotCompareError
        Machines, ranks or arrays differ, and `force` is false.
    """
    abouts = [one["environment"] for one in (base, new)]
    facts = [
        {**{name: one[name] for name in (*MACHINE, "ranks")},
         "pinned": bool(one.get("pinned_cpus")),
         "GPU": next((v["GPU"] for v in one["libraries"].values() if "GPU" in v), None)}
        for one in abouts
    ]  # fmt: skip
    names = {name.replace("_", " "): [one[name] for one in facts] for name in facts[0]}
    differ = [f"{name} {old} in base, {late} in new" for name, (old, late) in names.items()
              if old != late]  # fmt: skip
    if differ and not force:
        raise CannotCompareError(f"{'; '.join(differ)} (--force compares nevertheless)")
    yield from differ
    for name in ("kernel", "python", "numpy"):
        old, late = (one.get(name) for one in abouts)
        if old != late:
            yield f"{name} {old} in base, {late} in new"
    for name in abouts[0]["libraries"].keys() & abouts[1]["libraries"].keys():
        if name != "gpucoll" and not same_version(base, new, name):
            old, late = (one["libraries"][name]["library"] for one in abouts)
            yield f"{name}: {old} in base, {late} in new, so its times show nothing"
    if any(sum(entry[side]["nwrong"] or 0 for side in SIDES if entry[side])
           for one in (base, new) for entry in one["results"]):  # fmt: skip
        yield "some results were wrong: see the exit code of the runs"
    rounds = [samples(entry[side]).shape[1] for one in (base, new) for entry in one["results"]
              for side in SIDES if entry[side]]  # fmt: skip
    if not rounds:
        raise CannotCompareError("neither file has times: only figures, such as memory")
    if min(rounds) < LEAST_ROUNDS:
        yield f"too few rounds ({min(rounds)}) to find single changes; measure with --rounds 9"


# --- what is printed ------------------------------------------------------------------------------


def lines_of(found: Comparison, notes: Iterable[str]) -> Iterator[str]:
    """Yield the text for people."""
    for note in notes:
        yield f"# note: {note}"
    yield from about_controls(found)
    yield "#"
    count = len(found.calls)
    for verdict, word in ((1, "slower"), (-1, "faster")):
        mine = [one for one in found.calls if one.change.verdict == verdict]
        mine.sort(key=lambda one: one.change.ratio.value, reverse=verdict > 0)
        yield f"{word}: {len(mine)} of {count} calls"
        if mine:
            yield from table(mine, found.relative_to)
    median = float(np.median([one.change.ratio.value for one in found.calls]))
    relative = f", relative to {found.relative_to}" if found.relative_to else ""
    yield f"median of new / base over all calls{relative}: {median:.3f}"
    for name, number in found.missing.items():
        if number:
            yield f"only in {name}: {number} calls"


def about_controls(found: Comparison) -> Iterator[str]:
    """Yield what the times that gpucoll has no part in say about the machine."""
    if found.controls:
        texts = [f"{name} {value:.2f} ({n})" for name, (value, n) in found.controls.items()]
        yield f"# new / base of what gpucoll has no part in, median (calls): {', '.join(texts)}"
    if found.spread is None:
        yield (
            "# Fewer than 8 times of peers or limits are in both files: intervals show how rounds "
            "differ, not how runs differ. Measure with --limit or --compare."
        )
        return
    percentage = 100 * (np.exp(found.spread) - 1)
    yield (
        f"# From run to run these changed by {percentage:.1f} % (one standard deviation); "
        "intervals include that"
    )
    shift = float(np.median([value for value, _ in found.controls.values()]))
    if found.relative_to is None and abs(np.log(shift)) > np.log1p(found.threshold):
        how = "slower" if shift > 1 else "faster"
        yield f"# The machine was {how} in new: --relative-to best or limit divides that out"


def table(calls: Iterable[Compared], relative_to: str | None) -> Iterator[str]:
    """Yield an aligned table of calls."""
    ratio = f"new / base, / {relative_to}" if relative_to else "new / base"
    rows = [["call", "side", "bytes", "library", "base us", "new us", ratio]]
    for one in calls:
        place = one.place
        rows.append(
            [place.call, SIDE_TITLES[place.side], size_text(place.size), place.title,
             time_text(one.base_us), time_text(one.new_us), str(one.change.ratio)]
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {2, 4, 5}
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def as_json(found: Comparison, notes: list[str]) -> dict[str, Any]:
    """Return everything for programs."""
    words = {1: "slower", 0: "no change", -1: "faster"}
    return {
        "threshold": found.threshold,
        "relative_to": found.relative_to,
        "spread_between_runs": found.spread,
        "controls": {
            name: {"ratio": value, "calls": number}
            for name, (value, number) in found.controls.items()
        },
        "only_in_base": found.missing["base"],
        "only_in_new": found.missing["new"],
        "notes": notes,
        "calls": [
            {
                **vars(one.place),
                "base_us": one.base_us,
                "new_us": one.new_us,
                **one.change.ratio._asdict(),
                "p_value": one.change.p_value,
                "verdict": words[one.change.verdict],
            }
            for one in found.calls
        ],
    }
