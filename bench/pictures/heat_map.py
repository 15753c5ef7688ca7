"""The picture of all calls at once: gpucoll's time over the best peer's, by call and size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from gpucoll.bench.estimates import Ratio
from gpucoll.bench.pictures.lines import WIDTH_PT
from gpucoll.bench.pictures.panel import LETTER_PT, LINE_PT, canvas, footing, heading
from gpucoll.bench.pictures.saving import Picture
from gpucoll.bench.pictures.scales import size_label
from gpucoll.bench.pictures.series import (
    Call,
    Contents,
    NothingToDrawError,
    calls_of,
    digest_of,
    label_of,
    short_names,
    types_of,
)
from gpucoll.bench.pictures.theme import THEMES, Theme, blank, blend, contrast, settings
from gpucoll.bench.summary import SIDE_TITLES, by_size, is_own, is_part, ratio_to_best

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["colour_of", "heat_map", "ratios_of"]

WHITE: Final = "#ffffff"
INKS: Final = (WHITE, "#000000")
_CELL_PT, _ROW_PT, _GAP = 33.0, 24.0, 1.5
_FULL: Final = 4.0  # the factor of the full colour
_TOP, _BELOW = 58.0, 92.0

_LEGEND: Final = (0.25, 0.5, 1.0, 2.0, 4.0)


def heat_map(contents: Contents, side: str, theme: str = "light") -> Picture:
    """Draw the ratio of gpucoll's time to the best peer's, for each call and size.

    A cell is white at 1.0, blue if gpucoll is faster, and orange if a peer is. Its number is bold
    and framed if a peer is faster for certain: the 95 % interval lies above 1.0.

    Parameters
    ----------
    contents : dict or sequence of dict
        What ``gpucoll-bench --json`` wrote.
    side : str
        "out_of_place" or "in_place"; calls without this side, or without peers there, are left out.
    theme : str
        A name in `THEMES`.

    Raises
    ------
    NothingToDrawError
        No call has a peer on this side.
    """
    calls = calls_of(contents)
    found = {name: ratios for name, call in calls.items() if (ratios := ratios_of(call, side))}
    if not found:
        raise NothingToDrawError(f"nothing to draw: no call has a peer {SIDE_TITLES[side]}")
    sizes = sorted({size for ratios in found.values() for size in ratios})
    colours = THEMES[theme]
    names = short_names(calls)
    left = 20 + LETTER_PT * max(len(names[name]) for name in found)
    cell = max(_CELL_PT, (WIDTH_PT - 12 - left) / len(sizes))
    width = max(left + cell * len(sizes) + 12, WIDTH_PT)
    bottom = _TOP + _ROW_PT * len(found)
    last = list(calls.values())[-1]
    title = f"gpucoll's time relative to the best peer's, {SIDE_TITLES[side]}"
    facts = [*types_of(calls[name] for name in found), last.processes, last.where]
    explanation = f"{', '.join(facts)}. Below 1.0 gpucoll is faster."
    with settings():
        figure = blank(colours, width, bottom + _BELOW)
        page = canvas(figure)
        heading(page, colours, title, explanation)
        footing(page, colours, last.origin)
        for row, (name, ratios) in enumerate(found.items()):
            y = _TOP + _ROW_PT * row
            page.text(
                12, y + _ROW_PT / 2, names[name], color=colours.words, verticalalignment="center"
            )
            for column, size in enumerate(sizes):
                if size in ratios:
                    x, ratio = left + cell * column, ratios[size][0]
                    _draw_cell(page, x, y, cell, ratio.value, ratio.low > 1, colours)
        _draw_sizes(page, sizes, left, cell, bottom, colours)
        _draw_legend(page, bottom + 40, colours)
    how = digest_of(heat_map, contents, side, theme)
    return Picture(figure, title, f"{explanation} {in_words(found)}", how)


def ratios_of(call: Call, side: str) -> dict[int, tuple[Ratio, str]]:
    """Return the ratio to the best peer by size in bytes, and the table's name of that peer."""
    found = {}
    for size_bytes, sides in sorted(by_size(call.entries, side).items()):
        peers = [name for name in sides if not is_own(name) and not is_part(name)]
        positive = all(sides[name]["time"] > 0 for name in {*peers, "gpucoll"} & {*sides})
        if positive and (one := ratio_to_best(sides, "gpucoll", peers)) is not None:
            found[size_bytes] = one
    return found


def in_words(found: dict[str, dict[int, tuple[Ratio, str]]]) -> str:
    """Return the median of each call, and where a peer is faster."""
    texts = []
    for name, ratios in found.items():
        median = np.median([ratio.value for ratio, _ in ratios.values()])
        slower = [
            f"{size_label(size)} {ratio.value:.2f} {label_of(peer)}"
            for size, (ratio, peer) in ratios.items()
            if ratio.low > 1
        ]
        texts.append(f"{name}: median {median:.2f}, a peer is faster: {', '.join(slower) or 'no'}.")
    return " ".join(texts)


def _draw_cell(
    page: Axes, x: float, y: float, width: float, ratio: float, framed: bool, theme: Theme
) -> None:
    """Fill a cell and write its ratio; without a frame, a thin edge shows where a white one is."""
    colour = colour_of(ratio)
    inset = _GAP if framed else _GAP / 2
    left, top, right, bottom = x + inset, y + inset, x + width - inset, y + _ROW_PT - inset
    edge, edge_pt = (theme.words, 2.0) if framed else (theme.grid, 0.6)
    corners = [left, right, right, left], [top, top, bottom, bottom]
    page.fill(*corners, facecolor=colour, edgecolor=edge, linewidth=edge_pt, clip_on=False)
    page.text(
        x + width / 2, y + _ROW_PT / 2, f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}",
        horizontalalignment="center", verticalalignment="center",
        color=max(INKS, key=lambda ink: contrast(ink, colour)),
        fontweight="bold" if framed else "normal",
    )  # fmt: skip


def colour_of(ratio: float) -> str:
    """Return the colour of a ratio, on a dark page too: numbers on them are legible."""
    strength = min(abs(math.log(ratio)) / math.log(_FULL), 1.0)
    colours = THEMES["light"]
    return blend(WHITE, colours.slower if ratio > 1 else colours.faster, 0.85 * strength)


def _draw_sizes(
    page: Axes, sizes: list[int], left: float, cell: float, bottom: float, theme: Theme
) -> None:
    """Write sizes below their columns, number above unit."""
    for column, size in enumerate(sizes):
        words = size_label(size).replace(" ", "\n") if size else "none"
        page.text(left + cell * (column + 0.5), bottom + 4, words, color=theme.quiet,
                  horizontalalignment="center", verticalalignment="top")  # fmt: skip


def _draw_legend(page: Axes, y: float, theme: Theme) -> None:
    """Show what colours and frames mean."""
    first, x = "faster", 12.0
    page.text(x, y + _ROW_PT / 2, first, color=theme.quiet, verticalalignment="center")
    x += LETTER_PT * len(first) + 6
    for ratio in _LEGEND:
        _draw_cell(page, x, y, _CELL_PT, ratio, False, theme)
        x += _CELL_PT
    page.text(x + 6, y + _ROW_PT / 2, "slower than the best peer", color=theme.quiet,
              verticalalignment="center")  # fmt: skip
    page.text(12, y + _ROW_PT + LINE_PT,
              "bold in a frame: a peer is faster (95 % interval above 1)",
              color=theme.quiet)  # fmt: skip
