"""Lets go of arrays beside everything else, where that may wait for the GPU.

A library without a memory pool (Numba) gives an array's memory back to the driver when the array
dies, and the driver waits until all that is on the GPU is done. A call keeps its arrays until it is
done, so the last to let go may be who looks whether another call hangs, with the lock that whoever
ends that one needs: it must not be who waits.
"""

from __future__ import annotations

import _thread
import contextlib
import os
from collections import deque
from typing import Any

from gpucoll.devices import Device

_spent: deque[tuple[Device, list[Any]]] = deque()
_is_working = _thread.allocate_lock()
"""Held while there is a thread that lets go."""


class DeferredRelease:
    """Keeps something that owns memory of a device; lets go of it in another thread."""

    __slots__ = ("_device", "_kept", "_process")

    def __init__(self, kept: Any, device: Device) -> None:
        self._kept = [kept]
        self._device = device
        self._process = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self._process:  # a forked child's: the GPU is its parent's
            return
        _spent.append((self._device, self._kept))
        if _is_working.acquire(False):
            try:
                _thread.start_new_thread(_let_go, ())
            except RuntimeError:  # at the interpreter's end there are no threads
                _is_working.release()


def _let_go() -> None:
    while True:
        with contextlib.suppress(IndexError):
            while True:
                device, kept = _spent.popleft()
                # Another thread may be capturing a graph.
                with contextlib.suppress(Exception), device, device.relaxed_capture():
                    kept.clear()
        _is_working.release()
        if not _spent or not _is_working.acquire(False):
            return
