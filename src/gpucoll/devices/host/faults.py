"""What tests have a Host device do wrong: fail or be late, at the n-th time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

KINDS: Final = ("launch", "copy", "allocation", "ipc", "run")
"""What can be failed: the call that launches a kernel, enqueues a copy or a fill, allocates, or
exports or opens memory; and of ``"run"`` a kernel itself, long after its launch has returned."""


@dataclass
class Faults:
    """Of one device."""

    failing: dict[str, int] = field(default_factory=dict)
    """Kind -> how many more times it goes well before it fails, once."""
    delays_ns: dict[str, int] = field(default_factory=dict)
    """Kind -> how much later the work begins that is enqueued: of "launch" and "copy"."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def strikes(self, kind: str) -> bool:
        """Return whether this one is to fail; counts."""
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
