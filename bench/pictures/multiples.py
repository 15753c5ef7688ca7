"""Many small pictures in one: a panel for each call, side and quantity that was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from gpucoll.bench.pictures.lines import WIDTH_PT, described
from gpucoll.bench.pictures.panel import (
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
    QUANTITIES,
    Call,
    Contents,
    NothingToDrawError,
    Series,
    calls_of,
    digest,
    fullest_side,
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
_ABOVE, _BELOW = 22.0, 28.0  # each panel: for its title, and for its ticks


@dataclass(frozen=True)
class Panel:
    """One of the pictures; `text` formats its values."""

    title: str
    series: list[Series]
    text: Callable[[float], str]
    in_words: str


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
    how = digest(contents, picture="small_multiples", theme=theme)
    return _grid(
        list(calls.values()), panels, 3, "Time of one call", "Lower is better.", theme, how
    )


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
    panels: list[Panel | None] = []
    for title, name in short_names(calls).items():
        sides = SIDES if len(calls) == 1 else [fullest_side(calls[title])]
        panels += _panels(calls[title], name, sides, list(QUANTITIES))
        if not any(panel is None for panel in panels) and len(panels) % 2:
            panels.append(None)  # each call begins at the left
    how = digest(contents, picture="overview", theme=theme)
    has_rates = any(one.series(side, "bus_bw") for one in calls.values() for side in SIDES)
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
                title = ", ".join(filter(None, [name, call.name_of_side(side)]))
                title += f": {QUANTITIES[quantity]}" if len(quantities) > 1 else ""
                words = f"{title}. {described(series, quantity)}"
                yield Panel(title, series, partial(text_of, quantity=quantity), words)
    for title, series in call.figures() if len(quantities) > 1 else ():
        yield Panel(f"{name}: {title}", series, "{:.3g}".format, f"{name}: {title}.")


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
    pitch = _ABOVE + plot_pt + _BELOW
    entries = {one.title: one for panel in shown for one in panel.series if has_sizes([one])}
    places = list(_legend_places(list(entries.values())))
    top = _TOP + (places[-1][2] + LINE_PT if places else 0)
    height = top + -(-len(panels) // columns) * pitch + _BOTTOM
    title = calls[0].name if len(calls) == 1 else several
    explanation = f"{', '.join([*types_of(calls), calls[-1].where])}. {better}"
    with settings():
        figure = blank(colours, WIDTH_PT, height)
        page = canvas(figure)
        heading(page, colours, title, explanation)
        footing(page, colours, f"With 95 % intervals. {calls[-1].origin}")
        for one, x, y in places:
            _legend_entry(page, one, x, _TOP + y, colours)
        for number, panel in enumerate(panels):
            if panel is not None:
                width = (WIDTH_PT - 12) / columns
                left, y = number % columns * width, top + number // columns * pitch
                page.text(left + 12, y + 14, panel.title, color=colours.words, fontweight="bold")
                box = Box(left, y + _ABOVE, width, plot_pt)
                _draw_panel(figure, box, panel, colours)
    words = " ".join([explanation, *(panel.in_words for panel in shown)])
    return Picture(figure, title, words, how)


def _draw_panel(figure: Figure, box: Box, panel: Panel, theme: Theme) -> None:
    if has_sizes(panel.series):
        left = 54.0 if box.width < 250 else 70.0
        axes = Box(box.left + left, box.top, box.width - left, box.height).axes(figure)
        draw_lines(axes, panel.series, theme, panel.text)
        return
    label = 14 + LETTER_PT * max(len(one.label) for one in panel.series)
    axes = Box(box.left + label, box.top, box.width - label - 58, box.height).axes(figure)
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
