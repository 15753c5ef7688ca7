"""Signals that a program handles itself, held back while descriptors change hands.

Python runs a handler between any two instructions, so a KeyboardInterrupt could come between the
system call that makes a descriptor and the line that remembers it. While signals are held, handlers
run only where `HeldSignals.check` is called: in every wait, which is short.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class HeldSignals:
    """The signals that arrived, and what their handlers are."""

    def __init__(self) -> None:
        self._arrived: list[int] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._is_holding = True

    def check(self) -> None:
        """Run the handlers of what has arrived, now; they may raise, and every one runs."""
        if self._arrived:
            number = self._arrived.pop(0)
            try:
                self._handlers[number](number, sys._getframe(1))
            finally:
                self.check()

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        if self._is_holding:
            self._arrived.append(number)
        else:  # a handler that raised has kept this one from being put back
            self._handlers[number](number, frame)

    def _hold(self) -> None:
        for number in range(1, signal.NSIG):  # quicker than signal.valid_signals, SIGINT first
            handler = signal.getsignal(number)
            if isinstance(before := getattr(handler, "__self__", None), HeldSignals):
                handler = before._handlers[number]  # it was not put back
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._arrive)

    def _release(self) -> None:
        try:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        finally:
            self._is_holding = False
            self.check()


_current: HeldSignals | None = None


@contextmanager
def held_signals() -> Iterator[HeldSignals]:
    """Hold signals back within the block; those that nobody has checked for are handled after it.

    Python runs handlers in the main thread only: in others nothing is held.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield HeldSignals()
        return
    if _current is not None:
        yield _current
        return
    held = HeldSignals()
    try:
        _current = held
        held._hold()
        yield held
    finally:
        _current = None
        held._release()
