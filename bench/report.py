"""From the JSON of ``gpucoll-bench --json`` to the tables of ``docs/performance.md``.

::

    python -m gpucoll.bench.report RESULT.json                   # Markdown, on standard output
    python -m gpucoll.bench.report RESULT.json --plot RESULT.svg # and a drawing (needs matplotlib)
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpucoll.bench.estimates import Samples, ratio
from gpucoll.bench.results import SIDES
from gpucoll.bench.table import OWN, time_text

__all__ = ["main"]

Entry = dict[str, Any]  # of the JSON's results
TITLES = {"out_of_place": "out of place", "in_place": "in place"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m gpucoll.bench.report", description="Render gpucoll-bench's JSON."
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw busbw over size")
    given = parser.parse_args(arguments)
    try:
        content = json.loads(given.result.read_text(encoding="utf-8"))
        for line in markdown(content):
            print(line)
        if given.plot is not None:
            plot(content, given.plot)
    except (OSError, ValueError, ImportError, KeyError) as error:
        print(f"{given.result}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def markdown(content: dict[str, Any]) -> Iterator[str]:
    """Return the lines of the tables, one table for each call and side."""
    environment = content["environment"]
    libraries = environment["libraries"].values()
    # Where an environment lies is of no interest to a reader, and not always for the public.
    command = re.sub(r"(\w+)=[^\s,]+", r"\1=PYTHON", environment["command"])
    yield f"`{re.sub(r'--json[ =][^ ]+', '--json FILE', command)}`"
    yield ""
    yield (
        f"{environment['cpu']}, {environment['ranks']} ranks on {environment['usable_cpus']} CPUs"
        f"{' (pinned)' if environment['pinned_cpus'] else ''}, {environment['kernel']}, "
        f"Python {environment['python']}; {', '.join(one['library'] for one in libraries)}; "
        f"{environment['date'][:10]}. Microseconds; ratios are gpucoll's time over the best peer's "
        "with the 95 % interval of this run."
    )
    for key, entries in grouped(content["results"]).items():
        limits = grouped(content["limit"]).get(key, [])
        for side in SIDES:
            if any(entry[side] for entry in entries if entry["library"] in OWN):
                words = [word for word in key if word != "none"]
                yield ""
                yield f"**{' '.join(words)}, {TITLES[side]}**"
                yield ""
                yield from side_table(entries, limits, side)


def grouped(entries: list[Entry]) -> dict[tuple[str, str, str], list[Entry]]:
    """Return the entries of each collective, dtype and reduction."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        key = (entry["collective"], entry["type"], entry["redop"])
        groups.setdefault(key, []).append(entry)
    return groups


def title(entry: Entry) -> str:
    """Return what a row is called."""
    library: str = entry["library"]
    return library if entry["placement"] == "private" else f"{library} {entry['placement']}"


def side_table(entries: list[Entry], limits: list[Entry], side: str) -> Iterator[str]:
    """Return a table: a row for each size, a column for each library and for each ratio."""
    present = [entry for entry in entries if entry[side]]
    titles = list(dict.fromkeys(title(entry) for entry in present))
    own = [name for name in titles if name.split()[0] in OWN]
    peers = [name for name in titles if name not in own]
    at_limit = {entry["size"]: entry[side] for entry in limits if entry[side]}
    columns = ["bytes", *titles]
    columns += [f"{name} / best" for name in own] if peers else []
    columns += [f"limit / {name}" for name in own] if at_limit else []
    yield f"| {' | '.join(columns)} |"
    yield f"|{' ---: |' * len(columns)}"
    for size in dict.fromkeys(entry["size"] for entry in present):
        found = {title(entry): entry[side] for entry in present if entry["size"] == size}
        cells = [size_text(size)]
        cells += [time_text(found[name]["time"]) if name in found else "" for name in titles]
        if peers:
            cells += [ratio_cell(found, name, peers) for name in own]
        if at_limit:
            cells += [part_cell(at_limit.get(size), found.get(name)) for name in own]
        yield f"| {' | '.join(cells)} |"


def ratio_cell(found: dict[str, Entry], name: str, peers: list[str]) -> str:
    """Return a ratio to the best peer, its interval, and who that is."""
    others = [peer for peer in peers if peer in found]
    if name not in found or not others:
        return ""
    best = min(others, key=lambda peer: float(found[peer]["time"]))
    return f"{ratio(samples(found[name]), [samples(found[peer]) for peer in others])} {best}"


def part_cell(limit: Entry | None, side: Entry | None) -> str:
    """Return the part of the memory limit that was reached."""
    return f"{limit['time'] / side['time']:.2f}" if limit and side else ""


def samples(side: Entry) -> Samples:
    """Return the samples of one side of an entry."""
    return np.array(side["samples_us"], dtype=np.float64)


def size_text(size_bytes: int) -> str:
    """Return a size in powers of 1024."""
    for power, unit in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if size_bytes >= 1 << power and size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power} {unit}"
    return str(size_bytes)


def plot(content: dict[str, Any], path: Path) -> None:
    """Draw bus bandwidth over size, a panel for each call and side."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    groups = grouped(content["results"])
    panels, axes = pyplot.subplots(len(groups), 2, squeeze=False, figsize=(11, 4 * len(groups)))
    for row, (key, entries) in zip(axes, groups.items(), strict=True):
        for axis, side in zip(row, SIDES, strict=True):
            for name in dict.fromkeys(title(entry) for entry in entries):
                mine = [entry for entry in entries if title(entry) == name and entry[side]]
                heights = [entry[side]["bus_bw"] for entry in mine]
                axis.plot([entry["size"] for entry in mine], heights, marker="o", label=name)
            axis.set(title=f"{' '.join(key)}, {TITLES[side]}", xscale="log", yscale="log",
                     xlabel="bytes", ylabel="busbw (GB/s)")  # fmt: skip
            axis.legend()
    panels.tight_layout()
    panels.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
