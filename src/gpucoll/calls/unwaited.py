"""Calls that a program has started, never waited for, and left behind without `close`."""

from __future__ import annotations

import sys
import time

from gpucoll.calls.work_queue import open_queues
from gpucoll.errors import AbortedError, PeerLostError

__all__ = ["end_all_unwaited"]


def end_all_unwaited(timeout_s: float) -> int:
    """Wait for these calls at the program's end, report failures, and return its exit code.

    The loss or abort of another rank is not reported: that rank reports it itself.
    """
    exit_code, until = 0, time.monotonic() + timeout_s
    for queue in open_queues():
        try:
            queue.end_unwaited(max(until - time.monotonic(), 0.0))
        except (PeerLostError, AbortedError):
            continue
        except Exception as error:
            exit_code |= queue.ends_process
            print(
                f"gpucoll: {queue.who} ended without having waited for an asynchronous call that "
                f"failed: {type(error).__name__}: {error}\n(wait for each Work, or close the "
                "communicator, which raises this)",
                file=sys.stderr,
                flush=True,
            )
    return exit_code
