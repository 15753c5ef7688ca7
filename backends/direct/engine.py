"""The thread that does the host's part of collectives on GPU arrays, piece by piece, in order.

Everything on a stream was enqueued before: the copies of a piece to the host, a word that reports
that they are done, a wait for the word that this thread writes, and the copies back. Host arrays
(of a communicator with ``mixed=True``) are copied by this thread itself; of their calls, a stream
only has the words.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.direct.host_arrays import copy_in, copy_out
from gpucoll.backends.direct.inner import NEVER_S, Inner, told
from gpucoll.backends.direct.piece_slots import PieceSlots
from gpucoll.backends.direct.pieces import Copy, Pieces
from gpucoll.backends.direct.pinned import LAST, WORD_BYTES, Words
from gpucoll.backends.protocol import PreparedCall, Request
from gpucoll.collectives import Collective
from gpucoll.errors import GpucollError
from gpucoll.types import ReduceOp

PAUSES_S = (20e-6, 1e-3)
"""First and longest pause between two looks at a word."""
_KEPT = 16
"""How many prepared calls a launch keeps."""


class StagedCall:
    """A collective in pieces, with the calls of the CPU backend that were prepared for them.

    Parameters
    ----------
    pieces : Pieces
    slots : PieceSlots
        The slots that hold the pieces meanwhile.
    is_on_host : bool
        Whether the arrays lie in host memory instead of on the GPU.
    """

    def __init__(self, pieces: Pieces, slots: PieceSlots, is_on_host: bool = False) -> None:
        self.pieces = pieces
        self.slots = slots
        self.is_on_host = is_on_host
        self._kept: dict[Any, PreparedCall] = {}

    def run(self, number: int) -> None:
        """Do the host's part of a piece."""
        with self.slots.around():
            self.prepared(number).run(NEVER_S)
            self.slots.after()

    def prepared(self, number: int) -> PreparedCall:
        """Return the call that does the host's part of a piece, over its slots."""
        source, out = self.slots.for_host(number)
        request = self.pieces.piece(number).request(source, out)
        key = (
            source,
            out,
            request.source and request.source.shape,
            request.destination and request.destination.shape,
            request.counts,
            request.receive_counts,
        )
        made = self._kept.get(key)
        if made is None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            made = self._kept[key] = self.slots.prepare(request)
        return made


class Job:
    """An enqueued staged call."""

    def __init__(self, call: StagedCall, first: int) -> None:
        self.call = call
        self.first = first
        """The words' value before its first piece."""


class Engine:
    """Does the host's part of calls, in the order in which they were issued.

    It holds no reference to the communicator, which may be dropped.

    Parameters
    ----------
    inner : Inner
        A group of the CPU backend with the same ranks.
    words : Words
        The GPU writes the first word, the host the second.
    """

    def __init__(self, inner: Inner, words: Words) -> None:
        self._inner = inner
        self._words = words
        self.read_word = words.address
        """Address of the word that counts pieces on the host."""
        self.written_word = words.address + WORD_BYTES
        """Address of the word that counts pieces that the CPU backend has finished."""
        self._jobs: deque[Job] = deque()
        self._lock = threading.RLock()  # not the condition: an interrupt can leave that locked
        self._changed = threading.Condition(self._lock)
        self._writing = threading.Lock()
        """Held while a host array is written, so that none is written after an abort."""
        self._is_stopping = self._is_aborted = self._is_working = False
        self.error: GpucollError | None = None
        """The error that ended it."""
        self.failed_at_s = 0.0
        self._thread = threading.Thread(target=self._run, name="gpucoll-direct", daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        """Do the host's part of a job when its turn comes."""
        with self._lock:
            self._jobs.append(job)
            self._changed.notify_all()

    def abort(self) -> None:
        """Release everything that waits for this engine: streams and ranks."""
        with self._lock:
            self._is_aborted = True
            self._words.store(self.written_word, LAST)
            self._changed.notify_all()
        self._inner.abort()
        with self._writing:
            pass

    def stop(self, limit_s: float) -> bool:
        """End the thread, once its jobs are done or aborted; return whether it has ended."""
        with self._lock:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is threading.current_thread():
            return False
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._do(job)
            except BaseException as error:
                self._note(error)
                return

    def _next(self) -> Job | None:
        with self._lock:
            while not self._jobs and not self._is_stopping and not self._is_aborted:
                self._changed.wait()
            if self._is_aborted or not self._jobs:
                return None
            return self._jobs.popleft()

    def _note(self, error: BaseException) -> None:
        if self._is_aborted:
            return
        self.failed_at_s = time.monotonic()
        self.error = told(error, "a call on GPU arrays")

    def _do(self, job: Job) -> None:
        pieces = job.call.pieces
        count = self._most(pieces.n_pieces) if pieces.agrees else pieces.n_pieces
        for number in range(count):
            is_mine = number < pieces.n_pieces
            if is_mine and not self._wait(job.first + number + 1):
                return
            is_copied = is_mine and job.call.is_on_host
            source, out = job.call.slots.for_host(number)
            if is_copied:
                copy_in(pieces.piece(number).reads, source)
            job.call.run(number)
            if is_copied:
                self._write(pieces.piece(number).writes, out)
            if is_mine:
                self._say(job.first + number + 1)
        if pieces.agrees:  # the stream waits until the other ranks are through, too
            self._say(job.first + pieces.n_pieces + 1)

    def _write(self, copies: Sequence[Copy], slot: int) -> None:
        """Write a piece to a host array, unless the call was given up: its memory is the user's."""
        with self._writing:
            if not self._is_aborted:
                copy_out(copies, slot)

    def _most(self, count: int) -> int:
        """Return the largest number of pieces that any rank has."""
        numbers = np.array([count], np.int64)
        address = numbers.ctypes.data
        buffer = Buffer(address, (1,), "int64", 8, numbers)
        request = Request(Collective.ALL_REDUCE, buffer, buffer, ReduceOp.parse("max"))
        self._inner.backend.prepare(request).run(NEVER_S)
        return int(numbers[0])

    def _wait(self, value: int) -> bool:
        """Wait until the GPU reports so many pieces; return False if aborted."""
        pause_s = PAUSES_S[0]
        while self._words.load(self.read_word) < value:
            if self._is_aborted:
                return False
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, PAUSES_S[1])
        return not self._is_aborted

    def _say(self, value: int) -> None:
        with self._lock:
            if not self._is_aborted:
                self._words.store(self.written_word, value)
