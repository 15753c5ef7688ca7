"""The picture of a few results: bars of gpucoll's time relative to the best peer's."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpucoll.bench.estimates import Ratio
from gpucoll.bench.pictures.heat_map import ratios_of
from gpucoll.bench.pictures.lines import WIDTH_PT
from gpucoll.bench.pictures.panel import BAR_PT, LETTER_PT, LINE_PT, Box, canvas, footing, heading
from gpucoll.bench.pictures.saving import Picture
from gpucoll.bench.pictures.series import (
    Contents,
    NothingToDrawError,
    calls_of,
    digest_of,
    label_of,
)
from gpucoll.bench.pictures.theme import THEMES, blank, settings
from gpucoll.bench.summary import SIDE_TITLES

__all__ = ["Bar", "bar_of", "headline"]

HEADING: Final = "gpucoll's time relative to the best peer's"
_TOP, _BELOW, _LABEL_LETTERS = 76.0, 30.0, 28


@dataclass(frozen=True)
class Bar:
    """One result.

    Attributes
    ----------
    label : str
        What was measured: "all_reduce, 4 B".
    ratio : Ratio
        gpucoll's time over the best peer's, with its 95 % interval.
    peer : str
        That peer, for people.
    """

    label: str
    ratio: Ratio
    peer: str


def bar_of(
    contents: Contents, call: str, size_bytes: int, side: str, label: str | None = None
) -> Bar:
    """Return the bar of one call at one size.

    Raises
    ------
    NothingToDrawError
        It was not measured, or not beside a peer.
    """
    found = calls_of(contents).get(call)
    ratios = ratios_of(found, side) if found else {}
    if size_bytes not in ratios:
        raise NothingToDrawError(
            f"nothing to draw: no {call} of {size_bytes} bytes beside a peer, {SIDE_TITLES[side]}"
        )
    ratio, peer = ratios[size_bytes]
    return Bar(label or call, ratio, label_of(peer))


def headline(
    bars: Sequence[Bar], theme: str = "light", origin: str = "", title: str = HEADING
) -> Picture:
    """Draw a bar for each result, with its interval, a line at 1, and the best peer's name.

    Parameters
    ----------
    bars : sequence of Bar
        From top to bottom.
    theme : str
        A name in `THEMES`.
    origin : str
        The machine and the day.
    title : str
        The heading.

    Raises
    ------
    NothingToDrawError
        There are no bars.
    """
    if not bars:
        raise NothingToDrawError("nothing to draw: there are no bars")
    colours = THEMES[theme]
    labels = [textwrap.wrap(bar.label, _LABEL_LETTERS) for bar in bars]
    row_pt = 12 + LINE_PT * max(map(len, labels))
    height = _TOP + row_pt * len(bars) + _BELOW
    left = 20 + LETTER_PT * max(len(line) for label in labels for line in label)
    texts = [f"{bar.ratio.value:.2f} of {bar.peer}" for bar in bars]
    right = 24 + LETTER_PT * max(map(len, texts))
    explanation = "Shorter is better. Beyond the line at 1 a peer is faster."
    with settings():
        figure = blank(colours, WIDTH_PT, height)
        page = canvas(figure)
        heading(page, colours, title, explanation)
        footing(page, colours, f"With 95 % intervals. {origin}".strip())
        axes = Box(left, _TOP, WIDTH_PT - left - right, row_pt * len(bars)).axes(figure)
        axes.set_axis_off()
        axes.set_xlim(0, max(1.1, *(1.03 * bar.ratio.high for bar in bars)))
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.axvline(1.0, color=colours.words, linewidth=1.2)
        axes.annotate(
            "best peer", (1.0, -0.5), (0, 4), textcoords="offset points", color=colours.quiet,
            horizontalalignment="center", annotation_clip=False,
        )  # fmt: skip
        for row, (bar, text) in enumerate(zip(bars, texts, strict=True)):
            slower = bar.ratio.value > 1
            axes.barh(row, bar.ratio.value, height=0.62 * BAR_PT / row_pt,
                      color=colours.slower if slower else colours.faster)  # fmt: skip
            axes.plot([bar.ratio.low, bar.ratio.high], [row, row], color=colours.words)
            y, weight = _TOP + row_pt * (row + 0.5), "bold" if slower else "normal"
            for x, words in ((12, "\n".join(labels[row])), (WIDTH_PT - right + 12, text)):
                page.text(x, y, words, color=colours.words, verticalalignment="center",
                          fontweight=weight)  # fmt: skip
    words = " ".join(f"{bar.label}: {text}." for bar, text in zip(bars, texts, strict=True))
    how = digest_of(headline, bars, theme, origin, title)
    return Picture(figure, title, f"{explanation} {words}", how)
