"""Release arrays in a thread of its own, because the release may wait for the GPU.

Memory that comes from no pool (Numba's, CuPy's without an allocator, PyTorch's without caching)
returns to the driver when its array dies, and the driver then waits until all work on the GPU is
done. A call keeps its arrays until it is done. So the last reference may belong to the thread that
checks whether another call hangs, and that thread holds the lock needed to end that call. It must
not be the one that waits.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import queue
import time
from typing import Any

from gpucoll.devices import Device

_LINGER_S = 1.0
"""How long the thread waits for further arrays before it ends."""
_PAUSE_S = 20e-6
_SETTLE_S = 0.05


class _Spent:
    """The arrays to release, and the thread that releases them while there are any."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Device, list[Any]]] = queue.SimpleQueue()
        self._has_thread = _thread.allocate_lock()
        self._n_given = self._n_done = 0

    def add(self, device: Device, kept: list[Any]) -> None:
        """Take the arrays that were kept for calls on a device."""
        self._n_given += 1
        self._waiting.put((device, kept))
        if self._has_thread.acquire(False):
            try:
                _thread.start_new_thread(self._let_go, ())
            except RuntimeError:  # at the interpreter's end no thread can start
                self._has_thread.release()

    def settle(self) -> None:
        """Wait until everything added so far is released, at most `_SETTLE_S`."""
        n_given, due_s = self._n_given, time.monotonic() + _SETTLE_S
        while self._n_done < n_given and time.monotonic() < due_s:
            time.sleep(_PAUSE_S)

    def _let_go(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._let_one_go(*self._waiting.get(timeout=_LINGER_S))
            self._has_thread.release()
            if self._waiting.empty() or not self._has_thread.acquire(False):
                return

    def _let_one_go(self, device: Device, kept: list[Any]) -> None:
        # Another thread may be capturing a graph.
        with contextlib.suppress(Exception), device, device.relaxed_capture():
            kept.clear()
        self._n_done += 1


_spent = _Spent()
_parents: list[_Spent] = []


def let_go_later(device: Device, kept: list[Any]) -> None:
    """Have another thread release the objects in a list: a device's memory, or its owners."""
    _spent.add(device, kept)


def settle() -> None:
    """Give that thread a moment, so that the memory of finished calls can be allocated again."""
    _spent.settle()


def _begin_anew() -> None:
    """Leave the parent's arrays to the parent: the GPU is the parent's."""
    global _spent
    _parents.append(_spent)
    _spent = _Spent()


os.register_at_fork(after_in_child=_begin_anew)
