"""Draw the times of one call over its sizes, for gpucoll and its peers: the README's picture.

::

    python tools/draw_peers.py bench/results/RESULT.json docs/images/all_reduce

RESULT.json is what ``gpucoll-bench COLLECTIVE --compare ... --json RESULT.json`` writes. The tool
makes docs/images/all_reduce-light.svg and docs/images/all_reduce-dark.svg, for a light and for a
dark page. Both axes are logarithmic. The background is transparent.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from schedules import svg

from gpucoll.bench.results import SIDES
from gpucoll.bench.summary import SIDE_TITLES, size_text, title

Series = dict[str, list[tuple[int, float]]]  # (bytes, microseconds), by library

TITLES: Final = {
    "gpucoll": "gpucoll",
    "impi": "Intel MPI",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "gloo": "Gloo",
}
WIDTH, HEIGHT = 800, 420
LEFT, RIGHT, TOP, BOTTOM = 76, 652, 86, 352  # of the area with the lines
LABEL_PITCH = 18.0  # from one label at the right to the next
TICK_FACTOR = 16  # from one labelled size to the next
UNITS: Final = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"), (1e-3, "ns"))


@dataclass(frozen=True)
class Theme:
    """The colours for one kind of page."""

    words: str
    quiet: str
    grid: str
    lines: dict[str, str]


THEMES: Final = {
    "light": Theme(
        words="#1f2328",
        quiet="#59636e",
        grid="#d1d9e0",
        lines={
            "gpucoll": "#0969da",
            "impi": "#9a6700",
            "openmpi": "#8250df",
            "mpich": "#1a7f37",
            "gloo": "#59636e",
        },
    ),
    "dark": Theme(
        words="#f0f6fc",
        quiet="#9198a1",
        grid="#30363d",
        lines={
            "gpucoll": "#58a6ff",
            "impi": "#d29922",
            "openmpi": "#bc8cff",
            "mpich": "#3fb950",
            "gloo": "#9198a1",
        },
    ),
}


def series_of(content: dict[str, Any], side: str) -> Series:
    """Return the times of each library that has a title here, in the order of `TITLES`.

    Raises
    ------
    ValueError
        The file holds several calls, or no call of gpucoll's beside a peer's at several sizes.
    """
    calls = {(one["collective"], one["type"], one["redop"]) for one in content["results"]}
    if len(calls) != 1:
        raise ValueError(f"one call can be drawn, but the file has {len(calls)}")
    found: Series = {name: [] for name in TITLES}
    for entry in content["results"]:
        if entry[side] and title(entry) in found:
            found[title(entry)].append((entry["size"], entry[side]["time"]))
    found = {name: sorted(points) for name, points in found.items() if len(points) > 1}
    if "gpucoll" not in found or len(found) < 2:
        raise ValueError(f"gpucoll and a peer are needed at two sizes {SIDE_TITLES[side]}")
    return found


@dataclass(frozen=True)
class Picture:
    """What is drawn, and where each size and time is."""

    series: Series
    heading: str
    explanation: str
    origin: str
    theme: Theme

    @property
    def sizes(self) -> list[int]:
        """All sizes, the smallest first."""
        return sorted({size for points in self.series.values() for size, _ in points})

    @property
    def times(self) -> list[float]:
        """All times, the shortest first."""
        return sorted(time for points in self.series.values() for _, time in points)

    @property
    def least_time(self) -> float:
        """The time at the lower edge, which leaves room for a label."""
        return self.times[0] / 2.4

    def x(self, size: int) -> float:
        """Return the place of a size."""
        return LEFT + (RIGHT - LEFT) * _share(size, self.sizes[0], self.sizes[-1])

    def y(self, time: float) -> float:
        """Return the place of a time."""
        return BOTTOM - (BOTTOM - TOP) * _share(time, self.least_time, self.times[-1])

    def document(self) -> str:
        """Return the SVG document."""
        parts = [svg.head(WIDTH, HEIGHT, f"{self.heading}. {self.explanation}")]
        parts += [*self.words(), *self.axes(), *self.lines(), *self.labels()]
        return "\n".join(parts) + "\n</svg>\n"

    def words(self) -> Iterator[str]:
        """Yield the heading, the axes' titles and the origin."""
        quiet = self.theme.quiet
        yield svg.text(16, 26, self.heading, 18, "start", "bold", self.theme.words)
        yield svg.text(16, 48, self.explanation, 13, "start", fill=quiet)
        yield svg.text(16, TOP - 12, "time of one call", 12, "start", fill=quiet)
        yield svg.text((LEFT + RIGHT) / 2, BOTTOM + 40, "size of the array", 12, fill=quiet)
        yield svg.text(WIDTH - 16, HEIGHT - 8, self.origin, 11, "end", fill=quiet)

    def axes(self) -> Iterator[str]:
        """Yield a line for each power of ten, and the labels of both axes."""
        first, last = (math.log10(time) for time in (self.least_time, self.times[-1]))
        for power in range(math.ceil(first), math.floor(last) + 1):
            y = round(self.y(10.0**power), 1)
            yield svg.line(LEFT, y, RIGHT, y, f'stroke="{self.theme.grid}"')
            words = time_text(10.0**power)
            yield svg.text(LEFT - 8, y + 4, words, 12, "end", fill=self.theme.quiet)
        size = self.sizes[0]
        while size <= self.sizes[-1]:
            words = bytes_text(size)
            yield svg.text(round(self.x(size), 1), BOTTOM + 18, words, 12, fill=self.theme.quiet)
            size *= TICK_FACTOR

    def lines(self) -> Iterator[str]:
        """Yield each library's line, gpucoll's on top."""
        for name in reversed(self.series):
            points = " ".join(
                f"{self.x(size):.1f},{self.y(time):.1f}" for size, time in self.series[name]
            )
            width = 3.2 if name == "gpucoll" else 1.8
            yield (
                f'<polyline points="{points}" fill="none" stroke="{self.theme.lines[name]}" '
                f'stroke-width="{width}" stroke-linejoin="round" stroke-linecap="round"/>'
            )

    def labels(self) -> Iterator[str]:
        """Yield each library's name and time at the end of its line, and gpucoll's first time."""
        ends = {name: points[-1][1] for name, points in self.series.items()}
        names = sorted(ends, key=lambda name: ends[name], reverse=True)
        for name, y in zip(names, spread([self.y(ends[name]) for name in names]), strict=True):
            words = f"{TITLES[name]} {time_text(ends[name])}"
            weight = "bold" if name == "gpucoll" else "normal"
            fill = self.theme.lines[name]
            yield svg.text(RIGHT + 10, round(y + 4.5, 1), words, 13.5, "start", weight, fill)
        size, time = self.series["gpucoll"][0]
        place = round(self.x(size)), round(self.y(time) + 18, 1)
        yield svg.text(*place, time_text(time), 12, "start", "bold", self.theme.lines["gpucoll"])


def spread(wanted: Sequence[float]) -> list[float]:
    """Return places at least a label apart, as near to ascending ones as that allows."""
    placed: list[float] = []
    for y in wanted:
        placed.append(max(y, placed[-1] + LABEL_PITCH) if placed else y)
    shift = (sum(placed) - sum(wanted)) / len(wanted)
    return [y - shift for y in placed]


def _share(value: float, least: float, most: float) -> float:
    return math.log(value / least) / math.log(most / least)


def time_text(time_us: float) -> str:
    """Format a time with two digits."""
    scale, unit = next((one for one in UNITS if time_us >= one[0]), UNITS[-1])
    return f"{float(f'{time_us / scale:.2g}'):g} {unit}"


def bytes_text(size: int) -> str:
    """Format a size with its unit."""
    words = size_text(size)
    return f"{words}B" if " " in words else f"{words} B"


def picture(content: dict[str, Any], side: str, theme: Theme) -> Picture:
    """Return the picture of a result file's only call."""
    series = series_of(content, side)
    environment, entry = content["environment"], content["results"][0]
    what = [entry["type"], entry["redop"] if entry["redop"] != "none" else ""]
    return Picture(
        series=series,
        heading=f"{entry['collective']} between {environment['ranks']} processes",
        explanation=f"{' '.join(filter(None, what))}, {SIDE_TITLES[side]}, on "
        f"{environment['usable_cpus']} CPUs of one host. Lower is better.",
        origin=f"{environment['cpu']}, {environment['date'][:10]}",
        theme=theme,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Draw the times of gpucoll and its peers.")
    parser.add_argument("result", type=Path, help="the file that gpucoll-bench --json wrote")
    parser.add_argument("stem", type=Path, help="the pictures' path, without -light.svg")
    parser.add_argument("--side", choices=SIDES, default="in_place", help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        content = json.loads(options.result.read_text(encoding="utf-8"))
        for name, theme in THEMES.items():
            drawn = picture(content, options.side, theme).document()
            options.stem.parent.mkdir(parents=True, exist_ok=True)
            path = options.stem.with_name(f"{options.stem.name}-{name}.svg")
            path.write_text(drawn, encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:
        print(f"{options.result}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
