"""The thread that watches calls on streams, while there are any.

The caller does not wait for its calls. So this thread notices that a rank made another call, is
late or is lost, or that the vendor's library failed, and then ends the work that hangs on the GPU.
It sleeps while nothing is under way, and ends with the communicator.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref

from gpucoll.backends.gpu.issuer import Issuer
from gpucoll.finalizers import leave

PAUSES_S = (1e-3, 10e-3)
"""Pause between two looks: while calls are made, and while nothing happens."""
LINGER_S = 0.1
"""How long the thread goes on looking after the last call. To wake it would slow the next call."""
ASKING_S = 2.0
"""How long the program has to notice a failure before the process is ended."""
EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h


class MonitorThread:
    """Watches an issuer's calls.

    Parameters
    ----------
    issuer : Issuer
        The issuer.
    exits : bool
        Whether to end the process after a failure that the program has not noticed.
    """

    def __init__(self, issuer: Issuer, *, exits: bool) -> None:
        self._event = threading.Event()
        self._is_stopping = False
        self._exits = exits
        # The thread must not keep a forgotten issuer alive, and ends with it. A finalizer may not
        # set an event, because events have a lock.
        set_event = self._event.set
        self._issuer = weakref.ref(issuer, lambda _: leave(set_event))
        self._pause_s: float | None = None
        self._n_seen, self._last_s = 0, 0.0
        issuer.wake = self._wake
        self._thread = threading.Thread(target=self._run, name="gpucoll-gpu", daemon=True)
        self._thread.start()

    def _wake(self) -> None:
        """Wake the thread if it sleeps; otherwise it looks soon, and an earlier look costs more.

        It would take the interpreter and the driver's lock from the thread that makes calls: on an
        H100, calls that each woke it took three times as long (docs/decisions/0070).
        """
        if self._pause_s is None:
            self._pause_s = PAUSES_S[0]
            self._event.set()

    def stop(self, limit_s: float) -> bool:
        """End the thread; return whether it has ended, or will as soon as it returns from here.

        It has not ended after `limit_s` if the driver or the vendor's library does not return.
        """
        self._is_stopping = True
        self._event.set()
        if self._thread is threading.current_thread():
            return True
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_stopping:
            is_woken = self._event.wait(self._pause_s)
            self._event.clear()
            issuer = self._issuer()
            if issuer is None or self._is_stopping:
                return
            if not is_woken:  # a call that has just been made has not ended
                self._look(issuer)
            del issuer

    def _look(self, issuer: Issuer) -> None:
        # A thread that holds the lock is in the vendor's library, where it detects failures itself,
        # or in the driver.
        if issuer.lock.acquire(blocking=False):
            try:
                issuer.look()
            finally:
                issuer.lock.release()
        else:
            issuer.look_from_outside()
        if issuer.is_over:  # the thread that closed it saw the failure, or gave up
            return
        if issuer.failure is not None and not issuer.group.was_told:
            self._consider_exit(issuer)
        now_s, n_issued = time.monotonic(), issuer.in_flight.n_added
        is_asking = issuer.failure is not None and self._exits and not issuer.group.was_told
        if n_issued != self._n_seen:
            self._pause_s, self._n_seen, self._last_s = PAUSES_S[0], n_issued, now_s
        elif issuer.is_busy or is_asking or now_s - self._last_s < LINGER_S:
            self._pause_s = min(1.5 * (self._pause_s or PAUSES_S[0]), PAUSES_S[1])
        else:
            self._pause_s = None
            self._wake_if_busy(issuer)

    def _wake_if_busy(self, issuer: Issuer) -> None:
        """Continue if a call was made just now: its own wake may have come too early."""
        if issuer.is_busy:
            self._wake()

    def _consider_exit(self, issuer: Issuer) -> None:
        if not self._exits or time.monotonic() - issuer.failed_at_s < ASKING_S:
            return
        group = issuer.group
        print(
            f"gpucoll: rank {group.rank} of {group.world_size} is ended, because a call on GPU "
            f"arrays failed and its results are undefined: {type(issuer.failure).__name__}: "
            f"{issuer.failure}\n(init(on_async_error='raise') leaves it to the next call)",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        os._exit(EXIT_CODE)
