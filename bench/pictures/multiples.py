"""Many small pictures in one: a panel for each call, side and quantity that was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from gpucoll.bench.pictures.lines import WIDTH_PT, described
from gpucoll.bench.pictures.panel import (
    BAR_PT,
    LETTER_PT,
    LINE_PT,
    Box,
    canvas,
    draw_bars,
    draw_lines,
    footing,
    has_sizes,
    heading,
)
from gpucoll.bench.pictures.saving import Picture
from gpucoll.bench.pictures.series import (
    KINDS,
    QUANTITIES,
    Call,
    Contents,
    NothingToDrawError,
    Series,
    calls_of,
    digest_of,
    fullest_side,
    only_size,
    short_names,
    text_of,
    types_of,
)
from gpucoll.bench.pictures.theme import THEMES, Theme, blank, settings
from gpucoll.bench.results import SIDES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["overview", "small_multiples"]

_TOP, _BOTTOM, _SAMPLE = 54.0, 26.0, 26.0  # the heading, the footing, a line of the legend
_TITLE, _TICKS, _GAP = 22.0, 32.0, 12.0  # of a panel; _GAP is below bars


@dataclass(frozen=True)
class Panel:
    """One of the pictures; `text` formats its values, `quantity` says what they are."""

    title: str
    quantity: str
    series: list[Series]
    text: Callable[[float], str]
    in_words: str

    def height_pt(self, plot_pt: float) -> float:
        """Return its height without title; that of lines is given."""
        return plot_pt + _TICKS if has_sizes(self.series) else BAR_PT * len(self.series) + _GAP


def small_multiples(contents: Contents, theme: str = "light") -> Picture:
    """Draw the time of each call over the size, on the side that has most libraries.

    Lines look as in `lines.lines`; a legend names them. Calls without sizes get bars.

    Parameters
    ----------
    contents : dict or sequence of dict
        What ``gpucoll-bench --json`` wrote.
    theme : str
        A name in `THEMES`.

    Raises
    ------
    NothingToDrawError
        No call has a positive time.
    """
    calls = calls_of(contents)
    panels: list[Panel | None] = []
    for title, name in short_names(calls).items():
        panels += _panels(calls[title], name, [fullest_side(calls[title])], ["time"])
    how = digest_of(small_multiples, contents, theme)
    longest = max((len(panel.title) for panel in panels if panel), default=0)
    columns = 3 if LETTER_PT * longest < WIDTH_PT / 3 - 12 else 2
    several, better = "Time of one call", "Lower is better."
    return _grid(list(calls.values()), panels, columns, several, better, theme, how)


def overview(contents: Contents, theme: str = "print") -> Picture:
    """Draw what was measured: the picture of ``gpucoll-bench --plot``.

    Each call has its time at the left, and its bus bandwidth at the right if it has one. A single
    call is drawn on both sides, in place and out of place; several calls on the one that has most
    libraries. Figures of starting and of memory get bars.

    Raises
    ------
    NothingToDrawError
        Nothing has a positive value.
    """
    calls = calls_of(contents)
    has_rates = any(one.series(side, "bus_bw") for one in calls.values() for side in SIDES)
    panels: list[Panel | None] = []
    for title, name in short_names(calls).items():
        sides = SIDES if len(calls) == 1 else [fullest_side(calls[title])]
        panels += _panels(calls[title], name, sides, list(QUANTITIES))
        if has_rates and len(panels) % 2:
            panels.append(None)  # each call begins at the left
    how = digest_of(overview, contents, theme)
    better = "Low times and high bandwidths are good." if has_rates else "Lower is better."
    return _grid(list(calls.values()), panels, 2, "Measured calls", better, theme, how)


def _panels(
    call: Call, name: str, sides: Sequence[str], quantities: Sequence[str]
) -> Iterator[Panel]:
    """Yield the panels of a call that have something to show."""
    for side in sides:
        for quantity in quantities:
            series = call.series(side, quantity)
            if any(one.kind != "limit" for one in series):
                only = "" if has_sizes(series) else only_size(series)
                title = ", ".join(filter(None, [name, call.name_of_side(side)]))
                what = f"{QUANTITIES[quantity]} {only}".strip()
                words = f"{title}, {what}. {described(series, quantity)}"
                yield Panel(title, what, series, partial(text_of, quantity=quantity), words)
    for figure, series in call.figures() if len(quantities) > 1 else ():
        values = [f"{one.label}: {figure.text(one.points[0].value)}." for one in series]
        words = f"{name}, {figure.title}. {' '.join(values)}"
        yield Panel(name, figure.title, series, figure.text, words)


def _grid(
    calls: list[Call],
    panels: list[Panel | None],
    columns: int,
    several: str,
    better: str,
    theme: str,
    how: str,
) -> Picture:
    """Draw panels row by row below a legend."""
    shown = [panel for panel in panels if panel is not None]
    if not shown:
        names = ", ".join(call.title for call in calls)
        raise NothingToDrawError(f"nothing to draw: no value of {names} is positive")
    colours, plot_pt = THEMES[theme], 150.0 if len(shown) <= 4 else 104.0
    rows = [panels[first : first + columns] for first in range(0, len(panels), columns)]
    has_quantity = columns == 2
    above = _TITLE + (LINE_PT + 5) * has_quantity
    heights = [max(one.height_pt(plot_pt) for one in row if one) + above for row in rows]
    entries = {one.title: one for panel in shown if has_sizes(panel.series) for one in panel.series}
    listed = sorted(entries.values(), key=lambda one: KINDS.index(one.kind))
    places = list(_legend_places(listed))
    top = _TOP + (places[-1][2] + LINE_PT if places else 0)
    title = f"{calls[0].name if len(calls) == 1 else several} {calls[-1].processes}"
    explanation = f"{', '.join([*types_of(calls), calls[-1].where])}. {better}"
    with settings():
        figure = blank(colours, WIDTH_PT, top + sum(heights) + _BOTTOM)
        page = canvas(figure)
        heading(page, colours, title, explanation)
        footing(page, colours, f"With 95 % intervals. {calls[-1].origin}")
        for one, x, y in places:
            _legend_entry(page, one, x, _TOP + y, colours)
        width = (WIDTH_PT - 12) / columns
        for row, height in zip(rows, heights, strict=True):
            for column, panel in enumerate(row):
                if panel is not None:
                    x = 12 + column * width
                    fits = LETTER_PT * len(panel.title) < width - 8
                    page.text(x, top + 14, panel.title, color=colours.words,
                              fontweight="bold" if fits else "normal")  # fmt: skip
                    if has_quantity:
                        page.text(x, top + 14 + LINE_PT, panel.quantity, color=colours.quiet)
                    _draw_panel(figure, Box(x - 12, top + above, width, plot_pt), panel, colours)
            top += height
    words = " ".join([explanation, *(panel.in_words for panel in shown)])
    return Picture(figure, title, words, how)


def _draw_panel(figure: Figure, box: Box, panel: Panel, theme: Theme) -> None:
    if has_sizes(panel.series):
        left = 54.0 if box.width < 250 else 70.0
        axes = Box(box.left + left, box.top, box.width - left - 8, box.height).axes(figure)
        draw_lines(axes, panel.series, theme, panel.text)
        return
    label = 14 + LETTER_PT * max(len(one.label) for one in panel.series)
    height = BAR_PT * len(panel.series)
    axes = Box(box.left + label, box.top, box.width - label - 58, height).axes(figure)
    draw_bars(axes, panel.series, theme, panel.text)


def _legend_places(entries: list[Series]) -> Iterator[tuple[Series, float, float]]:
    """Yield each entry of the legend with its place below the heading."""
    x, y = 12.0, LINE_PT / 2
    for one in entries:
        width = _SAMPLE + 6 + LETTER_PT * len(one.label) + 10
        if x + width > WIDTH_PT and x > 12:
            x, y = 12.0, y + LINE_PT + 2
        yield one, x, y
        x += width


def _legend_entry(page: Axes, one: Series, x: float, y: float, theme: Theme) -> None:
    look = theme.look(one.title, one.kind)
    page.plot([x, x + _SAMPLE], [y, y], color=look.colour, linestyle=look.dashes,
              linewidth=look.width_pt)  # fmt: skip
    page.plot([x + _SAMPLE / 2], [y], color=look.colour, marker=look.marker, markersize=4.5)
    page.text(
        x + _SAMPLE + 6, y, one.label, verticalalignment="center",
        color=look.colour if one.kind == "own" else theme.quiet,
        fontweight="bold" if one.title == "gpucoll" else "normal",
    )  # fmt: skip
