"""``gpucoll-bench report``: kept results as Markdown tables, as a picture, as a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpucoll.bench import page, pictures
from gpucoll.bench.figures import FIGURES
from gpucoll.bench.kept import (
    CannotReadError,
    Content,
    counted,
    libraries,
    machine,
    public_command,
    read,
)
from gpucoll.bench.results import OWN, SIDES
from gpucoll.bench.summary import (
    SIDE_TITLES,
    Entry,
    Side,
    Summary,
    few_rounds,
    grouped,
    is_own,
    is_part,
    ratio_to_best,
    several_ranks,
    size_text,
    summaries,
    title,
)
from gpucoll.bench.table import time_text
from gpucoll.command_line import OneLineParser

__all__ = ["main", "make_parser", "markdown"]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = OneLineParser(
        prog="gpucoll-bench report",
        description="Show results that gpucoll-bench --json kept: as Markdown tables on standard "
        "output, unless --plot or --html asks for something else. If several files have the same "
        "call at the same size, the newest file's times count.",
    )
    add = parser.add_argument
    add("results", nargs="+", type=Path, metavar="RESULT.json", help="kept results, of one machine")
    add("--plot", type=Path, metavar="FILE", help="draw them: .svg, .png or .pdf")
    add("--html", type=Path, metavar="FILE", help="write one page that needs no network")
    add("--markdown", action="store_true", help="print the tables even with --plot or --html")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    given = make_parser().parse_args(arguments)
    try:
        if reason := (given.plot and pictures.why_not(given.plot)) or (
            given.html and page.why_not(given.html)
        ):
            raise CannotReadError(reason)
        contents = counted([read(path) for path in given.results])
        if given.plot is not None:
            pictures.save(pictures.overview(contents), given.plot)
        if given.html is not None:
            page.save(contents, given.html)
    except (CannotReadError, pictures.NothingToDrawError) as error:
        print(f"gpucoll-bench report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"gpucoll-bench report: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    if given.markdown or (given.plot is None and given.html is None):
        print("\n".join(markdown(contents)).rstrip())
    return 0


def markdown(contents: Sequence[Content]) -> Iterator[str]:
    """Return the lines of the tables, one table for each call and side."""
    for content in contents:
        environment = content["environment"]
        yield f"`{public_command(environment)}`"
        yield ""
        yield (
            f"{machine(environment)}; {', '.join(libraries(environment))}; "
            f"{environment['date'][:10]}. Microseconds; ratios are gpucoll's time over the best "
            "peer's with the 95 % interval of this run."
        )
        yield ""
        if note := environment.get("test_device"):
            yield str(note)
            yield ""
    results = [entry for content in contents for entry in content["results"]]
    has_ranks = several_ranks(results)
    found = list(summaries(results))
    if found and (caution := few_rounds(results)):
        yield caution
        yield ""
    yield from summary_table(found)
    limits = grouped((entry for one in contents for entry in one["limit"]), has_ranks)
    for call, entries in grouped(results, has_ranks).items():
        entries.sort(key=lambda entry: int(entry["size"]))
        for side in SIDES:
            if any(entry[side] for entry in entries if entry["library"] in OWN):
                yield f"**{call}, {SIDE_TITLES[side]}**"
                yield ""
                yield from side_table(entries, limits.get(call, []), side)
                yield ""
        if any("figures" in entry for entry in entries):
            yield f"**{call}**"
            yield ""
            yield from figure_table(entries)
            yield ""


def summary_table(found: list[Summary]) -> Iterator[str]:
    """Return the table of medians over the sizes; empty if there are no peers."""
    if found:
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
    if found:
        yield ""


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
