"""One panel: lines over sizes with logarithmic axes, or bars if there is only one size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpucoll.bench.pictures.scales import size_label, size_ticks, spread, value_ticks
from gpucoll.bench.pictures.series import Series
from gpucoll.bench.pictures.theme import FONT_PT, Look, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BAR_PT",
    "LETTER_PT",
    "LINE_PT",
    "Box",
    "canvas",
    "draw_bars",
    "draw_lines",
    "end_text",
    "footing",
    "has_sizes",
    "heading",
    "label_ends",
    "label_start",
]

LINE_PT: Final = 15.0
"""The height of a line of text."""
LETTER_PT: Final = 6.6
"""The mean width of a letter, at most, bold or not."""
BAR_PT: Final = 26.0
"""The height of a bar and the gap to the next."""
_MARKS: Final = 6  # on a line, so that they do not hide it


@dataclass(frozen=True)
class Box:
    """A place in a figure, in points from its upper left corner."""

    left: float
    top: float
    width: float
    height: float

    def axes(self, figure: Figure) -> Axes:
        """Add axes here; where long labels leave no room, they are narrow."""
        width, height = (72 * inches for inches in figure.get_size_inches())
        bottom = height - self.top - self.height
        return figure.add_axes(
            (self.left / width, bottom / height, max(self.width, 1.0) / width, self.height / height)
        )


def canvas(figure: Figure) -> Axes:
    """Return axes over the whole figure, in points from its upper left corner, for words."""
    width, height = (72 * inches for inches in figure.get_size_inches())
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    return axes


def heading(page: Axes, theme: Theme, title: str, explanation: str) -> None:
    """Write a title and a line of explanation at the top of a canvas."""
    page.text(12, 23, title, fontsize=14.0, fontweight="bold", color=theme.words)
    page.text(12, 42, explanation, color=theme.quiet)


def footing(page: Axes, theme: Theme, words: str) -> None:
    """Write where the values come from at the bottom of a canvas."""
    width, height = page.get_xlim()[1], page.get_ylim()[0]
    page.text(width - 12, height - 8, words, color=theme.quiet, horizontalalignment="right")


def has_sizes(series: Sequence[Series]) -> bool:
    """Return whether there are several sizes; if not, there are only bars to draw."""
    return len({point.size_bytes for one in series for point in one.points}) > 1


def draw_lines(
    axes: Axes, series: Sequence[Series], theme: Theme, text: Callable[[float], str]
) -> None:
    """Draw each series with its 95 % band; both axes are logarithmic.

    Parameters
    ----------
    axes : Axes
        Where to draw.
    series : sequence of Series
        At least one, with positive sizes; several sizes in all.
    theme : Theme
        The colours.
    text : callable
        A value -> its text, for the labels of the axis.
    """
    clean(axes, theme)
    sizes = sorted({point.size_bytes for one in series for point in one.points})
    values = [edge for one in series for point in one.points for edge in (point.low, point.high)]
    axes.set_xscale("log")
    axes.set_yscale("log")
    margin = (sizes[-1] / sizes[0]) ** 0.02
    axes.set_xlim(sizes[0] / margin, sizes[-1] * margin)
    least, most = min(values), max(values)
    room = max((most / least) ** 0.09, 1.15)  # for a label below the first point
    axes.set_ylim(least / room, most * room)
    width_pt, height_pt = _size_pt(axes)
    places = size_ticks(sizes, int(width_pt // 56) + 1)
    axes.set_xticks(places, [size_label(size) for size in places])
    low, high = axes.get_ylim()
    low *= (high / low) ** (9 / height_pt)  # a label at the lower edge would touch the sizes
    heights = value_ticks(low, high, int(height_pt // 24) + 1)
    axes.set_yticks(heights, [text(value) for value in heights])
    axes.set_xticks([], minor=True)
    axes.set_yticks([], minor=True)
    axes.grid(axis="y", color=theme.grid, linewidth=0.7)
    for one in reversed(series):  # gpucoll's first one comes last, on top
        _draw_line(axes, one, theme.look(one.title, one.kind))


def _draw_line(axes: Axes, series: Series, look: Look) -> None:
    sizes = [point.size_bytes for point in series.points]
    lows = [point.low for point in series.points]
    highs = [point.high for point in series.points]
    if len(sizes) == 1:
        axes.plot(sizes * 2, [lows[0], highs[0]], color=look.colour, linewidth=look.width_pt)
    else:
        axes.fill_between(sizes, lows, highs, color=look.colour, alpha=0.22, linewidth=0)
    axes.plot(
        sizes,
        [point.value for point in series.points],
        color=look.colour,
        linestyle=look.dashes,
        linewidth=look.width_pt,
        marker=look.marker or ("o" if len(sizes) == 1 else ""),
        markevery=math.ceil(len(sizes) / _MARKS),
        markersize=4.5,
        solid_joinstyle="round",
    )


def label_ends(
    axes: Axes, series: Sequence[Series], theme: Theme, text: Callable[[float], str]
) -> None:
    """Write each library's name and last value to the right of its line."""
    low, high = (math.log(edge) for edge in axes.get_ylim())
    width_pt, height_pt = _size_pt(axes)
    ends = sorted(
        ((math.log(one.points[-1].value) - low) / (high - low) * height_pt, one.title, one)
        for one in series
    )
    for place, (end, _, one) in zip(
        within(spread([end for end, _, _ in ends], LINE_PT), height_pt), ends, strict=True
    ):
        look = theme.look(one.title, one.kind)
        axes.plot(
            [1.0, 1.0 + 9 / width_pt],
            [end / height_pt, place / height_pt],
            transform=axes.transAxes,
            color=look.colour,
            linewidth=0.8,
            clip_on=False,
        )
        axes.text(
            1.0 + 12 / width_pt,
            place / height_pt,
            end_text(one, text),
            transform=axes.transAxes,
            verticalalignment="center",
            color=look.colour if one.kind == "own" else theme.quiet,
            fontweight="bold" if one.title == "gpucoll" else "normal",
        )


def label_start(
    axes: Axes, series: Series, theme: Theme, text: Callable[[float], str], below: bool
) -> None:
    """Write a line's first value next to it."""
    point = series.points[0]
    axes.annotate(
        text(point.value),
        (point.size_bytes, point.value),
        (0, -6 if below else 6),
        textcoords="offset points",
        horizontalalignment="center",
        verticalalignment="top" if below else "bottom",
        color=theme.look(series.title, series.kind).colour,
        fontweight="bold",
    )


def end_text(series: Series, text: Callable[[float], str]) -> str:
    """Return the label at the end of a line."""
    return f"{series.label} {text(series.points[-1].value)}"


def within(places: list[float], height_pt: float) -> list[float]:
    """Return places of labels, moved together so that they end at the edges if they fit."""
    above = max(places[-1] - height_pt, 0)
    below = max(above - places[0], 0) if above else max(-places[0], 0)
    return [place - above + below for place in places]


def draw_bars(
    axes: Axes, series: Sequence[Series], theme: Theme, text: Callable[[float], str]
) -> None:
    """Draw the first value of each series as a bar from 0, with its name, value and interval."""
    clean(axes, theme)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    most = max(one.points[0].high for one in series)
    axes.set_xlim(0, most)
    axes.set_ylim(len(series) - 0.4, -0.6)
    axes.set_yticks(range(len(series)), [one.label for one in series])
    axes.tick_params(axis="y", pad=6)
    for row, one in enumerate(series):
        point, look = one.points[0], theme.look(one.title, one.kind)
        axes.barh(row, point.value, height=0.62, color=look.colour)
        axes.plot([point.low, point.high], [row, row], color=theme.words, linewidth=1.0)
        axes.annotate(
            text(point.value),
            (max(point.high, point.value), row),
            (5, 0),
            textcoords="offset points",
            verticalalignment="center",
            annotation_clip=False,
            color=theme.words,
            fontweight="bold" if one.title == "gpucoll" else "normal",
        )


def clean(axes: Axes, theme: Theme) -> None:
    """Remove the frame and the background, and let words be quiet."""
    axes.patch.set_alpha(0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    axes.tick_params(which="both", length=0, colors=theme.quiet, labelsize=FONT_PT)


def _size_pt(axes: Axes) -> tuple[float, float]:
    box = axes.get_window_extent()  # the figure has 72 dots an inch
    return box.width, box.height
