"""Work that takes long shows itself on stderr: in one line of a terminal, or in a log now and then.

It never stops the work: what cannot be written at once is left out.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from gpucoll import config
from gpucoll.terminal import ERASE_LINE, columns, is_terminal

__all__ = ["WAITING", "Display", "Progress", "is_at_terminal", "say", "show", "show_by"]

QUIET_S = 1.0
"""Work that takes less time shows nothing."""
REDRAW_S = 0.5
EVERY_S = 10.0
"""The time between two lines of a log."""
WRITE_S = 1.0
"""How long a line that stays may wait for room, in a pipe that nobody empties."""
STDERR = 2
WAITING = "gpucoll: waiting for another process, which compiles"

Show = Callable[[str, bool], None]
"""Shows a text, and is told whether it stays; an empty one that stays ends the one before."""


class Display:
    """Shows texts on stderr, which it looks up each time.

    On a terminal, each text replaces the one before, until one stays. In a log, a text that does
    not stay becomes a line if the one before is ten seconds old.

    Parameters
    ----------
    in_place : bool, optional
        Whether to replace texts; by default, if stderr is a terminal.
    clock : callable
        Returns the time, in seconds.
    """

    def __init__(
        self, in_place: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._in_place = in_place
        self._clock = clock
        self._is_drawn = False
        self._next_s = -EVERY_S

    def __call__(self, text: str, stays: bool) -> None:
        """Show a text."""
        descriptor = _descriptor()
        now = self._clock()
        line = f"{text}\n" if text else ""
        if stays:
            line = ERASE_LINE * self._is_drawn + line
            self._is_drawn = False
        elif is_terminal(descriptor) if self._in_place is None else self._in_place:
            line = ERASE_LINE + text[: columns() - 1]
            self._is_drawn = True
        elif now < self._next_s:
            return
        else:
            self._next_s = now + EVERY_S
        if line and _has_room(descriptor, WRITE_S if stays else 0.0):
            # Programs replace sys.stderr, by None or by objects that raise any exception.
            with contextlib.suppress(Exception):
                stream: Any = sys.stderr
                stream.write(line)
                stream.flush()


def _descriptor() -> int:
    """Return the descriptor of stderr; -1 if it has none."""
    try:
        stream: Any = sys.stderr
        return int(stream.fileno())
    except Exception:
        return -1


def _has_room(descriptor: int, limit_s: float) -> bool:
    """Return whether a line can be written without waiting any longer (a pipe: one page)."""
    if descriptor < 0:
        return True
    if descriptor == STDERR and not _is_inheritable(STDERR):
        return False  # stderr was closed, and this is a file that was opened since
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(limit_s * 1000))


def _is_inheritable(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:  # closed
        return False


_show: Show = Display()
_turn = threading.Lock()
"""Of the work that shows itself; what is done within it does not."""


def show_by(other: Show | None = None) -> Show:
    """Have another function show this process's texts, or stderr again; return the one before."""
    global _show
    before, _show = _show, other or Display()
    return before


def show(text: str, stays: bool) -> None:
    """Show a text: see `Show`."""
    _show(text, stays)


def say(line: str) -> None:
    """Show a line that stays, at once and whatever `config.PROGRESS` says."""
    _show(line, True)


def is_at_terminal() -> bool:
    """Return whether texts are shown on a terminal that stderr is."""
    return isinstance(_show, Display) and is_terminal(_descriptor())


class Progress:
    """A context in which work shows itself, once it has taken a second.

    Attributes
    ----------
    extent : callable
        Returns how far the work is: ``3 of 60 functions``. A thread calls it.
    ended : str
        The line that stays after the work, if that took a second and did not fail.

    Parameters
    ----------
    text : str
        What is done.
    clock : callable
        Returns the time, in seconds.
    """

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._text = text
        self._clock = clock
        self.extent: Callable[[], str] = str
        self.ended = ""

    def __enter__(self) -> Progress:
        self._begun_s = self._clock()
        self._turn = _turn  # that of a fork is another one
        self._has_turn = config.shows_progress() and self._turn.acquire(blocking=False)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpucoll-progress", daemon=True)
        if self._has_turn:
            with contextlib.suppress(RuntimeError):  # no more threads: only the end is shown
                self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._has_turn:
            return
        try:
            self._over.set()
            if self._thread.ident is not None:
                self._thread.join(WRITE_S)
            if self.seconds() >= QUIET_S:
                show("" if kind else self.ended, True)
        finally:
            self._turn.release()

    def seconds(self) -> float:
        """Return for how long the work has been going on."""
        return self._clock() - self._begun_s

    def tick(self) -> None:
        """Show how far the work is, unless it has just begun."""
        if self.seconds() >= QUIET_S:
            extent = self.extent()
            show(f"{self._text}{extent and ': '}{extent}, {self.seconds():.0f} s", False)

    def _run(self) -> None:
        pause_s = QUIET_S
        while not self._over.wait(pause_s):
            pause_s = REDRAW_S
            with contextlib.suppress(Exception):
                self.tick()


def _renew_in_child() -> None:
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_renew_in_child)
