"""The queues of started calls, and the process's one compiled thread, which serves all of them.

The thread runs started calls and steps messages of all groups. ``pthread_create`` starts it on
compiled code. It never takes the interpreter, so it goes on while Python computes. It sleeps while
there is nothing to do, with all signals blocked. It must end before the interpreter does, because
the memory that it reads is released then.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.entries import started
from gpucoll.entries.pending import serve_started, wake_thread
from gpucoll.group.protocol import ENDING_S
from gpucoll.kernels.cpu.builtins import METH_FASTCALL, builtin, capsule
from gpucoll.transport.shared import ordering
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.flags import wait_long, wait_long_alone
from gpucoll.transport.shared.words import (
    PENDING_CALLS,
    STARTED_WORDS,
    THREAD_QUEUES,
    Pending,
    Started,
    Status,
    Thread,
)

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


# --- a group's queue of started calls, as Python sees it ------------------------------------------


class StartedCalls:
    """The queue of one group.

    Parameters
    ----------
    context : array of int64
        The group's context.
    timeout_s : float
        Default deadline of a call, in seconds.
    make_room : callable
        Lets the group take more memory for a call that found none; raises SharedMemoryError if it
        may not.

    Attributes
    ----------
    address : int
        Address of the queue's words.
    wait : callable
        ``(number)``: runs calls until the one of this number has ended; see
        `gpucoll.group.protocol.StartedCalls` for what it returns.
    poll : callable
        ``(number, wanted)``: returns whether the call has ended, without waiting for other ranks.
        `wanted`: the thread runs the call from now on.
    sleep : callable
        ``(number, ns)``: sleeps until the call has ended, or for `ns`; returns whether it has
        ended.
    reap : callable
        ``(number)``: frees the entry of an ended call, once the entries of all calls before it are
        free.
    """

    def __init__(
        self, context: npt.NDArray[np.int64], timeout_s: float, make_room: Callable[[], None]
    ) -> None:
        self._make_room = make_room
        # Not NumPy's memory: that may be shared with a forked child, which writes to these words.
        self._memory = bytearray(8 * (Pending.n_words + 8))
        words = np.frombuffer(self._memory, np.int64)
        words = words[-words.ctypes.data // 8 % 8 :][: Pending.n_words]  # from a cache line on
        self._words = words
        self._looked_at = self._memory, context
        self.address: int = words.ctypes.data
        words[Pending.context] = context.ctypes.data
        words[Pending.thread] = thread().address
        words[Pending.wait_long] = wait_long.address
        words[Pending.wait_long_alone] = wait_long_alone.address
        words[Pending.timeout_ns] = nanoseconds(timeout_s)
        holder = capsule(self.address)

        def entry(code: Any) -> Callable[..., int]:
            made: Callable[..., int] = builtin(code.address, METH_FASTCALL, holder)
            return made

        self.wait = entry(started.wait_started)
        self.poll = entry(started.poll_started)
        self.sleep = entry(started.sleep_started)
        self.reap = entry(started.reap_started)
        self._start = entry(started.start_block)
        self._skip = entry(started.skip_started)
        self.is_served = False
        """Whether the thread runs calls. With too many communicators, only waiters run them."""

    def serve(self) -> None:
        """Make the thread run calls, if it has room. After this, `close` must be called."""
        if not self.is_served:
            self.is_served = thread().add(self.address)

    def start(self, block: CallBlock, timeout_s: float) -> int:
        """Start a call and return its number; 0: there is no room. Keep the block until its end."""
        address = block.words.ctypes.data
        if not (number := self._start(address, nanoseconds(timeout_s))) and self.begin_serving():
            number = self._start(address, nanoseconds(timeout_s))
        return number

    def without_room(self) -> int:
        """Return the number of the next call if it found no memory and so has not begun; else 0."""
        number = int(self._words[Pending.done]) + 1
        if number > int(self._words[Pending.tail]) or self.status_of(number) != Status.NO_ROOM:
            return 0
        return number

    def make_room(self, number: int) -> None:
        """Let a call that found no memory run again.

        Raises SharedMemoryError if there still is no memory; the call never runs then.
        """
        self._words[self._place_of(number) + Started.status] = Status.NOT_RUN
        try:
            self._make_room()
        except BaseException:
            until = time.monotonic() + ENDING_S
            while not self._skip(number) and time.monotonic() < until:
                time.sleep(0)  # another thread checks the queue, or the group was given up
            raise

    def begin_serving(self) -> bool:
        """Start the thread, unless it runs; return whether it runs calls of this queue."""
        return self.is_served and thread().start()

    def started(self) -> range:
        """Return the numbers of calls that were started and not reaped."""
        return range(int(self._words[Pending.reaped]) + 1, int(self._words[Pending.tail]) + 1)

    def ended(self) -> range:
        """Return the numbers of calls that have ended and were not reaped."""
        return range(int(self._words[Pending.reaped]) + 1, int(self._words[Pending.done]) + 1)

    @property
    def n_reaped(self) -> int:
        """The number of the last call that was reaped; those up to it have all ended."""
        return int(self._words[Pending.reaped])

    def status_of(self, number: int) -> int:
        """Return the status of a call that has ended and was not reaped."""
        return int(self._words[self._place_of(number) + Started.status])

    def _place_of(self, number: int) -> int:
        """Return the index at which the entry of a call begins."""
        return Pending.entries + (number % PENDING_CALLS) * STARTED_WORDS

    @property
    def is_running(self) -> bool:
        """Whether a thread runs calls of this queue, or has not quite stopped."""
        return bool(self._words[Pending.is_running])

    def settle(self) -> bool:
        """Wait, for `ENDING_S` at most, until no thread runs calls; return whether none does."""
        until = time.monotonic() + ENDING_S
        while self.is_running:
            if time.monotonic() > until:
                return False
            time.sleep(0)
        return True

    def close(self) -> bool:
        """Take the queue from the thread; return whether the thread no longer looks at it."""
        return thread().remove(self.address, self._looked_at)


def nanoseconds(timeout_s: float) -> int:
    """Return a deadline in nanoseconds, as the context stores it."""
    return int(min(timeout_s, 1e9) * 1e9)


hold_started = ordering.function(started.hold_started, 2)
"""``hold_started(context, n_reasons)``: see `Group.hold`; no other Python thread runs meanwhile."""
