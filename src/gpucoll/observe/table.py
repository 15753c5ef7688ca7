"""The numbers of `gpucoll top` as lines of aligned text, for the screen and for pipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpucoll.observe.sampler import RankRow, Snapshot

__all__ = [
    "COLUMNS",
    "NOTE",
    "Column",
    "Table",
    "of_bytes",
    "of_number",
    "of_time",
    "plain_lines",
    "sort_rows",
]

NOTE = "More calls than ranks note: calls/s is exact, all else is of the newest calls."
"""Shown if some calls were only counted."""


def of_number(value: float) -> str:
    """Return a number in at most five characters, for example 2.3, 999, 12.3k, 123k."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{value:.{0 if value >= 99.95 else 1}f}{unit}" if value else "0"
        value /= 1000
    return f"{value:.0f}P"


def of_bytes(size_bytes: float) -> str:
    """Return a size in units of 1024, for example 812 B, 130 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1000:
            return (
                f"{size_bytes:.0f} {unit}"
                if size_bytes >= 10 or unit == "B"
                else f"{size_bytes:.1f} {unit}"
            )
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def of_time(seconds: float) -> str:
    """Return a time in microseconds, milliseconds or seconds."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.{0 if seconds * scale >= 100 else 1}f} {unit}"
    return f"{seconds:.2f} s"


def of_share(share: float) -> str:
    """Return a share as percents; a dash for none."""
    return f"{share:.0%}" if share >= 0.005 else "-"


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes
    ----------
    heading : tuple of str
        Its two lines.
    width : int
        Without the gap.
    value : function
        What rows are sorted by.
    text : function
        What is shown.
    need : int
        It is left out on screens that are narrower.
    """

    name: str
    heading: tuple[str, str]
    width: int
    value: Callable[[RankRow], float | str]
    text: Callable[[RankRow], str]
    need: int = 0
    is_left: bool = False


def _gpu(row: RankRow) -> float:
    return row.gpu.busy if row.gpu else -1.0


def _gpu_memory(row: RankRow) -> float:
    return row.gpu.memory_bytes if row.gpu else -1.0


_STATE_WIDTH = 12
COLUMNS = {
    each.name: each
    for each in (
        Column("rank", ("", "rank"), 4, lambda row: row.rank, lambda row: str(row.rank)),
        Column("process", ("", "process"), 7, lambda row: row.pid, lambda row: str(row.pid), 60),
        Column(
            "state",
            ("", "state"),
            _STATE_WIDTH,
            lambda row: row.state,
            lambda row: row.state,
            0,
            True,
        ),
        Column(
            "calls",
            ("", "calls/s"),
            7,
            lambda row: row.calls_per_s,
            lambda row: of_number(row.calls_per_s),
        ),
        Column(
            "bytes",
            ("", "GB/s"),
            5,
            lambda row: row.bytes_per_s,
            lambda row: f"{row.bytes_per_s / 1e9:.2f}" if row.bytes_per_s >= 5e6 else "-",
            50,
        ),
        Column(
            "in-calls",
            ("in", "calls"),
            5,
            lambda row: row.in_calls,
            lambda row: of_share(row.in_calls),
            70,
        ),
        Column(
            "waits", ("", "waits"), 5, lambda row: row.waiting, lambda row: of_share(row.waiting)
        ),
        Column(
            "makes-wait",
            ("makes", "wait"),
            5,
            lambda row: row.held_up,
            lambda row: of_share(row.held_up),
        ),
        Column("cpu", ("", "CPU"), 5, lambda row: row.cpu, lambda row: f"{row.cpu:.0%}", 55),
        Column(
            "rss",
            ("", "RSS"),
            8,
            lambda row: row.rss_bytes,
            lambda row: of_bytes(row.rss_bytes),
            75,
        ),
        Column(
            "gpu", ("", "GPU"), 5, _gpu, lambda row: of_share(row.gpu.busy) if row.gpu else "", 90
        ),
        Column(
            "gpu-memory",
            ("GPU", "memory"),
            8,
            _gpu_memory,
            lambda row: of_bytes(row.gpu.memory_bytes) if row.gpu else "",
            100,
        ),
    )
}


def sort_rows(rows: list[RankRow], name: str, is_reversed: bool = False) -> list[RankRow]:
    """Return rows sorted by a column: texts and ranks upwards, amounts downwards."""
    column = COLUMNS[name]
    downwards = name not in ("rank", "process", "state")
    by_rank = sorted(rows, key=lambda row: row.rank)
    return sorted(by_rank, key=column.value, reverse=downwards != is_reversed)


class Table:
    """The lines of a snapshot at a width."""

    def __init__(self, shown: Snapshot, width: int) -> None:
        self.shown = shown
        has_gpus = any(row.gpu for row in shown.rows)
        self.columns = [
            each
            for each in COLUMNS.values()
            if width >= each.need and (has_gpus or not each.name.startswith("gpu"))
        ]
        fixed = sum(each.width for each in self.columns if not each.is_left)
        count = len(self.columns)
        self.gap = 2 if width >= fixed + 24 + 2 * (count - 1) else 1
        longest = max([_STATE_WIDTH, *(len(row.state) for row in shown.rows)])
        self._state = max(min(longest, width - fixed - self.gap * (count - 1)), 1)

    def _line(self, cells: list[str]) -> str:
        placed = []
        for column, cell in zip(self.columns, cells, strict=True):
            width = self._state if column.is_left else column.width
            cell = cell[:width]
            placed.append(cell.ljust(width) if column.is_left else cell.rjust(width))
        return (" " * self.gap).join(placed)

    def headings(self) -> list[str]:
        """Return the two lines above the rows."""
        return [self._line([each.heading[k] for each in self.columns]) for k in (0, 1)]

    def row(self, row: RankRow) -> str:
        """Return the line of a rank."""
        return self._line([each.text(row) for each in self.columns])

    def place(self, name: str) -> tuple[int, int]:
        """Return where a column begins and ends in a line; (0, 0) if it is left out."""
        at = 0
        for each in self.columns:
            width = self._state if each.is_left else each.width
            if each.name == name:
                return at, at + width
            at += width + self.gap
        return 0, 0

    def communicators(self, most: int | None = None) -> list[str]:
        """Return a heading and a line for each communicator; at most so many lines, if given."""
        every = chosen = self.shown.communicators
        if most is not None and len(every) >= most:  # the largest, and those that wait the longest
            late = sorted(every[1:], key=lambda each: -each.held_up)
            chosen = [*every[:1], *late[: max(most - 3, 0)]]
        rows = [("communicator", "slowest of the last 10 s", "calls/s", "ranks", "last call")]
        for each in chosen:
            slowest = f"rank {each.slowest} made others wait {each.held_up:.0%}"
            size = f", {of_bytes(each.last_bytes)}" if each.last_bytes else ""
            rows.append(
                (
                    each.name,
                    "-" if each.slowest is None else slowest,
                    of_number(each.calls_per_s),
                    str(each.n_ranks),
                    each.last + size,
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{name:{widths[0]}}  {late:{widths[1]}}  {calls:>7}  {ranks:>5}  {last}".rstrip()
            for name, late, calls, ranks, last in rows
        ]
        if len(chosen) < len(every) and most != 1:
            lines.append(f"and {len(every) - len(chosen)} more communicators")
        return lines if most is None or most > 1 else lines[1:]

    def title(self) -> str:
        """Return what the table is of."""
        count = len(self.shown.rows)
        ranks = f"{count} rank{'s' if count != 1 else ''}"
        elsewhere = f", {self.shown.elsewhere} more on other hosts" if self.shown.elsewhere else ""
        others = self.shown.other_jobs
        more = f" ({others} more job{'s' if others > 1 else ''}: gpucoll top PID)" if others else ""
        return f"{ranks} of {self.shown.program}{elsewhere}{more}"


def plain_lines(shown: Snapshot, sort: str, at: str) -> Iterator[str]:
    """Yield a snapshot as text for pipes and logs."""
    table = Table(shown, 1 << 10)
    yield f"{at}  {table.title()}"
    yield from (line.rstrip() for line in table.headings())
    yield from (table.row(row).rstrip() for row in sort_rows(shown.rows, sort))
    yield from table.communicators()
    if shown.is_sampled:
        yield NOTE
