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


def until(condition: Callable[..., Any], limit_s: float = 40.0) -> None:
    """Poll for what has no event to wait for, with a deadline below that of a rank's answer."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.0005)


def collect() -> None:
    """Collect garbage, and wait until what finalizers have left to their thread is done."""
    gc.collect()
    until(lambda: not any(each._left or each._is_working.locked() for each in finalizers._all))
    until(lambda: all(thread.name != "gpucoll-finalizers" for thread in threading.enumerate()))


def is_broken(comm: Any) -> bool:
    """Return whether somebody has given the communicator up."""
    return bool(comm._group.is_aborted)


def is_stopped(pid: int) -> bool:
    """Return whether a process has got SIGSTOP."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"
