"""Draw how six ways train over slow links: the picture of docs/slow_links.md.

::

    sudo python examples/slow_links.py --seeds 5 --json docs/slow_links.json
    python tools/draw_slow_links.py docs/slow_links.json docs/images/slow_links.svg

The tool also prints the rows of the document's table.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from schedules import svg

_COLOURS = ("#111827", "#6b7280", "#1d4ed8", "#0891b2", "#c2410c", "#15803d")
_WIDTH, _HEIGHT = 868, 372
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 470, 56, 316  # of the curves
_ROWS, _BAR, _BAR_WIDTH = 510, 660, 150  # x of the ways' names, x and width of the bars
_PALE, _QUIET = "#e5e7eb", "#6b7280"
_LEAST, _MOST = 0.4, 1.0  # accuracies


def table_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the rows of the table: accuracy as mean of all runs, time and bytes of the limited."""
    first = found["runs"][0]
    reference = mean(first["accuracies"])
    for run in found["runs"]:
        accuracy = mean(run["accuracies"])
        less = first["sent_bytes"] / run["sent_bytes"]
        yield (
            f"| {run['way']} | {accuracy:.1%} | {100 * (accuracy - reference):+.1f} | "
            f"{run['seconds']:.1f} s | {_megabytes(run)} | {less:.3g} |"
        )


def draw(found: dict[str, Any]) -> str:
    """Return the picture as an SVG document."""
    runs, title = found["runs"], f"Training on {found['ranks']} hosts at 10 Mbit/s"
    coloured = list(zip(runs, _COLOURS, strict=False))
    most_s, least_s = (limit(s for run in runs for s, _ in run["curve"]) for limit in (max, min))
    first, last = math.log10(0.7 * least_s), math.log10(1.5 * most_s)
    decades = range(math.ceil(first), math.floor(last) + 1)

    def x(seconds: float) -> float:
        share = (math.log10(seconds) - first) / (last - first)
        return _LEFT + share * (_RIGHT - _LEFT)

    parts = [
        svg.head(_WIDTH, _HEIGHT, title),
        '<rect width="100%" height="100%" fill="white"/>',
        svg.text(16, 28, title, 16, "start", "bold"),
        svg.text(_BAR, _TOP - 8, "sent by each host (logarithmic)", 11, "start", fill=_QUIET),
        *_axes(x, decades),
    ]
    for number, (run, colour) in enumerate(coloured):
        parts += [_curve(run["curve"], x, colour), *_row(number, run, runs, colour)]
    words = "accuracy on other images"
    parts.append(svg.text(_LEFT, _TOP - 8, words, 11, "start", fill=_QUIET))
    return "\n".join(parts) + "\n</svg>\n"


def _y(accuracy: float) -> float:
    share = (max(accuracy, _LEAST) - _LEAST) / (_MOST - _LEAST)
    return _BOTTOM - share * (_BOTTOM - _TOP)


def _axes(x: Any, decades: Iterable[int]) -> Iterator[str]:
    look = f'stroke="{_PALE}"'
    for tenth in range(round(10 * _LEAST), 1 + round(10 * _MOST)):
        yield svg.line(_LEFT, _y(tenth / 10), _RIGHT, _y(tenth / 10), look)
        yield svg.text(_LEFT - 8, _y(tenth / 10) + 4, f"{tenth / 10:.0%}", 11, "end")
    for decade in decades:
        yield svg.line(x(10**decade), _TOP, x(10**decade), _BOTTOM, look)
        yield svg.text(x(10**decade), _BOTTOM + 18, f"{10.0**decade:g}", 11)
    yield svg.text(
        (_LEFT + _RIGHT) / 2,
        _BOTTOM + 40,
        "seconds since the beginning (logarithmic)",
        11,
        fill=_QUIET,
    )


def _curve(curve: list[list[float]], x: Any, colour: str) -> str:
    points = " ".join(f"{x(seconds):.1f},{_y(accuracy):.1f}" for seconds, accuracy in curve)
    seconds, accuracy = curve[-1]
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>\n'
        f'<circle cx="{x(seconds):.1f}" cy="{_y(accuracy):.1f}" r="4" fill="{colour}"/>'
    )


def _row(number: int, run: Any, runs: Any, colour: str) -> Iterator[str]:
    """Yield a way's name, and a bar as long as the bytes' number of digits."""
    y, least = _TOP + 20 + 44 * number, min(each["sent_bytes"] for each in runs)
    most = max(each["sent_bytes"] for each in runs)
    share = math.log(run["sent_bytes"] / least * 2) / math.log(most / least * 2)
    yield svg.text(_ROWS, y, run["way"], 12, "start", "bold", colour)
    numbers = f"{mean(run['accuracies']):.1%}, {run['seconds']:.1f} s"
    yield svg.text(_ROWS, y + 16, numbers, 11, "start")
    yield (
        f'<rect x="{_BAR}" y="{y - 8}" width="{share * _BAR_WIDTH:.1f}" height="14" '
        f'fill="{colour}"/>'
    )
    yield svg.text(_BAR + share * _BAR_WIDTH + 6, y + 4, _megabytes(run), 11, "start")


def _megabytes(run: Any) -> str:
    """Return what each host has sent, to three digits."""
    return f"{run['sent_bytes'] / 1e6:#.3g}".rstrip(".") + " MB"


def main(arguments: list[str]) -> None:
    """Draw the picture into the file that is named, and print the rows of the table."""
    source, destination = arguments
    found = json.loads(Path(source).read_text("utf-8"))
    Path(destination).write_text(draw(found), "utf-8")
    print("\n".join(table_lines(found)))


if __name__ == "__main__":
    main(sys.argv[1:])
