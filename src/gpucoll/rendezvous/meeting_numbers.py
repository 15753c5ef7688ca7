"""Number the meetings of each name: ranks that meet by the same name do so equally often."""

from __future__ import annotations

import threading

__all__ = ["forget_meetings", "meeting_number"]

_begun: dict[str, int] = {}
_lock = threading.Lock()


def meeting_number(name: str) -> int:
    """Return how many meetings of this name this process has begun before, and count this one.

    Each name has its own count, because a rank may know nothing of meetings in which it takes no
    part. A meeting that fails counts too, because it has failed on all of its ranks.
    """
    with _lock:
        number = _begun.get(name, 0)
        _begun[name] = number + 1
    return number


def forget_meetings() -> None:
    """Begin to count anew, for another job in which this process is a rank."""
    with _lock:
        _begun.clear()
