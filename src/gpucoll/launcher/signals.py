"""Signals: deferred while ranks are started or ended, and forwarded to them by gpucoll-run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from gpucoll.launcher.events import EventLoop

__all__ = ["FORWARDED", "deferred_signals", "handlers", "woken_by_signals"]

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

DEFERRED = (*FORWARDED, signal.SIGTSTP)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Run the Python handlers of these signals after the block instead of within it.

    A KeyboardInterrupt between a fork and the line that records the child would leave the child
    behind. Masking signals does not help: the kernel passes a masked signal to another thread, and
    the ranks would inherit the mask. Python runs handlers only in the main thread, so in other
    threads this does nothing.
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
    """Call `callbacks` with the number of each signal in the block; main thread only."""

    def handle(number: int, frame: FrameType | None) -> None:
        callbacks[signal.Signals(number)](number)

    before = {number: signal.signal(number, handle) for number in callbacks}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def woken_by_signals(loop: EventLoop) -> Iterator[None]:
    """Let signals wake the loop within the block.

    Python runs its handlers between instructions. A signal that arrives after the last instruction
    before the waiting system call does not interrupt it, and its handler would run only after the
    next event. Therefore the C handler writes to a pipe that the loop watches.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def drain() -> None:
        numbers = os.read(read_end, 4096)
        if before >= 0:  # an asyncio loop further up the stack wants to be notified, too
            with contextlib.suppress(OSError):
                os.write(before, numbers)

    loop.add_reader(read_end, drain)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        loop.remove_reader(read_end)
        os.close(read_end)
        os.close(write_end)
