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

    def check(self) -> None:
        """Run the handlers of what has arrived, now; they may raise."""
        while self._arrived:
            number = self._arrived.pop(0)
            self._handlers[number](number, sys._getframe(1))

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(number)

    def _hold(self) -> None:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._arrive)

    def _release(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


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
        held.check()
