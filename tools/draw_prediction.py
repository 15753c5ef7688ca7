"""Predicted times of all_reduce up to 10,000 ranks, with what was measured.

The picture of docs/prediction.md, for `tools/draw_pictures.py`. The fit uses every case that the
processors do not bind (`tools/measure_prediction.py`).
"""

from __future__ import annotations

import re
from typing import Any

from measure_prediction import is_bound_by_cpus

from gpucoll.bench.pictures.panel import Box, canvas, footing, heading
from gpucoll.bench.pictures.saving import Picture
from gpucoll.bench.pictures.scales import size_label
from gpucoll.bench.pictures.theme import THEMES, Theme, blank, settings
from gpucoll.bench.predict.composition import Case
from gpucoll.bench.predict.kept import observed_in
from gpucoll.bench.predict.prediction import Predicted, learn, predict

WIDTH_PT, HEIGHT_PT = 600.0, 345.0
RANKS = (2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 10_000)


def predictions(content: dict[str, Any]) -> tuple[list[list[Predicted]], dict[Case, float]]:
    """Return the predictions of three sizes, and the measured times in seconds."""
    rows = [row for row in content["results"] if not is_bound_by_cpus(row)]
    seen = observed_in({**content, "results": rows})
    known = learn(seen)
    sizes = sorted({one.case.size_bytes for one in seen})
    chosen = (sizes[0], sizes[len(sizes) // 2], sizes[-1])
    found = [[predict(Case(size, ranks, ranks), known) for ranks in RANKS] for size in chosen]
    return found, {one.case: one.time_s for one in seen}


def drawn(content: dict[str, Any], theme: str) -> Picture:
    """Return the picture of a result for one theme."""
    found, measured = predictions(content)
    rate = re.findall(r"(\d+)mbit", content["environment"]["network"])[0]
    network = f"Fitted to namespaces of {rate} Mbit/s"
    colours = THEMES[theme]
    with settings():
        figure = blank(colours, WIDTH_PT, HEIGHT_PT)
        axes = Box(66.0, 66.0, WIDTH_PT - 66 - 34, HEIGHT_PT - 66 - 64).axes(figure)
        style(axes, colours)
        for line, colour in zip(found, colours.own, strict=False):
            size, ranks = line[0].case.size_bytes, [one.case.ranks for one in line]
            low, high = ([1e3 * getattr(one, side) for one in line] for side in ("low_s", "high_s"))
            axes.fill_between(ranks, low, high, color=colour, alpha=0.2, linewidth=0)
            times = [1e3 * one.time_s for one in line]
            axes.plot(ranks, times, color=colour, linewidth=2.0, linestyle=(0, (5, 2)))
            axes.annotate(size_label(size), (ranks[0], times[0]), (2, 26),
                          textcoords="offset points", color=colour)  # fmt: skip
            points = {
                case.ranks: time for case, time in measured.items() if case.size_bytes == size
            }
            axes.plot(list(points), [1e3 * time for time in points.values()], "o", color=colour,
                      markersize=6, markeredgecolor=colours.words)  # fmt: skip
        most = max(case.ranks for case in measured)
        axes.axvspan(most, RANKS[-1] * 1.1, color=colours.grid, alpha=0.25, linewidth=0)
        axes.text(most * 1.3, 0.97, "PREDICTED: nothing was measured here", color=colours.words,
                  transform=axes.get_xaxis_transform(), verticalalignment="top")  # fmt: skip
        page = canvas(figure)
        title = "all_reduce up to 10,000 ranks: a prediction, a lower bound"
        text = (
            f"Dots: measured, to {most} ranks. Dashes and 95 % bands: simulated, no contention, "
            "no noise."
        )
        heading(page, colours, title, text)
        page.text(12, 59, "time, ms", color=colours.quiet)
        footing(page, colours, f"One rank per host. {network}.")
    return Picture(figure, title, text, "")


def style(axes: Any, colours: Theme) -> None:
    """Give the axes their scales, ticks and colours."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(1.8, RANKS[-1] * 1.1)
    ticks = (2, 4, 16, 64, 256, 1024, 10_000)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(_none())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_xlabel("ranks", color=colours.quiet)
    axes.set_facecolor("none")
    axes.tick_params(colors=colours.quiet, which="both", length=0)
    axes.grid(color=colours.grid, linewidth=0.8)
    for side in axes.spines.values():
        side.set_visible(False)


def _none() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
