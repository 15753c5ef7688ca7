"""A schedule as text: the steps of a rank, its cost, and its predicted time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpucoll.algorithms.cost import Cost
from gpucoll.algorithms.steps import NOBODY, Span, Step, span_numbers
from gpucoll.wording import rank_of
from schedules.hierarchy import Prediction

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(size_bytes: float) -> str:
    """Return "1.5 MiB", "10 B"."""
    unit = 0
    while size_bytes >= 1024 and unit + 1 < len(_UNITS):
        size_bytes /= 1024
        unit += 1
    return f"{size_bytes:.4g} {_UNITS[unit]}"


def time_text(seconds: float) -> str:
    """Return "12.7 ms", "50 us", "1.2 s"."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def counted(count: int, noun: str) -> str:
    """Return "1 link", "2 links"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def cost_line(cost: Cost) -> str:
    """Return a cost as a line of words."""
    return (
        f"{counted(cost.steps, 'step')}, {size_text(cost.sent_bytes)} sent, "
        f"{size_text(cost.received_bytes)} received, {counted(cost.links, 'link')}"
    )


def blocks_text(parts: Sequence[Span]) -> str:
    """Return "block 3", "blocks 0-3,7"."""
    several = len(parts) > 1 or any(span.count > 1 for span in parts)
    return f"block{'s' if several else ''} {span_numbers(parts)}"


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return rows of cells as lines; the columns numbered in `right` are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def schedule_lines(rank: int, size: int, steps: Sequence[Step]) -> list[str]:
    """Return the steps of a rank as a table."""
    title = rank_of(rank, size)
    if not steps:
        return [f"{title}: nothing to do"]
    rows = [("step", "sends", "to", "", "receives", "from", "")]
    for number, step in enumerate(steps):
        sends, receives = step.send_to != NOBODY, step.receive_from != NOBODY
        rows.append(
            (
                str(number),
                blocks_text(step.send) if sends else "-",
                str(step.send_to) if sends else "-",
                "as it comes" if step.forwards else "",
                blocks_text(step.receive) if receives else "-",
                str(step.receive_from) if receives else "-",
                ("reduces" if step.reduces else "replaces") if receives else "",
            )
        )
    return [title, *columns(rows, right=(0, 2, 5))]


def cost_lines(rows: Sequence[tuple[str, Cost, Prediction | None]]) -> list[str]:
    """Return costs, and predicted times if known, as a table."""
    cells = [("", "steps", "sent", "received", "links", "predicted")]
    cells += [
        (
            name,
            str(cost.steps),
            size_text(cost.sent_bytes),
            size_text(cost.received_bytes),
            str(cost.links),
            "" if prediction is None else time_text(prediction.total_s),
        )
        for name, cost, prediction in rows
    ]
    return columns(cells, right=(1, 2, 3, 4, 5))
