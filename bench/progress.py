"""What is measured, how far the run is and how long it still takes, on standard error.

In one line of a terminal, which is erased before each line of the table. Without a terminal, a
line every half minute if the user asks for it.
"""

from __future__ import annotations

import math
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TextIO

from gpucoll.bench.time_left import Bounds, Done, Step, TimeLeft, text_of
from gpucoll.terminal import ERASE_LINE, columns, is_terminal

__all__ = ["Progress", "way_to_show"]

WIDTH = 16
WIDE = 80
"""Columns from which there is room for the bar."""
ROOM = 3
"""Columns that stay empty: for the cursor, and for the ``^C`` that a terminal writes behind it."""
INTERVAL_S = 0.1  # drawing takes CPU time, which the ranks may need
LOG_INTERVAL_S = 30.0


def way_to_show(is_asked: bool, is_table: bool) -> str:
    """Return how to show progress: "line" on a terminal, "log", or an empty text for not at all.

    If stdout is a pipe, its reader may write the table to the same terminal at any time, so that no
    line there could be erased.

    Parameters
    ----------
    is_asked : bool
        Whether the user wants progress without a terminal, too.
    is_table : bool
        Whether lines are written to stdout during the run.
    """
    try:
        is_piped = is_table and stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)
        if is_terminal(sys.stderr.fileno()) and not is_piped:
            return "line"
    except (AttributeError, OSError, ValueError):  # no stream, a closed one, or another object
        pass
    return "log" if is_asked else ""


class Progress:
    """Shows a run's steps. A context, which erases the line at its end.

    Parameters
    ----------
    way : str
        How to show: see `way_to_show`.
    stream : text stream
        Where to draw; default: standard error.
    clock : callable
        Returns the time, in seconds.
    """

    def __init__(
        self, way: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._way = way
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._drawn_at = clock() if way == "log" else -INTERVAL_S
        self._is_drawn = False
        self._steps: Sequence[Step] = ()
        self._number = 0
        self._what = ""
        self._time_left = TimeLeft(lambda call_s: call_s)
        self._later = Bounds(0.0, math.inf)
        self._begun_s = self._sampling_s = clock()
        self._round, self._rounds = 0, 1

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_drawn = self._way == "line"  # erase a ^C, too
        self.clear()

    def plan(self, steps: Sequence[Step], sampling: Callable[[float], float]) -> None:
        """Say what the run consists of; `sampling` is that of `TimeLeft`."""
        self._steps = steps
        self._time_left = TimeLeft(sampling)

    def begin(self, what: str, rounds: int) -> None:
        """Begin the next step, which has this many rounds."""
        self._what, self._rounds, self._round = what, rounds, 0
        self._begun_s = self._sampling_s = self._clock()
        self._later = self._time_left.of_steps(self._steps[self._number + 1 :])

    def end_round(self, number: int) -> None:
        """Note that this many rounds of the step are complete; 0 when the first one begins."""
        self._round = number
        if not number:
            self._sampling_s = self._clock()

    def end(self, calls_s: Sequence[float] = ()) -> None:
        """End the step; `calls_s` are the seconds of a call in each of its cases."""
        now = self._clock()
        preparing_s = self._sampling_s - self._begun_s
        step = self._steps[self._number]
        self._time_left.add(Done(step, now - self._begun_s, preparing_s, calls_s))
        self._number += 1
        self.clear()

    def left_s(self) -> float | None:
        """Return an estimate of the remaining seconds, if there is a basis for one."""
        if self._number >= len(self._steps):
            return None
        now = self._clock()
        if self._round:
            low = high = (now - self._sampling_s) / self._round * (self._rounds - self._round)
        else:
            elapsed_s = now - self._begun_s
            step = self._time_left.of_step(self._steps[self._number])
            low, high = (max(bound - elapsed_s, 0.0) for bound in step)
        return Bounds(low + self._later.low, high + self._later.high).estimate()

    def show(self, detail: str) -> None:
        """Show what happens now, unless something was shown a moment ago."""
        if not self._way:
            return
        now = self._clock()
        if now - self._drawn_at < (INTERVAL_S if self._way == "line" else LOG_INTERVAL_S):
            return
        self._drawn_at = now
        if self._way == "line":
            width = columns()
            text = f"{self.bar() if width >= WIDE else ''}{self.text(detail)}"
            self._write(f"{ERASE_LINE}{text[: max(width - ROOM, 0)]}")
            self._is_drawn = True
        else:
            self._write(f"gpucoll-bench: {self.text(detail)}\n")

    def bar(self) -> str:
        """Return the bar: the part of the steps that is complete."""
        if not self._steps:
            return ""
        part = min((self._number + self._round / self._rounds) / len(self._steps), 1.0)
        return f"[{'#' * round(WIDTH * part):<{WIDTH}}] "

    def text(self, detail: str) -> str:
        """Return the text, the most important first, because a narrow terminal shows the start."""
        if not self._what:
            return detail
        left_s = self.left_s()
        left = "" if left_s is None else f", {text_of(left_s)}"
        number = min(self._number + 1, len(self._steps))
        return f"{number}/{len(self._steps)}{left}: {self._what}, {detail}"

    def clear(self) -> None:
        """Erase the line to make room for another."""
        if self._is_drawn:
            self._write(ERASE_LINE)
            self._is_drawn = False
            self._drawn_at = -INTERVAL_S

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
