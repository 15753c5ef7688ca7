"""A loop that waits for file descriptors and timers together, and calls back.

It is not asyncio, because `gpucoll.launch` is called from notebooks, whose thread already runs an
asyncio loop.
"""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Callable

__all__ = ["EventLoop"]

Callback = Callable[[], None]
LONGEST_WAIT_S = 1e6
"""epoll counts milliseconds in an int, so longer and infinite waits are split into several."""


class EventLoop:
    """Waits without polling: sleeps until a descriptor is readable or the next time has come."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: dict[object, tuple[float, Callback]] = {}

    def add_reader(self, descriptor: int, callback: Callback) -> None:
        """Call `callback` whenever `descriptor` is readable or at its end."""
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def remove_reader(self, descriptor: int) -> None:
        """Stop watching `descriptor`, if it is watched. Call this before closing the descriptor."""
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    def call_later(self, name: object, delay_s: float, callback: Callback) -> None:
        """Call `callback` once after `delay_s`; this replaces a timer of the same name."""
        delay_s = min(delay_s, sys.float_info.max)  # a large int may not fit into a float
        self._timers[name] = (time.monotonic() + delay_s, callback)

    def cancel(self, name: object) -> None:
        """Cancel the timer of this name, if there is one."""
        self._timers.pop(name, None)

    def has_timer(self, name: object) -> bool:
        """Return whether a timer of this name is pending."""
        return name in self._timers

    def run_once(self) -> None:
        """Wait for the next event and make its calls."""
        next_time = min((when for when, _ in self._timers.values()), default=None)
        wait_s = None if next_time is None else max(0.0, next_time - time.monotonic())
        if wait_s is not None:
            wait_s = min(wait_s, LONGEST_WAIT_S)
        for key, _ in self._selector.select(wait_s):
            # An earlier callback of this round may have closed the descriptor.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now = time.monotonic()
        for name, (when, callback) in list(self._timers.items()):
            if when <= now and self._timers.get(name) == (when, callback):
                del self._timers[name]
                callback()

    def close(self) -> None:
        """Close the loop's kernel objects. Watched descriptors, which others own, stay open."""
        self._selector.close()
        self._timers.clear()
