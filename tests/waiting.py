"""How long tests wait, on a machine that may be busy: what passes waits no longer for that."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

from gpucoll import finalizers

SOON_S = 12.0
"""Well below the ranks' deadline of 20 s: who needs longer has waited for that."""
_FINALIZERS = "gpucoll-finalizers"


def until(condition: Callable[..., Any], limit_s: float = 40.0) -> None:
    """Poll for what has no event to wait for, with a deadline below that of a rank's answer."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.0005)


def collect() -> None:
    """Collect garbage, and wait until what finalizers have left to their thread is done."""
    gc.collect()
    _finish_what_finalizers_left()


def thread_names() -> list[str]:
    """Return the names of this process's threads, but for that of finalizers.

    A collection, which may come anywhere, starts that one for a moment. What it had to do is done.
    """
    _finish_what_finalizers_left()
    names = [thread.name for thread in threading.enumerate()]
    return sorted(name for name in names if name != _FINALIZERS)


def _finish_what_finalizers_left() -> None:
    until(lambda: not any(each._left or each._is_working.locked() for each in finalizers._all))
    until(lambda: all(thread.name != _FINALIZERS for thread in threading.enumerate()))


def is_broken(comm: Any) -> bool:
    """Return whether somebody has given the communicator up."""
    return bool(comm._group.is_aborted)


def is_stopped(pid: int) -> bool:
    """Return whether a process has got SIGSTOP."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"
