"""The thread that calls oneCCL for one communicator, so that no thread of the user's hangs in it.

oneCCL's calls block, and nothing ends one that waits for a rank that never comes. So this thread
makes all of them, in order, and others wait for it under a deadline. If that passes, they give the
thread up: it stays in the library until the process ends, and the communicator with it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from gpucoll.devices import Device
from gpucoll.errors import StateError
from gpucoll.transport.shared import ordering

Watch = Callable[[], None]
"""Called while something is in progress; raises an error that makes waiting pointless."""
_WAIT_S = 2e-3
_PAUSES_S = (20e-6, 1e-3)
"""First and longest pause between two looks at a word."""
_N_WORDS = 1024
"""How many calls may wait for their streams."""
_left: list[object] = []
"""Memory that is used until the process ends."""
_LAST = 2**31 - 1
"""A value above all that a stream waits for."""


class Job:
    """A call for the thread to make."""

    def __init__(self, run: Callable[[], int], what: str = "") -> None:
        self.run = run
        """Makes the call and returns its code."""
        self.what = what
        """The function's name in the table of NCCL."""
        self.words: tuple[int, ...] = ()
        """Addresses of the words to wait for before that."""
        self.number = 0
        """The value to wait for, and to write afterwards; 0: neither."""
        self.done = threading.Event()
        self.code = 0


class LibraryThread:
    """Makes the library's calls; it holds no reference to the communicator."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._lock = threading.RLock()  # not the condition: an interrupt can leave that locked
        self._changed = threading.Condition(self._lock)
        self.is_given_up = False
        self.is_calling = False
        """Whether the thread is in a call of the library."""
        self._is_stopping = False
        self._n_jobs = 0
        self._words = np.zeros(_N_WORDS + 1, np.int64)
        """Words that streams write before a call, in turn; the last one they wait for after it."""
        self._written = self._words.ctypes.data + 8 * _N_WORDS
        self.failed: Job | None = None
        """The first call on a stream that failed."""
        self._thread = threading.Thread(target=self._run, name="gpucoll-oneccl", daemon=True)
        self._thread.start()

    # --- for other threads ------------------------------------------------------------------------

    def call(self, run: Callable[[], int], watch: Watch) -> int:
        """Make a call and return its code; if `watch` raises, give the thread up and raise that."""
        job = Job(run)
        self._put(job)
        try:
            while not job.done.wait(_WAIT_S):
                if self.is_given_up:
                    raise StateError("the communicator of oneCCL was given up during a call")
                watch()
        except BaseException:
            self.give_up()
            raise
        return job.code

    def enqueue(self, job: Job, device: Device, streams: Sequence[int], watch: Watch) -> None:
        """Do a job when these streams come to it, and let them go on when it is done."""
        begun = self._n_jobs
        while begun + len(streams) - ordering.load(self._written) > _N_WORDS:
            watch()
            time.sleep(_PAUSES_S[1])
        job.number = self._n_jobs + len(streams)
        addresses = []
        for stream in streams:
            address = self._words.ctypes.data + 8 * (self._n_jobs % _N_WORDS)
            self._n_jobs += 1
            device.check(
                device.stream_write_value(stream, address, job.number), "write a word for oneCCL"
            )
            addresses.append(address)
        job.words = tuple(addresses)
        self._put(job)
        for stream in streams:
            device.check(
                device.stream_wait_value(stream, self._written, job.number), "wait for oneCCL"
            )

    def give_up(self) -> None:
        """Let all streams go on, and make no more calls; one that hangs is left to itself."""
        with self._lock:
            if not self.is_given_up and self._n_jobs:
                _left.append(self._words)  # a stream may still look at them
            self.is_given_up = True
            ordering.store(self._written, _LAST)
            self._changed.notify_all()

    def stop(self, limit_s: float) -> bool:
        """End the thread when its calls are done; return whether it has ended."""
        with self._lock:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _put(self, job: Job) -> None:
        with self._lock:
            self._jobs.append(job)
            self._changed.notify_all()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if not all(self._wait_for(word, job.number) for word in job.words):
                return
            with self._lock:
                if self.is_given_up:
                    return
                self.is_calling = True
            job.code = job.run()
            with self._lock:
                self.is_calling = False
                if self._is_given_up():
                    return
                if job.number:
                    if job.code and self.failed is None:
                        self.failed = job
                    ordering.store(self._written, job.number)
            job.done.set()

    def _is_given_up(self) -> bool:
        """Return whether another thread has given this one up meanwhile."""
        return self.is_given_up

    def _next(self) -> Job | None:
        with self._lock:
            while not self._jobs and not self.is_given_up and not self._is_stopping:
                self._changed.wait()
            return None if self.is_given_up or not self._jobs else self._jobs.popleft()

    def _wait_for(self, word: int, number: int) -> bool:
        """Return when a stream has come to a call: true, or false if the thread is given up."""
        pause_s = _PAUSES_S[0]
        while ordering.load(word) < number:
            if self.is_given_up:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])
        return True
