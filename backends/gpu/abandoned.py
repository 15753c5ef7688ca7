"""What remains on the GPU of communicators dropped without `close`, and arrays that outlive them.

They die in a garbage collection, which may happen anywhere: inside another call of the library,
under a lock, while a graph is captured. So the finalizer calls nothing there. It queues what is
left, together with the arrays of calls under way. The next communicator of the process that
connects, allocates or closes releases it.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from typing import Any, Protocol


class Resources(Protocol):
    """What a communicator owns on its GPU. None of it may refer to the communicator."""

    def end(self) -> None:
        """Release it, whatever the other ranks do."""


_left: deque[tuple[int, Resources]] = deque()
"""Each with its process: a forked child has copies, and must not touch its parent's GPU."""


def watch_over(
    owner: object, resources: Resources
) -> weakref.finalize[[tuple[int, Resources]], Any]:
    """Queue the owner's resources when it is dropped; `detach` the finalizer if it was closed.

    The garbage collector may call it anywhere: appending to a deque takes no lock.
    """
    finalizer = weakref.finalize(owner, _left.append, (os.getpid(), resources))
    finalizer.atexit = False  # the end of the process releases everything
    return finalizer


def leave(resources: Resources) -> None:
    """Queue resources of this process that may not be released here, in a garbage collection."""
    _left.append((os.getpid(), resources))


def end_all() -> None:
    """Release what communicators of this process left. Not from a garbage collection."""
    with contextlib.suppress(IndexError):
        while True:
            process, resources = _left.popleft()
            if process == os.getpid():
                resources.end()
