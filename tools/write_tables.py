"""Write the tables of `docs/performance.md` and `docs/performance_tables.md` from kept results.

::

    python tools/write_tables.py          # after a new file in bench/results
    python tools/write_tables.py --check  # exit code 1 if a page is not what the results say

A page has each table between two comments. The first one names the table and the result files,
without their dates; the newest of each name counts::

    <!-- slower: all-2-ranks -->
    <!-- end of slower -->
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from draw_pictures import BARS

from gpucoll.bench.estimates import Ratio
from gpucoll.bench.kept import libraries, machine, read
from gpucoll.bench.pictures.heat_map import ratios_of
from gpucoll.bench.pictures.series import calls_of, label_of
from gpucoll.bench.report import markdown, summary_table
from gpucoll.bench.results import SIDES
from gpucoll.bench.summary import SIDE_TITLES, by_size, size_text, summaries

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "bench/results"
PAGES: Final = ("docs/performance.md", "docs/performance_tables.md")
TABLE: Final = re.compile(r"<!-- ([\w ]+): ([\w -]+) -->\n.*?<!-- end of \1 -->\n", re.DOTALL)

RANGES: Final = ((0, 4 << 10), (4 << 10, 256 << 10), (256 << 10, 64 << 20))
"""Of sizes in bytes: above the first, up to the second."""


class Cell(NamedTuple):
    """One of gpucoll's calls at one size, and the fastest peer."""

    call: str
    side: str
    size: int
    time_us: float
    ratio: Ratio
    peer: str
    peer_us: float


@cache
def newest(name: str) -> Path | None:
    """Return the newest result file of a name, or None."""
    return max(RESULTS.glob(f"????-??-??-{name}.json"), default=None)


content_of: Final = cache(read)
"""Path of a result file -> what it holds."""


@cache
def cells_of(path: Path) -> tuple[Cell, ...]:
    """Return a cell for each plain call of gpucoll's that has a peer."""
    cells = []
    for name, call in calls_of(content_of(path)).items():
        for side in SIDES:
            by_library = by_size(call.entries, side)
            for size, (ratio, peer) in ratios_of(call, side).items():
                time_us, peer_us = (by_library[size][one]["time"] for one in ("gpucoll", peer))
                cells.append(Cell(name, side, size, time_us, ratio, label_of(peer), peer_us))
    return tuple(cells)


def headline(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the table behind the first picture."""
    yield "| | gpucoll | fastest peer | gpucoll takes |"
    yield "| --- | ---: | ---: | ---: |"
    found = {(cell.call, cell.size, cell.side): cell for path in paths for cell in cells_of(path)}
    for label, call, size, side in BARS:
        if cell := found.get((call, size, side)):
            peer = f"{cell.peer} {time_text(cell.peer_us)}"
            yield f"| {label} | {time_text(cell.time_us)} | {peer} | {cell.ratio} |"


def outcome(paths: Sequence[Path]) -> Iterator[str]:
    """Yield how often gpucoll and how often a peer is faster, by size."""
    found = [cell for path in paths for cell in cells_of(path) if cell.size]
    rows = [("all sizes", found)]
    for above, up_to in RANGES:
        words = f"{bytes_text(above * 4)} to {bytes_text(up_to)}" if above else ""
        chosen = [cell for cell in found if above < cell.size <= up_to]
        rows.append((words or f"up to {bytes_text(up_to)}", chosen))
    yield "| size | gpucoll faster | undecided | a peer faster | median ratio |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for words, chosen in filter(all, rows):
        faster = sum(cell.ratio.high < 1 for cell in chosen)
        slower = sum(cell.ratio.low > 1 for cell in chosen)
        median = np.median([cell.ratio.value for cell in chosen])
        counts = f"{faster} | {len(chosen) - faster - slower} | {slower}"
        yield f"| {words} | {counts} | {median:.2f} |"


def slower(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the calls at which a peer is faster: at which sizes, and how much at worst."""
    yield "| call | sizes | largest ratio |"
    yield "| --- | --- | --- |"
    found = [cell for path in paths for cell in cells_of(path)]
    sides = dict.fromkeys((cell.call, cell.side) for cell in found)
    two_sided = {call for call, side in sides if side == SIDES[0]} & {
        call for call, side in sides if side == SIDES[1]
    }
    for call, side in sides:
        mine = [cell for cell in found if (cell.call, cell.side) == (call, side)]
        if lost := [cell for cell in mine if cell.ratio.low > 1]:
            worst = max(lost, key=lambda cell: cell.ratio.value)
            sizes = ranges([cell.size for cell in mine], {cell.size for cell in lost})
            side_text = f", {SIDE_TITLES[side]}" if call in two_sided else ""
            yield (
                f"| {call.split()[0]}{side_text} | {sizes} "
                f"| {worst.ratio.value:.2f} at {bytes_text(worst.size)} ({worst.peer}) |"
            )


def runs(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the file of each result, with its day, machine and versions."""
    for path in paths:
        told = content_of(path)["environment"]
        link = f"[{path.name}](../bench/results/{path.name})"
        yield f"- {link}, {told['date'][:10]}: {machine(told)}; {', '.join(libraries(told))}."


def summary(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the median ratio of each of gpucoll's calls."""
    for path in paths:
        yield from summary_table(list(summaries(content_of(path)["results"])))


def every_size(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the tables of `gpucoll.bench.report`."""
    yield from markdown([content_of(path) for path in paths])


TABLES: Final[dict[str, Callable[[Sequence[Path]], Iterable[str]]]] = {
    "headline": headline,
    "outcome": outcome,
    "slower": slower,
    "runs": runs,
    "summary": summary,
    "every size": every_size,
}


def ranges(sizes: Sequence[int], chosen: set[int]) -> str:
    """Return the chosen ones of ascending sizes, neighbours as "1 MiB to 16 MiB"."""
    texts: list[str] = []
    for size in sorted(chosen):
        place = sizes.index(size)
        if place and sizes[place - 1] in chosen:
            texts[-1] = f"{texts[-1].partition(' to ')[0]} to {bytes_text(size)}"
        else:
            texts.append(bytes_text(size))
    return ", ".join(texts)


def bytes_text(size: int) -> str:
    """Format a size with its unit."""
    words = size_text(size)
    return f"{words}B" if " " in words else f"{words} B"


def time_text(time_us: float) -> str:
    """Format a time with three digits and its unit."""
    scale, unit = next(one for one in ((1e6, "s"), (1e3, "ms"), (0, "us")) if time_us >= one[0])
    return f"{time_us / (scale or 1):.3g} {unit}"


def written(page: str) -> str:
    """Return a page with its tables as the results say.

    Raises
    ------
    ValueError
        A comment names a table or a result that there is not.
    """

    def table(match: re.Match[str]) -> str:
        name, files = match[1], match[2].split()
        if name not in TABLES:
            raise ValueError(f"no table {name!r}; there are {', '.join(TABLES)}")
        paths = [path for path in map(newest, files) if path is not None]
        if not paths:
            raise ValueError(f"{RESULTS} has no file for {name!r}: {match[2]}")
        lines = "\n".join(TABLES[name](paths)).strip()
        return f"<!-- {name}: {match[2]} -->\n\n{lines}\n\n<!-- end of {name} -->\n"

    return TABLE.sub(table, page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Write the tables of docs/performance*.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if stale")
    given = parser.parse_args(arguments)
    stale = []
    for name in PAGES:
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = written(before)
        if after != before:
            stale.append(name)
            if not given.check:
                path.write_text(after, encoding="utf-8")
    for name in stale:
        print(f"{name}: {'differs from bench/results' if given.check else 'written'}")
    return int(given.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
