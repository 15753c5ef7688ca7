"""Convert the JSON of ``gpucoll-bench --json`` to the tables of ``docs/performance.md``.

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

from gpucoll.bench.figures import FIGURES
from gpucoll.bench.results import OWN, SIDES
from gpucoll.bench.summary import (
    SIDE_TITLES,
    Entry,
    Side,
    Summary,
    grouped,
    is_own,
    is_part,
    ratio_to_best,
    size_text,
    summaries,
    title,
)
from gpucoll.bench.table import time_text

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m gpucoll.bench.report",
        description=("Convert gpucoll-bench's JSON to Markdown tables."),
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
    # The path of an environment does not interest readers, and may be private.
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
    if note := environment.get("test_device"):
        yield ""
        yield str(note)
    yield from summary_table(list(summaries(content["results"])))
    limits = grouped(content["limit"])
    for call, entries in grouped(content["results"]).items():
        for side in SIDES:
            if any(entry[side] for entry in entries if entry["library"] in OWN):
                yield ""
                yield f"**{call}, {SIDE_TITLES[side]}**"
                yield ""
                yield from side_table(entries, limits.get(call, []), side)
        if any("figures" in entry for entry in entries):
            yield ""
            yield f"**{call}**"
            yield ""
            yield from figure_table(entries)


def summary_table(found: list[Summary]) -> Iterator[str]:
    """Return the table of medians over the sizes; empty if there are no peers."""
    if found:
        yield ""
        yield "| call | side | library | median ratio | sizes | interval wholly above 1.0 |"
        yield "| --- | --- | --- | ---: | ---: | --- |"
    for one in found:
        cells = [
            one.call,
            one.side,
            one.title,
            f"{one.median:.2f}",
            str(one.sizes),
            one.slower_text,
        ]
        yield f"| {' | '.join(cells)} |"


def side_table(entries: list[Entry], limits: list[Entry], side: str) -> Iterator[str]:
    """Return a table with a row for each size, and a column for each library and each ratio."""
    present = [entry for entry in entries if entry[side]]
    titles = list(dict.fromkeys(title(entry) for entry in present))
    own = [name for name in titles if is_own(name) and not is_part(name)]
    peers = [name for name in titles if not is_own(name) and not is_part(name)]
    parts = {name: [part for part in titles if is_part_of(part, name)] for name in titles}
    at_limit = {entry["size"]: entry[side] for entry in limits if entry[side]}
    ratios = {f"{name} / best": (name, peers) for name in own if peers}
    if "gpucoll-list" in own:
        ratios["gpucoll-list / gpucoll"] = ("gpucoll-list", ["gpucoll"])
    longer = {f"{name} / longer part": (name, parts[name]) for name in titles if parts[name]}
    is_torch = "gpucoll torch" in own
    columns = ["bytes", *titles, *ratios, *longer]
    columns += ["gpucoll torch - gpucoll (CPU)"] if is_torch else []
    of_copy = any(entry["library"] == "copy" for entry in limits)
    if at_limit:
        columns += [f"{name} busbw / copy" if of_copy else f"limit / {name}" for name in own]
    yield f"| {' | '.join(columns)} |"
    yield f"|{' ---: |' * len(columns)}"
    for size in dict.fromkeys(entry["size"] for entry in present):
        found = {title(entry): entry[side] for entry in present if entry["size"] == size}
        cells = [size_text(size)]
        cells += [time_text(found[name]["time"]) if name in found else "" for name in titles]
        cells += [ratio_cell(found, name, others) for name, others in ratios.values()]
        cells += [ratio_cell(found, name, others, True) for name, others in longer.values()]
        cells += [difference_cell(found, "gpucoll torch", "gpucoll")] if is_torch else []
        if at_limit:
            cells += [part_cell(at_limit.get(size), found.get(name), of_copy) for name in own]
        yield f"| {' | '.join(cells)} |"


def figure_table(entries: list[Entry]) -> Iterator[str]:
    """Return a table of figures other than times, with a row for each library."""
    having = [entry for entry in entries if "figures" in entry]
    names = [name for name in FIGURES if any(name in entry["figures"] for entry in having)]
    yield f"| {' | '.join(['library', *(FIGURES[name].title for name in names)])} |"
    yield f"| --- |{' ---: |' * len(names)}"
    for entry in having:
        figures = entry["figures"]
        cells = [FIGURES[name].text(figures[name]) if name in figures else "" for name in names]
        yield f"| {' | '.join([title(entry), *cells])} |"


def is_part_of(part: str, name: str) -> bool:
    """Return whether a title names a part of what another title names."""
    return is_part(part) and part.rpartition(" ")[0] == name


def difference_cell(found: dict[str, Side], name: str, other: str) -> str:
    """Return the extra cost of one call over another: time, and CPU time."""
    if name not in found or other not in found:
        return ""
    time, cpu = (found[name][key] - found[other][key] for key in ("time", "cpu_time"))
    return f"{time:+.2f} ({cpu:+.2f})"


def ratio_cell(found: dict[str, Side], name: str, others: list[str], longest: bool = False) -> str:
    """Return a ratio to the best of the others (or the longest), its interval, and that other."""
    ratio = ratio_to_best(found, name, others, longest)
    return "" if ratio is None else f"{ratio[0]} {ratio[1]}"


def part_cell(limit: Side | None, side: Side | None, of_copy: bool = False) -> str:
    """Return the fraction that was reached of the memory limit, or of a copy's bandwidth."""
    if of_copy:
        return f"{side['bus_bw'] / limit['bus_bw']:.2f}" if limit and side else ""
    return f"{limit['time'] / side['time']:.2f}" if limit and side else ""


def plot(content: dict[str, Any], path: Path) -> None:
    """Plot bus bandwidth over size, with a panel for each call and side."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    groups = grouped(content["results"])
    panels, axes = pyplot.subplots(len(groups), 2, squeeze=False, figsize=(11, 4 * len(groups)))
    for row, (call, entries) in zip(axes, groups.items(), strict=True):
        for axis, side in zip(row, SIDES, strict=True):
            for name in dict.fromkeys(title(entry) for entry in entries):
                mine = [entry for entry in entries if title(entry) == name and entry[side]]
                heights = [entry[side]["bus_bw"] for entry in mine]
                axis.plot([entry["size"] for entry in mine], heights, marker="o", label=name)
            axis.set(title=f"{call}, {SIDE_TITLES[side]}", xscale="log", yscale="log",
                     xlabel="bytes", ylabel="busbw (GB/s)")  # fmt: skip
            axis.legend()
    panels.tight_layout()
    panels.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
