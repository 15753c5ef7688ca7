"""Which meeting of its name this is: ranks that meet by the same name do so equally often."""

from __future__ import annotations

import threading

__all__ = ["forget_meetings", "meeting_number"]

_begun: dict[str, int] = {}
_lock = threading.Lock()


def meeting_number(name: str) -> int:
    """Return how many meetings of this name this process has begun before, and count this one.

    Name by name, since a rank that takes no part in the meetings of another name need not know of
    them. A meeting that fails counts: it failed on all of its ranks.
    """
    with _lock:
        number = _begun.get(name, 0)
        _begun[name] = number + 1
    return number


def forget_meetings() -> None:
    """Begin to count anew: what follows is another job, which this process is a rank of."""
    with _lock:
        _begun.clear()
