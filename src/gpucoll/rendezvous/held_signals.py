"""Hold back signals that the program handles itself, while descriptors change hands.

Python runs a handler between any two instructions, so a KeyboardInterrupt could come between the
system call that makes a descriptor and the line that stores it. While signals are held, handlers
run only where `HeldSignals.check` is called, which is in every wait; waits are short.
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
    """The signals that have arrived, and the program's handlers."""

    def __init__(self) -> None:
        self._arrived: list[int] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._is_holding = True

    def check(self) -> None:
        """Run the handlers of the signals that have arrived: all of them, even if one raises."""
        if self._arrived:
            number = self._arrived.pop(0)
            try:
                self._handlers[number](number, sys._getframe(1))
            finally:
                self.check()

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        if self._is_holding:
            self._arrived.append(number)
        else:  # a handler that raised kept `_release` from putting this one's back
            self._handlers[number](number, frame)

    def _hold(self) -> None:
        for number in range(1, signal.NSIG):  # quicker than signal.valid_signals, SIGINT first
            handler = signal.getsignal(number)
            if isinstance(before := getattr(handler, "__self__", None), HeldSignals):
                handler = before._handlers[number]  # an earlier one was not put back
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
    """Hold signals back within the block; run the handlers of those left unchecked after it.

    Python runs handlers in the main thread only, so other threads hold nothing back.
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
