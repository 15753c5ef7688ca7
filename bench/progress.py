"""A progress bar, on a terminal only."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from gpucoll.terminal import ERASE_LINE

__all__ = ["Progress"]

WIDTH = 24
INTERVAL_S = 0.1  # drawing takes CPU time, which the ranks may need


class Progress:
    """Draws ``[####    ] 40 % text`` over itself.

    Silent unless both the bar and the table go to a terminal: in a pipe the bar would clutter the
    lines, and if the table goes to a file nobody is watching.

    Parameters
    ----------
    total : int
        Number of steps.
    stream : text stream
        Where to draw; default: standard error.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.shown = self.stream.isatty() and sys.stdout.isatty()
        self.total = max(total, 1)
        self.done = 0
        self._drawn_at = 0.0

    def step(self, text: str, steps: int = 1) -> None:
        """Count `steps` as done, and show `text`, which names the next step."""
        self.done += steps
        now = time.monotonic()
        if self.shown and now - self._drawn_at >= INTERVAL_S:
            self._drawn_at = now
            part = min(self.done / self.total, 1.0)
            bar = "#" * round(WIDTH * part)
            self.stream.write(f"{ERASE_LINE}[{bar:<{WIDTH}}] {100 * part:3.0f} % {text}")
            self.stream.flush()

    def clear(self) -> None:
        """Erase the bar to make room for a line of the table."""
        if self.shown and self._drawn_at:
            self.stream.write(ERASE_LINE)
            self.stream.flush()
            self._drawn_at = 0.0
