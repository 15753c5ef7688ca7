"""The live screen of `gpucoll top`: what is shown, drawn by rich, and the keys."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Group
from rich.text import Text

from gpucoll.observe.rates import times_by_call
from gpucoll.observe.sampler import RankRow, Snapshot
from gpucoll.observe.stacks import Stack, read_stack
from gpucoll.observe.table import NOTE, Table, of_bytes, of_number, of_share, of_time, sort_rows

__all__ = ["Keyboard", "View"]

WORST = "bold yellow"
_WORST_FROM = 0.05
"""A rank that makes the others wait for a smaller share of the time is not highlighted."""
_DIM = "dim"

# --- the terminal ---------------------------------------------------------------------------------

_KEY = re.compile(rb"\x1b(?:\[[0-9;]*[~A-Za-z]|O[A-Z])|.", re.DOTALL)
_NAMES = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"k": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"j": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1b[1~": "home",
    b"\x1b[F": "end",
    b"\x1b[4~": "end",
    b"\r": "enter",
    b"\n": "enter",
    b"\x1b": "back",
    b"\x7f": "back",
    b"\x1b[D": "back",
    b" ": "p",
}


class Keyboard:
    """Reads keys one by one, without echo; restores the terminal at the end.

    SIGTERM raises SystemExit meanwhile, so that all is restored. Ctrl-Z and a new size of the
    terminal are told as keys: ``"suspend"``, ``"resize"``.
    """

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._signals: list[str] = []
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Keyboard:
        self.enter()
        handled: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
            signal.SIGTERM: _end,
            signal.SIGWINCH: lambda *_: self._signals.append("resize"),
            signal.SIGTSTP: lambda *_: self._signals.append("suspend"),
        }
        self._handlers = {which: signal.signal(which, each) for which, each in handled.items()}
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(-1)
        for which, handler in self._handlers.items():
            signal.signal(which, handler)
        self.leave()
        os.close(self._woken)
        os.close(self._wake)

    def enter(self) -> None:
        """Read keys without Enter and without echo."""
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)

    def leave(self) -> None:
        """Restore the terminal."""
        if self._fd is not None and self._before:
            termios.tcsetattr(self._fd, termios.TCSANOW, self._before)

    def keys(self, timeout_s: float) -> list[str]:
        """Return the keys that were pressed; wait for one, or as long as told.

        Where the terminal has gone, that is ``"q"``.
        """
        sources = [self._woken] if self._fd is None else [self._woken, self._fd]
        ready, _, _ = select.select(sources, [], [], max(timeout_s, 0))
        found: list[str] = []
        if self._woken in ready:
            os.read(self._woken, 4096)
            found, self._signals = self._signals, []
        if self._fd is not None and self._fd in ready:
            try:
                pressed = os.read(self._fd, 4096)
            except OSError:
                pressed = b""
            found += [
                _NAMES.get(key, key.decode(errors="replace")) for key in _KEY.findall(pressed)
            ]
            found += [] if pressed else ["q"]
        return found


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


# --- what is shown --------------------------------------------------------------------------------


@dataclass
class View:
    """What the user has chosen to see, and its lines.

    Attributes
    ----------
    sort, is_reversed : str, bool
        The column by which ranks are sorted.
    is_paused : bool
        Whether the numbers stand still.
    pid : int or None
        The process whose rank is shown alone; None: all ranks.
    """

    sort: str = "rank"
    is_reversed: bool = False
    is_paused: bool = False
    pid: int | None = None

    def __post_init__(self) -> None:
        self._chosen: int | None = None  # the process under the cursor
        self._first = 0  # the first row that is visible
        self._page = 1
        self._rows: list[RankRow] = []
        self._stack = (0, Stack())  # of which process
        self._reader: threading.Thread | None = None

    def press(self, key: str) -> bool:
        """Do what a key says; return whether to go on."""
        if key == "q":
            return False
        names = list(self._table.columns) if self._rows else []
        if key in ("s", ">", "<") and names:
            order = [each.name for each in names]
            step = -1 if key == "<" else 1
            at = order.index(self.sort) if self.sort in order else 0
            self.sort, self.is_reversed = order[(at + step) % len(order)], False
        elif key == "r":
            self.is_reversed = not self.is_reversed
        elif key == "p":
            self.is_paused = not self.is_paused
        elif key == "back" or (key == "enter" and self.pid is not None):
            self.pid = None
        elif key == "enter" and self._chosen is not None:
            self.pid = self._chosen
            self._stack = (0, Stack())
        elif self.pid is None and self._rows:
            self._move(key)
        return True

    def _move(self, key: str) -> None:
        pids = [row.pid for row in self._rows]
        at = pids.index(self._chosen) if self._chosen in pids else -1
        steps = {"up": -1, "down": 1, "page up": -self._page, "page down": self._page}
        ends = {"home": 0, "end": len(pids) - 1}
        if key in steps:
            at = min(max(at + steps[key], 0), len(pids) - 1)
        elif key in ends:
            at = ends[key]
        else:
            return
        self._chosen = pids[at]

    def draw(
        self,
        shown: Snapshot,
        calls_of: Callable[[int], npt.NDArray[np.void]],
        width: int,
        height: int,
    ) -> Group:
        """Return the lines of a screen."""
        self._table = Table(shown, width)
        self._rows = sort_rows(shown.rows, self.sort, self.is_reversed)
        chosen = next((row for row in shown.rows if row.pid == self.pid), None)
        if chosen is None:
            self.pid = None
            lines = self._all_ranks(height)
        else:
            lines = list(self._one_rank(chosen, calls_of(chosen.pid)))
        lines = lines[: height - 1]
        lines += [Text()] * (height - 1 - len(lines))
        for line in lines:
            line.truncate(width)
        return Group(*lines, self._footer(width, chosen is not None))

    def _all_ranks(self, height: int) -> list[Text]:
        table, shown = self._table, self._table.shown
        is_small = height < 16
        most = 1 if is_small else max(height // 5, 3)
        below = [Text(line) for line in table.communicators(most)]
        if most > 1:
            below[0].stylize("bold")
        if shown.is_sampled:
            below.append(Text(NOTE, _DIM))
        headings = table.headings()[1:] if is_small else table.headings()
        above = [self._title(), *self._headings(headings)]
        if not is_small:
            above.insert(1, Text())
            below.insert(0, Text())
        self._page = max(height - 1 - len(above) - len(below), 1)
        return [*above, *self._visible_rows(), *below]

    def _title(self) -> Text:
        title = Text().append("gpucoll top  ", "bold")
        if self.is_paused:
            title.append("paused  ", WORST)
        return title.append(self._table.title())

    def _headings(self, lines: list[str]) -> Iterator[Text]:
        texts = [Text(line, "bold") for line in lines]
        texts[-1].stylize("underline", *self._table.place(self.sort))
        yield from texts

    def _visible_rows(self) -> Iterator[Text]:
        pids = [row.pid for row in self._rows]
        at = pids.index(self._chosen) if self._chosen in pids else None
        most = max(len(pids) - self._page, 0)
        if at is not None:  # the cursor stays visible
            self._first = min(max(self._first, at - self._page + 1), at)
        self._first = min(self._first, most)
        worst = max(self._rows, key=lambda row: row.held_up, default=None)
        for row in self._rows[self._first : self._first + self._page]:
            text = Text(self._table.row(row))
            if row is worst and row.held_up >= _WORST_FROM:
                text.stylize(WORST)
            if row.pid == self._chosen:
                text.stylize("reverse")
            yield text

    def _footer(self, width: int, is_one: bool) -> Text:
        keys = [("q", "quit")]
        if is_one:
            keys += [("Esc", "all ranks"), ("p", "go on" if self.is_paused else "pause")]
        else:
            keys += [
                ("s", "sort"),
                ("r", "reverse"),
                ("p", "go on" if self.is_paused else "pause"),
                ("Up/Down", "choose"),
                ("Enter", "details"),
            ]
        text = Text(no_wrap=True)
        for key, meaning in keys:
            if len(text) + len(key) + len(meaning) + 3 <= width:
                text.append(key, "bold").append(f" {meaning}  ", _DIM)
        visible = f"{self._first + 1}-{self._first + self._page} of {len(self._rows)}"
        if self._page < len(self._rows) and not is_one and len(text) + len(visible) <= width:
            text.append(visible, _DIM)
        return text

    # --- one rank ---------------------------------------------------------------------------------

    def _one_rank(self, row: RankRow, calls: npt.NDArray[np.void]) -> Iterator[Text]:
        title = Text().append(f"rank {row.rank}  ", "bold")
        if self.is_paused:
            title.append("paused  ", WORST)
        yield title.append(f"process {row.pid}: {row.state}")
        yield Text(
            f"{of_number(row.calls_per_s)} calls/s, {row.bytes_per_s / 1e9:.2f} GB/s; "
            f"in calls {of_share(row.in_calls)}, waits {of_share(row.waiting)}, "
            f"makes wait {of_share(row.held_up)}; CPU {row.cpu:.0%}, {of_bytes(row.rss_bytes)}"
        )
        yield Text()
        yield Text(
            f"{f'its last {len(calls)} calls':24}{'size':>10}{'count':>8}{'p50':>10}{'p99':>10}",
            "bold",
        )
        for each in times_by_call(calls)[:8]:
            size = of_bytes(each.size_bytes) if each.size_bytes else "-"
            times = f"{of_time(each.p50_s):>10}{of_time(each.p99_s):>10}"
            yield Text(f"{each.name[:24]:24}{size:>10}{each.count:>8}{times}")
        yield Text()
        yield Text("its stack, the innermost first", "bold")
        pid, stack = self._stack
        if pid != row.pid:
            self._read_stack(row.pid)
            stack = Stack(trouble="is being read")
        yield from (Text(frame) for frame in stack.frames[::-1] or (stack.trouble,))

    def _read_stack(self, pid: int) -> None:
        """Read a stack in a thread: that may take long, and keys must go on."""
        if self._reader is not None and self._reader.is_alive():
            return

        def read() -> None:
            self._stack = pid, read_stack(pid)

        self._reader = threading.Thread(target=read, name="gpucoll-top-stack", daemon=True)
        self._reader.start()
