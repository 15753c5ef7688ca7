"""Lets go of arrays beside everything else, since that may wait for the GPU.

Memory that comes from no pool (Numba's, CuPy's without an allocator, PyTorch's without caching)
goes back to the driver when its array dies, and the driver waits until all that is on the GPU is
done. A call keeps its arrays until it is done, so the last to let go may be who looks whether
another call hangs, with the lock that whoever ends that one needs: it must not be who waits.
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
"""So long the thread waits for more before it ends."""
_PAUSE_S = 20e-6
_SETTLE_S = 0.05


class _Spent:
    """What is to be let go of, and the thread that does it while there is something."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Device, list[Any]]] = queue.SimpleQueue()
        self._has_thread = _thread.allocate_lock()
        self._n_given = self._n_done = 0

    def add(self, device: Device, kept: list[Any]) -> None:
        """Take what was kept for calls on a device."""
        self._n_given += 1
        self._waiting.put((device, kept))
        if self._has_thread.acquire(False):
            try:
                _thread.start_new_thread(self._let_go, ())
            except RuntimeError:  # at the interpreter's end there are no threads
                self._has_thread.release()

    def settle(self) -> None:
        """Wait until all that was given by now is let go of, or `_SETTLE_S`."""
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
    """Have another thread let go of what a list holds: memory of a device, or what owns it."""
    _spent.add(device, kept)


def settle() -> None:
    """Give that thread a moment: what calls kept that are done can be allocated again then."""
    _spent.settle()


def _begin_anew() -> None:
    """Leave to the parent what is its own: the GPU is."""
    global _spent
    _parents.append(_spent)
    _spent = _Spent()


os.register_at_fork(after_in_child=_begin_anew)
