"""Signals: held back while ranks are started or ended, and handed on to them by gpucoll-run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

__all__ = ["FORWARDED", "deferred_signals", "handlers"]

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

DEFERRED = (*FORWARDED, signal.SIGTSTP)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Let the Python handlers of these signals run after the block instead of in the middle of it.

    A KeyboardInterrupt between a fork and the line that remembers the child would leave the child
    behind. Masking the signals would not do: the kernel hands a masked signal to another thread,
    and the ranks would inherit the mask. Python runs handlers in the main thread only, so elsewhere
    nothing is needed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    handled = [number for number in DEFERRED if callable(signal.getsignal(number))]
    try:
        with handlers(dict.fromkeys(handled, arrived.append)):
            yield
    finally:
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)


@contextmanager
def handlers(callbacks: Mapping[signal.Signals, Callable[[int], None]]) -> Iterator[None]:
    """Call `callbacks` with a signal's number when it arrives in the block; main thread only."""

    def handle(number: int, frame: FrameType | None) -> None:
        callbacks[signal.Signals(number)](number)

    before = {number: signal.signal(number, handle) for number in callbacks}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
