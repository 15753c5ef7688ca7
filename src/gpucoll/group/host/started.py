"""A group's queue of started calls, as Python sees it: numbers, and how the calls ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.entries import starting, waiting
from gpucoll.group.host.progress import thread
from gpucoll.group.protocol import ENDING_S
from gpucoll.kernels.cpu.builtins import METH_FASTCALL, builtin, capsule
from gpucoll.transport.shared import ordering
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.flags import wait_long, wait_long_alone
from gpucoll.transport.shared.words import PENDING_CALLS, STARTED_WORDS, Pending, Started, Status


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

        self.wait = entry(waiting.wait_started)
        self.poll = entry(waiting.poll_started)
        self.sleep = entry(waiting.sleep_started)
        self.reap = entry(waiting.reap_started)
        self._start = entry(starting.start_block)
        self._skip = entry(waiting.skip_started)
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


hold_started = ordering.function(waiting.hold_started, 2)
"""``hold_started(context, n_reasons)``: see `Group.hold`; no other Python thread runs meanwhile."""
