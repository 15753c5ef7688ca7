"""Kept results as one page: pictures, where a peer is faster, all ratios, and all times.

The page needs no network and no other file, and it is complete without its script.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from gpucoll.bench.estimates import Ratio
from gpucoll.bench.kept import Content, libraries, machine, public_command
from gpucoll.bench.page_assets import SCRIPT, STYLE
from gpucoll.bench.pictures import (
    THEMES,
    Bar,
    NothingToDrawError,
    calls_of,
    headline,
    lines,
    small_multiples,
    to_svg,
)
from gpucoll.bench.pictures.heat_map import INKS, WHITE, colour_of, ratios_of
from gpucoll.bench.pictures.scales import size_label
from gpucoll.bench.pictures.series import Call, label_of, short_names
from gpucoll.bench.pictures.theme import contrast
from gpucoll.bench.results import OWN, SIDES, write_whole
from gpucoll.bench.summary import SIDE_TITLES, by_size, few_rounds, is_part
from gpucoll.bench.table import time_text

__all__ = ["page", "save", "why_not"]

MIDDLE_BYTES = 64 << 10
MOST_ROWS = 15  # of the list of what peers are faster at, before the rest is folded


@dataclass(frozen=True)
class Cell:
    """gpucoll beside the best peer: one call, side and size; times in microseconds."""

    call: str
    side: str
    size_bytes: int
    ratio: Ratio
    peer: str
    own_us: float
    peer_us: float

    @property
    def where(self) -> str:
        """The call's size and side."""
        size = f"{size_label(self.size_bytes)}, " if self.size_bytes else ""
        return f"{size}{SIDE_TITLES[self.side]}"

    @property
    def text(self) -> str:
        """Everything, in words."""
        return (
            f"{self.call}, {self.where}: gpucoll {time_text(self.own_us)} µs, {self.peer} "
            f"{time_text(self.peer_us)} µs, ratio {self.ratio}"
        )


def why_not(path: Path) -> str | None:
    """Return why no page can be written to a path, and what to do; None if it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return f"{path}: the pictures of a page need matplotlib: pip install 'gpucoll[plot]'"
    return None


def save(contents: Sequence[Content], path: Path) -> None:
    """Write the page to a file; OSError if that fails."""
    write_whole(path, page(contents))


def page(contents: Sequence[Content]) -> str:
    """Return the page as HTML.

    Drawing needs matplotlib. The commands are shown, and kept in the files to download, without
    paths.

    Parameters
    ----------
    contents : sequence of dict
        What `kept.counted` returns.
    """
    calls = calls_of(contents)
    names = short_names(calls)
    cells = [
        cell
        for call in calls.values()
        for side in SIDES
        for cell in cells_of(call, names[call.title], side)
    ]
    newest = contents[-1]["environment"]
    names_of_libraries = [name for one in contents for name in one["environment"]["libraries"]]
    peers = [label_of(name) for name in dict.fromkeys(names_of_libraries) if name not in OWN]
    heading = f"gpucoll beside {', '.join(peers)}" if peers else "gpucoll"
    body = "\n".join(
        [
            f"<header>\n<h1>{escape(heading)}</h1>",
            f'<p class="quiet">{escape(machine(newest))}; {escape(newest["date"][:10])}</p>',
            *notes(contents),
            "</header>\n<main>",
            *headline_section(cells),
            *peers_section(cells),
            *heat_section(cells),
            *multiples_section(contents, calls),
            *times_section(calls, names),
            *method_section(contents),
            "</main>",
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(heading)}</title>\n<style>\n{STYLE}{colours()}</style>\n</head>\n<body>\n"
        f"{body}\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    )


def cells_of(call: Call, name: str, side: str) -> Iterator[Cell]:
    """Yield gpucoll beside the best peer at each size."""
    sizes = by_size(call.entries, side)
    for size_bytes, (ratio, peer) in ratios_of(call, side).items():
        times = [sizes[size_bytes][name]["time"] for name in ("gpucoll", peer)]
        yield Cell(name, side, size_bytes, ratio, label_of(peer), *times)


def notes(contents: Sequence[Content]) -> Iterator[str]:
    """Yield what must be read before any number."""
    for note in dict.fromkeys(one["environment"].get("test_device") for one in contents):
        if note:
            yield f"<p><strong>{escape(str(note))}</strong></p>"
    if any(entry[side]["nwrong"] for one in contents for entry in one["results"]
           for side in SIDES if entry[side]):  # fmt: skip
        yield "<p><strong>Some results were wrong.</strong></p>"
    if caution := few_rounds(entry for one in contents for entry in one["results"]):
        yield f"<p><strong>{escape(caution)}</strong></p>"
    for failure in (text for one in contents for text in one["environment"].get("failures", [])):
        yield f"<p><strong>Given up: {escape(failure.splitlines()[0])}</strong></p>"


# --- sections -------------------------------------------------------------------------------------


def headline_section(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the picture of a few bars; nothing without peers."""
    chosen = headline_cells(cells)
    if not chosen:
        return
    bars = []
    for cell in chosen:
        size = f", {size_label(cell.size_bytes)}" if cell.size_bytes else ""
        bars.append(Bar(f"{cell.call}{size}", cell.ratio, cell.peer))
    yield '<section>\n<h2 class="hidden">In short</h2>\n<div class="wide bars">'
    yield themed(to_svg(headline(bars), "headline"))
    words = "; ".join(f"{bar.label}: {bar.ratio.value:.2f} of {bar.peer}" for bar in bars)
    yield f'</div>\n<p class="narrow" aria-hidden="true">{escape(words)}.</p>\n</section>'


def headline_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Return the smallest, a middle and the largest size of all_reduce, and calls without sizes.

    Without all_reduce the first call stands for it. The side is out of place if it was measured
    there.
    """
    sized = [cell for cell in cells if cell.size_bytes]
    names = list(dict.fromkeys(cell.call for cell in sized))
    names.sort(key=lambda name: name.partition(" ")[0] != "all_reduce")
    mine = [cell for cell in sized if cell.call == names[0]]
    mine = [cell for cell in mine if cell.side == mine[0].side]
    chosen = []
    if mine:
        middle = min(mine, key=lambda cell: abs(math.log(cell.size_bytes / MIDDLE_BYTES)))
        chosen = [mine[0], middle, mine[-1]]
    others = [cell for cell in cells if not cell.size_bytes]
    return list(dict.fromkeys([*chosen, *others[:4]]))


def peers_section(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield where a peer is faster, then where gpucoll is."""
    yield '<section>\n<h2 id="peers">Where a peer is faster</h2>'
    if not cells:
        yield "<p>No other library was measured beside gpucoll: add --compare.</p>\n</section>"
        return
    slower = sorted((c for c in cells if c.ratio.low > 1), key=lambda cell: -cell.ratio.value)
    faster = [cell for cell in cells if cell.ratio.high < 1]
    total, level = len(cells), len(cells) - len(slower) - len(faster)
    if slower:
        yield (
            f"<p>At {len(slower)} of {total} calls, sizes and sides: there the 95 % interval of "
            "gpucoll's time over the best peer's lies above 1. The largest ratio comes first.</p>"
        )
    else:
        yield (
            f"<p>At none of {total} calls, sizes and sides: nowhere does the 95 % interval of "
            "gpucoll's time over the best peer's lie above 1.</p>"
        )
    if slower:
        yield from peer_table(slower[:MOST_ROWS])
    if slower[MOST_ROWS:]:
        yield f"<details><summary>{len(slower) - MOST_ROWS} more</summary>"
        yield from peer_table(slower[MOST_ROWS:])
        yield "</details>"
    median = np.median([cell.ratio.value for cell in cells])
    yield "</section>\n<section>\n<h2>Where gpucoll is faster</h2>"
    yield (
        f"<p>At {len(faster) or 'none'} of {total}. At {level or 'none'} the interval contains 1. "
        f"The median of all ratios is {median:.2f}: gpucoll takes {100 * median:.0f} % of the best "
        "peer's time.</p>\n</section>"
    )


def peer_table(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a table of calls at which a peer is faster."""
    yield '<div class="wide"><table class="rows"><thead><tr>'
    for name in ("call", "side", "size", "gpucoll, µs", "peer, µs", "peer", "ratio", "interval"):
        kind = ' class="text"' if name in ("call", "side", "peer") else ""
        yield f'<th scope="col"{kind}>{name}</th>'
    yield "</tr></thead><tbody>"
    for cell in cells:
        ratio = cell.ratio
        yield (
            f'<tr><td class="text">{escape(cell.call)}</td>'
            f'<td class="text">{SIDE_TITLES[cell.side]}</td>'
            f"{number(cell.size_bytes, size_label(cell.size_bytes) if cell.size_bytes else '')}"
            f"{number(cell.own_us, time_text(cell.own_us))}"
            f"{number(cell.peer_us, time_text(cell.peer_us))}"
            f'<td class="text">{escape(cell.peer)}</td>{number(ratio.value, f"{ratio.value:.2f}")}'
            f"{number(ratio.low, f'{ratio.low:.2f} to {ratio.high:.2f}')}</tr>"
        )
    yield "</tbody></table></div>"


def heat_section(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the ratio of each call at each size, one table for each side."""
    if not cells:
        return
    sides = [side for side in SIDES if any(cell.side == side for cell in cells)]
    yield '<section>\n<h2 id="ratios">All ratios to the best peer</h2>'
    yield (
        "<p>gpucoll's time over the best peer's. Blue: gpucoll is faster. White: 1.0. Orange: a "
        "peer is faster; in a frame if the 95 % interval lies above 1.</p>"
    )
    if len(sides) > 1:
        yield '<fieldset id="sides" hidden><legend class="hidden">Side</legend>'
        for value, words in (("both", "both"), *((side, SIDE_TITLES[side]) for side in sides)):
            checked = " checked" if value == "both" else ""
            radio = f'<input type="radio" name="side" value="{value}"{checked}>'
            yield f"<label>{radio} {words}</label>"
        yield "</fieldset>"
    for side in sides:
        yield f'<div class="wide" data-side="{side}">'
        yield from heat_table([cell for cell in cells if cell.side == side], SIDE_TITLES[side])
        yield "</div>"
    yield "</section>"


def heat_table(cells: Sequence[Cell], caption: str) -> Iterator[str]:
    """Yield the table of one side."""
    sizes = sorted({cell.size_bytes for cell in cells})
    by_call: dict[str, dict[int, Cell]] = {}
    for cell in cells:
        by_call.setdefault(cell.call, {})[cell.size_bytes] = cell
    yield f'<table class="heat"><caption>{caption}</caption>\n<thead><tr><td></td>'
    for size in sizes:
        yield f'<th scope="col">{size_label(size).replace(" ", "<br>") if size else "&ndash;"}</th>'
    yield "</tr></thead>\n<tbody>"
    for call, mine in by_call.items():
        row = [heat_cell(mine[size]) if size in mine else "<td></td>" for size in sizes]
        yield f'<tr><th scope="row" class="text">{escape(call)}</th>{"".join(row)}</tr>'
    yield "</tbody></table>"


def heat_cell(cell: Cell) -> str:
    """Return a coloured cell; its title and its hidden text have the interval and the peer."""
    ratio = cell.ratio
    colour = colour_of(ratio.value)
    kinds = ["dark"] if max(INKS, key=lambda ink: contrast(ink, colour)) == WHITE else []
    kinds += ["peer"] if ratio.low > 1 else []
    text = f"{ratio.value:.2f}" if ratio.value < 9.95 else f"{ratio.value:.0f}"
    more = f"{ratio.low:.2f} to {ratio.high:.2f}, {cell.peer}"
    return (
        f'<td{f""" class="{" ".join(kinds)}" """.rstrip() if kinds else ""} '
        f'style="background:{colour}" title="{escape(cell.text)}">{text}'
        f'<span class="hidden"> {escape(more)}</span></td>'
    )


def multiples_section(contents: Sequence[Content], calls: dict[str, Call]) -> Iterator[str]:
    """Yield the picture of all calls, or a larger one for each side of a single call."""
    yield '<section>\n<h2 id="calls">Time over size</h2>'
    pictures = []
    with suppress(NothingToDrawError):  # times of 0 alone
        if len(calls) > 1:
            pictures.append(small_multiples(list(contents)))
        for name in calls if len(calls) == 1 else ():
            sides = [side for side in SIDES if calls[name].series(side, "time")]
            pictures += [lines(list(contents), name, side) for side in sides]
    for place, picture in enumerate(pictures):
        yield f'<div class="wide">{themed(to_svg(picture, f"calls-{place}"))}</div>'
    yield "</section>"


def times_section(calls: dict[str, Call], short: dict[str, str]) -> Iterator[str]:
    """Yield all times, in microseconds, in a table that can be sorted."""
    rows = [
        (short[call.title], side, size, sides)
        for call in calls.values()
        for side in SIDES
        for size, sides in sorted(by_size(call.entries, side).items())
    ]
    names = [name for name in dict.fromkeys(n for *_, sides in rows for n in sides)
             if not is_part(name)]  # fmt: skip
    yield '<section>\n<h2 id="times">All times</h2>'
    yield f"<details><summary>{len(rows)} rows, in microseconds</summary>"
    yield '<div class="wide"><table class="rows"><thead><tr><th scope="col" class="text">call</th>'
    yield '<th scope="col" class="text">side</th><th scope="col">size</th>'
    yield "".join(f'<th scope="col">{escape(label_of(name))}</th>' for name in names)
    yield "</tr></thead><tbody>"
    for call, side, size, sides in rows:
        times = [
            number(sides[name]["time"], time_text(sides[name]["time"]))
            if name in sides
            else "<td></td>"
            for name in names
        ]
        yield (
            f'<tr data-side="{side}"><td class="text">{escape(call)}</td>'
            f'<td class="text">{SIDE_TITLES[side]}</td>'
            f"{number(size, size_label(size) if size else '')}{''.join(times)}</tr>"
        )
    yield "</tbody></table></div></details>\n</section>"


def method_section(contents: Sequence[Content]) -> Iterator[str]:
    """Yield how everything was measured, and the files."""
    yield '<section>\n<h2 id="method">How it was measured</h2>'
    for content in reversed(contents):
        about = {**content["environment"]}
        about["command"] = public_command(about)
        name = f"gpucoll-bench-{about['date'][:10]}.json"
        kept = json.dumps({**content, "environment": about}, separators=(",", ":"))
        data = base64.b64encode(kept.encode()).decode()
        yield f"<p><code>{escape(about['command'])}</code></p>"
        where = f"{machine(about)}. {'; '.join(libraries(about))}. {about['date']}"
        yield f"<p>{escape(where)}</p>"
        yield f'<p class="quiet">{escape(str(about.get("timing", "")))}</p>'
        yield (
            f'<p><a download="{escape(name)}" href="data:application/json;base64,{data}">'
            "Download these results as JSON</a></p>"
        )
    yield "</section>"


# --- details --------------------------------------------------------------------------------------


def number(value: float, text: str) -> str:
    """Return a cell of a table that is sorted by a number."""
    return f'<td data-value="{value:.6g}">{text}</td>'


def palette() -> dict[str, str]:
    """Return the dark theme's colour for each of the light theme's."""

    def flat(theme: Any) -> list[str]:
        single = [theme.words, theme.quiet, theme.grid, theme.faster, theme.slower]
        return [*theme.own, *theme.peers, *single]

    return dict(zip(flat(THEMES["light"]), flat(THEMES["dark"]), strict=True))


def colours() -> str:
    """Return the rules that give the pictures the colours of the reader's theme."""
    light = " ".join(f"--c{one[1:]}: {one};" for one in palette())
    dark = " ".join(f"--c{one[1:]}: {other};" for one, other in palette().items())
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def themed(svg: str) -> str:
    """Return a picture of the light theme whose colours follow the reader's."""
    known = palette()

    def variable(match: re.Match[str]) -> str:
        return f"var(--c{match[0][1:]})" if match[0] in known else match[0]

    return re.sub(r"#[0-9a-f]{6}\b", variable, svg)
