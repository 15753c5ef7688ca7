"""The thread that drives an engine while its program does other things."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpucoll.integrations.horovod.engine.engine import Engine

__all__ = ["Driver"]

_ENDING_S = 5.0
_MOST_PATIENCE = 2
"""How many times its patience the thread lets pass between two looks."""


class Driver:
    """Sleeps while nothing is pending; begins with the first call of `wake`.

    Parameters
    ----------
    engine : Engine
        What to drive. It is not kept alive.
    patience_s : float
        How long to leave the program time to wait for its requests itself, which is faster.
    """

    def __init__(self, engine: Engine, patience_s: float) -> None:
        self._engine = weakref.ref(engine)
        self._patience_s = patience_s
        self._thread: threading.Thread | None = None
        self._is_awake = False
        self._is_stopped = False
        self._work, self._hurry = threading.Event(), threading.Event()

    def wake(self, at_once: bool) -> None:
        """Let the thread drive, unless everything is done before its patience ends."""
        if at_once:
            self._hurry.set()
        if self._is_awake:
            return
        self._is_awake = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpucoll-horovod", daemon=True)
            self._thread.start()
        self._work.set()

    def stop(self) -> None:
        """End the thread; where a call holds it for seconds, abandon it."""
        self._is_stopped = True
        self._hurry.set()
        self._work.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_ENDING_S)

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            self._drive()
            self._is_awake = False
            engine = self._engine()
            if self._is_stopped or engine is None:
                return
            if not engine.is_idle:  # submitted since, and nobody was woken
                self._is_awake = True
                self._work.set()
            del engine

    def _drive(self) -> None:
        """Drive what the program does not, until nothing is submitted any more.

        A thread that wakes up takes time from a program that waits for its requests itself: then
        this one looks less and less often.
        """
        pause_s, n_seen = self._patience_s, -1
        while not self._is_stopped:
            is_hurried = self._hurry.wait(pause_s)
            engine = self._engine()
            if self._is_stopped or engine is None:
                return
            if engine.is_idle:
                self._hurry.clear()
                if engine.n_submitted == n_seen:
                    return
                n_seen = engine.n_submitted
            elif is_hurried or engine.pending_for_s() >= self._patience_s:
                engine.drive(patiently=is_hurried)
                pause_s = self._patience_s
                continue
            pause_s = min(2 * pause_s, _MOST_PATIENCE * self._patience_s)
