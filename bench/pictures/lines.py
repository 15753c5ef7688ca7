"""The picture of one call: its time or bandwidth over the size, each line named at its end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from gpucoll.bench.pictures.panel import (
    BAR_PT,
    LETTER_PT,
    Box,
    canvas,
    draw_bars,
    draw_lines,
    end_text,
    footing,
    has_sizes,
    heading,
    label_ends,
    label_start,
)
from gpucoll.bench.pictures.saving import Picture
from gpucoll.bench.pictures.scales import size_label
from gpucoll.bench.pictures.series import (
    QUANTITIES,
    Contents,
    NothingToDrawError,
    Series,
    calls_of,
    digest_of,
    only_size,
    text_of,
)
from gpucoll.bench.pictures.theme import THEMES, blank, settings
from gpucoll.bench.summary import SIDE_TITLES

__all__ = ["lines"]

WIDTH_PT: Final = 600.0
HEIGHT_PT: Final = 315.0
_LEFT, _TOP, _BOTTOM = 70.0, 66.0, 56.0  # around the area with the lines


def lines(
    contents: Contents,
    call: str,
    side: str,
    quantity: str = "time",
    theme: str = "light",
    leave_out: Sequence[str] = (),
) -> Picture:
    """Draw one call over its sizes: gpucoll in colour, peers in grey, the memory limit dashed.

    Bands are the 95 % intervals of the slowest rank's median over the rounds. A call without
    sizes, as barrier, or with a single one gets bars.

    Parameters
    ----------
    contents : dict or sequence of dict
        What ``gpucoll-bench --json`` wrote.
    call : str
        A title of `calls_of`, such as ``all_reduce float32 sum``.
    side : str
        "out_of_place" or "in_place".
    quantity : str
        "time" or "bus_bw".
    theme : str
        A name in `THEMES`.
    leave_out : sequence of str
        Names of the table that are not drawn: "gpucoll symmetric", "limit".

    Raises
    ------
    NothingToDrawError
        There is no such call, or it has no such value on this side.
    """
    calls, colours = calls_of(contents), THEMES[theme]
    if call not in calls:
        raise NothingToDrawError(f"nothing to draw: no {call!r} among {', '.join(calls)}")
    found = calls[call]
    series = [one for one in found.series(side, quantity) if one.title not in leave_out]
    if not any(one.kind != "limit" for one in series):
        raise NothingToDrawError(
            f"nothing to draw: {call} has no {QUANTITIES[quantity]} {SIDE_TITLES[side]}"
        )
    text = partial(text_of, quantity=quantity)
    sized = has_sizes(series)
    longest = max(len(end_text(one, text)) for one in series)
    left, right = (_LEFT, 24 + LETTER_PT * longest) if sized else (110.0, 90.0)
    height = HEIGHT_PT - _TOP - _BOTTOM if sized else BAR_PT * len(series)
    with settings():
        figure = blank(colours, WIDTH_PT, height + _TOP + (_BOTTOM if sized else _BOTTOM / 2))
        axes = Box(left, _TOP, WIDTH_PT - left - right, height).axes(figure)
        if sized:
            draw_lines(axes, series, colours, text)
            label_ends(axes, series, colours, text)
            if series[0].kind == "own" and len(series[0].points) > 1:
                label_start(axes, series[0], colours, text, below=quantity == "time")
            axes.set_xlabel("size of the array", color=colours.quiet, labelpad=6)
        else:
            draw_bars(axes, series, colours, text)
        title = f"{found.name} {found.processes}"
        only = "" if sized else only_size(series)
        facts = [found.details, only, found.name_of_side(side), found.where]
        explanation = ", ".join(filter(None, facts))
        better = "Lower" if quantity == "time" else "Higher"
        page = canvas(figure)
        heading(page, colours, title, f"{explanation}. {better} is better.")
        page.text(12, _TOP - 7, QUANTITIES[quantity], color=colours.quiet)
        footing(page, colours, f"With 95 % intervals. {found.origin}")
    return Picture(
        figure,
        title,
        f"{QUANTITIES[quantity]}. {explanation}. {described(series, quantity)}",
        digest_of(lines, contents, call, side, quantity, theme, leave_out),
    )


def described(series: Sequence[Series], quantity: str) -> str:
    """Return the first and the last value of each library, in words."""
    texts = []
    for one in series:
        ends = dict.fromkeys((one.points[0], one.points[-1]))
        values = [
            f"{text_of(point.value, quantity)}"
            + (f" at {size_label(point.size_bytes)}" if point.size_bytes else "")
            for point in ends
        ]
        texts.append(f"{one.label}: {', '.join(values)}.")
    return " ".join(texts)
