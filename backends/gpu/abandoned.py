"""What communicators leave on their GPU: those dropped without `close`, arrays that outlive them.

They die in a garbage collection, which may be anywhere: inside another call of the library, under a
lock, while a graph is captured. Nothing is called there. What is left is queued, with the arrays of
calls under way, and ended when another communicator of the process connects, allocates or closes.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from typing import Any, Protocol


class Resources(Protocol):
    """What a communicator has on its GPU. None of it may refer to the communicator."""

    def end(self) -> None:
        """Give it up, whatever the other ranks do."""


_left: deque[tuple[int, Resources]] = deque()
"""With the process whose it is: a forked child has copies, and must not touch its parent's GPU."""


def watch_over(
    owner: object, resources: Resources
) -> weakref.finalize[[tuple[int, Resources]], Any]:
    """Queue what the owner has when it is dropped; `detach` the finalizer where it was closed.

    The garbage collector calls it, anywhere: appending to a deque takes no lock.
    """
    finalizer = weakref.finalize(owner, _left.append, (os.getpid(), resources))
    finalizer.atexit = False  # the process takes everything with it
    return finalizer


def leave(resources: Resources) -> None:
    """Queue what may not be ended here, in a garbage collection, and is this process's."""
    _left.append((os.getpid(), resources))


def end_all() -> None:
    """End what communicators of this process have left. Not from a garbage collection."""
    with contextlib.suppress(IndexError):
        while True:
            process, resources = _left.popleft()
            if process == os.getpid():
                resources.end()
