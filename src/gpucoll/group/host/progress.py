"""The process's thread that runs started calls and steps messages: compiled, one for all of them.

It is begun by ``pthread_create`` on compiled code and never takes the interpreter, so that it goes
on while Python computes. It sleeps while there is nothing to do, with all signals blocked. Before
the interpreter ends it must have ended: the memory that it looks at goes then.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time

import numpy as np

from gpucoll.entries.pending import serve_started, wake_thread
from gpucoll.group.protocol import ENDING_S
from gpucoll.transport.shared import ordering
from gpucoll.transport.shared.words import THREAD_QUEUES, THREAD_WORDS, Thread

_FIRST_SLEEP_NS = 1_000_000
_SIG_SETMASK, _SIGNAL_SET_BYTES = 2, 128
_STACK_BYTES = 512 << 10


class ProgressThread:
    """The thread, and the queues that it serves.

    Attributes
    ----------
    address : int
        Of its words.
    """

    def __init__(self) -> None:
        # Not NumPy's memory: that may be shared with a forked child, who writes here.
        self._words = np.frombuffer(bytearray(8 * THREAD_WORDS), np.int64)
        self._words[Thread.FUTEX_TIMEOUT + 1] = _FIRST_SLEEP_NS
        self.address = self._words.ctypes.data
        self._starting = threading.Lock()
        self._handle = ctypes.c_ulong()

    @property
    def is_running(self) -> bool:
        """Whether it has been started."""
        return bool(self._words[Thread.IS_RUNNING])

    def start(self) -> bool:
        """Start it, unless it runs; return whether it does. There may be no room for a thread."""
        with self._starting:
            if not self.is_running:
                self._words[Thread.IS_RUNNING] = self._create()
            return self.is_running

    def _create(self) -> bool:
        libc = ctypes.CDLL(None)
        everything = (ctypes.c_ubyte * _SIGNAL_SET_BYTES)(*[255] * _SIGNAL_SET_BYTES)
        before = (ctypes.c_ubyte * _SIGNAL_SET_BYTES)()
        attributes = (ctypes.c_ubyte * 128)()
        libc.pthread_attr_init(attributes)
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK_BYTES))
        libc.pthread_sigmask(_SIG_SETMASK, everything, before)  # which the thread inherits
        try:
            code = libc.pthread_create(
                ctypes.byref(self._handle),
                attributes,
                ctypes.c_void_p(serve_started.address),
                ctypes.c_void_p(self.address),
            )
        finally:
            libc.pthread_sigmask(_SIG_SETMASK, before, None)
            libc.pthread_attr_destroy(attributes)
        return bool(code == 0)

    def add(self, queue: int) -> bool:
        """Serve a queue, or a table of messages, from now on; False: there are too many.

        Like `remove` without a lock: whatever a user's finalizer does may come to either.
        """
        places = self._words[Thread.QUEUES : Thread.QUEUES + THREAD_QUEUES]
        for place in np.flatnonzero(places == 0).tolist():
            at = self.address + 8 * (Thread.QUEUES + place)
            if ordering.compare_exchange(at, 0, queue) == 0:
                self._look_up_to(place + 1)
                return True
        return False

    def _look_up_to(self, count: int) -> None:
        """Have the thread look at so many places at least."""
        at = self.address + 8 * Thread.COUNT
        while (before := ordering.load(at)) < count:
            ordering.compare_exchange(at, before, count)

    def remove(self, queue: int, keep: object) -> bool:
        """Serve a queue no more; return whether the thread has ceased to look at it.

        What it runs has ended or been given up, so that it ceases within a slice of waiting. Where
        it does not, `keep`, which is everything that it looks at, stays for ever.
        """
        places = self._words[Thread.QUEUES : Thread.QUEUES + THREAD_QUEUES]
        for place in np.flatnonzero(places == queue).tolist():
            ordering.store(self.address + 8 * (Thread.QUEUES + place), 0)
        current = self.address + 8 * Thread.CURRENT
        until = time.monotonic() + ENDING_S
        while self.is_running and ordering.load_after(current) == queue:
            if time.monotonic() > until:
                _in_use.append(keep)
                return False
            time.sleep(0.0001)
        return True

    def stop(self) -> None:
        """End the thread; return when it has ended. What it runs must have been given up."""
        if not self.is_running:
            return
        ordering.store(self.address + 8 * Thread.STOP, 1)
        wake_thread.ctypes(self.address)
        ctypes.CDLL(None).pthread_join(self._handle, None)
        self._words[Thread.STOP] = 0


def as_messages(table: int) -> int:
    """Return how the thread knows a table of messages."""
    return table | 1


_in_use: list[object] = []
_thread = ProgressThread()


def thread() -> ProgressThread:
    """Return this process's thread, started or not."""
    return _thread


def _after_fork() -> None:
    global _thread
    _thread = ProgressThread()  # the child has none, and uses none of its parent's queues


os.register_at_fork(after_in_child=_after_fork)
