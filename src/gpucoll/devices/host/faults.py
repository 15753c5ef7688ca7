"""Faults that tests inject into a Host device: a failure or a delay, at the n-th time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

KINDS: Final = ("launch", "copy", "allocation", "ipc", "run")
"""The calls that can fail: those that launch a kernel, enqueue a copy or a fill, allocate, or
export or open memory. ``"run"`` fails a kernel itself, long after its launch has returned."""


@dataclass
class Faults:
    """The faults of one device."""

    failing: dict[str, int] = field(default_factory=dict)
    """Kind -> how many more times it succeeds before it fails once."""
    delays_ns: dict[str, int] = field(default_factory=dict)
    """Kind, "launch" or "copy" -> delay before the enqueued work begins."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def strikes(self, kind: str) -> bool:
        """Return whether this call must fail; counts the calls."""
        if kind not in self.failing:
            return False
        with self._lock:
            left = self.failing.get(kind)
            if left is None:
                return False
            if left:
                self.failing[kind] = left - 1
                return False
            del self.failing[kind]
            return True
