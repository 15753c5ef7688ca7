"""Complete the futures of works in threads in which users' callbacks run and may block.

A callback may start a collective and wait for its future (PowerSGD's does). So callbacks never run
in a thread that calls need to make progress, and while one thread runs callbacks, another one is
free for the futures that come next.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from gpucoll.integrations.torch.works import Started

_IDLE_S = 10.0
"""A thread that has had nothing to do for this long ends."""
_END_S = 2.0


class _Threads:
    """One thread for each future whose callbacks run, and one that waits for the next future."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._n_free = 0
        self._running: set[threading.Thread] = set()
        self._is_ending = False

    def add(self, future: torch.futures.Future[None]) -> None:
        """Complete a future in one of these threads."""
        self._ended.put(future)
        self._see_that_one_is_free()

    def _see_that_one_is_free(self) -> None:
        with self._lock:
            if self._n_free or self._is_ending:
                return
            self._n_free += 1
            thread = threading.Thread(target=self._run, name="gpucoll-futures", daemon=True)
            self._running.add(thread)
        thread.start()

    def _run(self) -> None:
        while (future := self._next()) is not None:
            try:
                future.set_result(None)
            finally:
                del future
                with self._lock:
                    self._n_free += 1
        with self._lock:
            self._running.discard(threading.current_thread())

    def _next(self) -> torch.futures.Future[None] | None:
        """Wait for a future and mark this thread as busy; None if this thread is to end."""
        while True:
            with contextlib.suppress(queue.Empty):
                future = self._ended.get(timeout=_IDLE_S)
                break
            with self._lock:
                if self._ended.empty():  # else a future has come that counts on this thread
                    self._n_free -= 1
                    return None
        with self._lock:
            self._n_free -= 1
        if future is not None and not self._ended.empty():
            self._see_that_one_is_free()
        return future

    def end(self) -> None:
        """End all threads that run no callback."""
        with self._lock:
            self._is_ending = True
            running = list(self._running)
        for _ in running:
            self._ended.put(None)
        for thread in running:
            thread.join(_END_S)


_threads = _Threads()
atexit.register(_threads.end)


def complete_after(works: Sequence[Started], future: torch.futures.Future[None]) -> None:
    """Set a future's result to None when all works have ended, whether they succeeded or failed."""
    call_after(works, lambda: _threads.add(future))


def call_after(works: Sequence[Started], function: Callable[[], object]) -> None:
    """Call a short function when all works have ended, in the thread that notices the last end."""
    lock, left = threading.Lock(), [len(works)]

    def count(_: object) -> None:
        with lock:
            left[0] -= 1
            is_last = not left[0]
        if is_last:
            function()

    for work in works:
        work.add_done_callback(count)
