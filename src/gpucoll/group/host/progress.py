"""The process's one compiled thread, which runs started calls and steps messages of all groups.

``pthread_create`` starts it on compiled code. It never takes the interpreter, so it goes on while
Python computes. It sleeps while there is nothing to do, with all signals blocked. It must end
before the interpreter does, because the memory that it reads is released then.
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
from gpucoll.transport.shared.words import THREAD_QUEUES, Thread

_FIRST_SLEEP_NS = 1_000_000
_SIG_SETMASK, _SIGNAL_SET_BYTES = 2, 128
_STACK_BYTES = 512 << 10


class ProgressThread:
    """The thread, and the queues that it serves.

    Attributes
    ----------
    address : int
        Address of its words.
    """

    def __init__(self) -> None:
        # Not NumPy's memory: that may be shared with a forked child, which writes to these words.
        self._words = np.frombuffer(bytearray(Thread.n_bytes), np.int64)
        self._words[Thread.futex_timeout + 1] = _FIRST_SLEEP_NS
        self.address = self._words.ctypes.data
        self._starting = threading.Lock()
        self._handle = ctypes.c_ulong()

    @property
    def is_running(self) -> bool:
        """Whether the thread has been started."""
        return bool(self._words[Thread.is_running])

    def start(self) -> bool:
        """Start the thread unless it runs; return whether it runs. The system may refuse it."""
        with self._starting:
            if not self.is_running:
                self._words[Thread.is_running] = self._create()
            return self.is_running

    def _create(self) -> bool:
        libc = ctypes.CDLL(None)
        everything = (ctypes.c_ubyte * _SIGNAL_SET_BYTES)(*[255] * _SIGNAL_SET_BYTES)
        before = (ctypes.c_ubyte * _SIGNAL_SET_BYTES)()
        attributes = (ctypes.c_ubyte * 128)()
        libc.pthread_attr_init(attributes)
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK_BYTES))
        libc.pthread_sigmask(_SIG_SETMASK, everything, before)  # the thread inherits the mask
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
        """Serve a queue, or a table of messages, from now on; False: there is no place left.

        Like `remove`, it takes no lock, because a user's finalizer may call either at any moment.
        """
        places = self._words[Thread.queues : Thread.queues + THREAD_QUEUES]
        for place in np.flatnonzero(places == 0).tolist():
            at = self.address + 8 * (Thread.queues + place)
            if ordering.compare_exchange(at, 0, queue) == 0:
                self._look_up_to(place + 1)
                return True
        return False

    def _look_up_to(self, count: int) -> None:
        """Make the thread look at the first `count` places, or more."""
        at = self.address + 8 * Thread.count
        while (before := ordering.load(at)) < count:
            ordering.compare_exchange(at, before, count)

    def remove(self, queue: int, keep: object) -> bool:
        """Stop serving a queue; return whether the thread no longer looks at it.

        The call that the thread runs has ended or been given up, so the thread leaves the queue
        within one slice of waiting. If it does not, `keep`, which is everything that the thread
        looks at, stays alive for ever.
        """
        places = self._words[Thread.queues : Thread.queues + THREAD_QUEUES]
        for place in np.flatnonzero(places == queue).tolist():
            ordering.store(self.address + 8 * (Thread.queues + place), 0)
        current = self.address + 8 * Thread.current
        until = time.monotonic() + ENDING_S
        while self.is_running and ordering.load_after(current) == queue:
            if time.monotonic() > until:
                _in_use.append(keep)
                return False
            time.sleep(0.0001)
        return True

    def stop(self) -> None:
        """End the thread and wait for its end. The call that it runs must have been given up."""
        if not self.is_running:
            return
        ordering.store(self.address + 8 * Thread.stop, 1)
        wake_thread.ctypes(self.address)
        ctypes.CDLL(None).pthread_join(self._handle, None)
        self._words[Thread.stop] = 0


def as_messages(table: int) -> int:
    """Return the queue number by which the thread recognises a table of messages."""
    return table | 1


_in_use: list[object] = []
_thread = ProgressThread()


def thread() -> ProgressThread:
    """Return this process's thread, started or not."""
    return _thread


def _after_fork() -> None:
    global _thread
    _thread = ProgressThread()  # the child has no such thread, and must not use its parent's queues


os.register_at_fork(after_in_child=_after_fork)
