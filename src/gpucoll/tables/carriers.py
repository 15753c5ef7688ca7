"""How versions come to other hosts: a thread of the source and one of each other host's carrier.

The carrier is the lowest rank of its host. It asks the source for a version newer than what its
host has, receives it into a free slot and announces it there. Each pair has a communicator of its
own, so that a loss ends only what the two had to do with each other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll import Communicator, DeadlineError, GpucollError, MessageWork, SharedMemoryError
from gpucoll.tables.board import CLOSED, GONE, LEFT, SLICE_S, Board, end_of, version_of, wait_newer

__all__ = ["Carrier", "Server"]

AnyArray: TypeAlias = npt.NDArray[Any]
ASK, VERSION, CONTENT = 1, 2, 3
"""Tags."""
NOTHING = np.zeros(1, np.int64)
"""In the place of a version: none follows."""
FOR_EVER_S = 1_000_000.0
"""Deadline of the messages: the other rank may be stopped for as long as it likes."""
ENDING_S = 0.1
"""How long to wait for messages to a rank that does not take them any more."""


class _StopError(Exception):
    """The thread is to end."""


class _EndedError(Exception):
    """The source has closed, and the last version has been taken."""


class _Thread:
    """A thread that exchanges messages with one other rank.

    Parameters
    ----------
    board : Board
        That of this host.
    pair : Communicator
        The source and a carrier. It is closed with the thread.
    """

    def __init__(self, board: Board, pair: Communicator) -> None:
        self._board, self._pair, self._other = board, pair, 1 - pair.rank
        self._stop = threading.Event()
        self._is_orderly = False
        """Whether the two have told each other that nothing follows."""
        self._thread = threading.Thread(target=self._run, name="gpucoll-published", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(_StopError, GpucollError):
            self._carry()

    def _carry(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End the thread, and give up what it has under way."""
        self._stop.set()
        self._thread.join()
        if not self._is_orderly:
            self._pair.abort()  # else `close` waits for a rank that may be stopped
        with contextlib.suppress(GpucollError):
            self._pair.close(timeout_s=ENDING_S)

    def _check(self) -> None:
        if self._stop.is_set():
            raise _StopError

    def _wait(self, work: MessageWork[Any]) -> None:
        while True:
            try:
                work.wait(SLICE_S)
                return
            except DeadlineError:  # of this wait; the message goes on
                if work.done() and (error := work.exception()) is not None:
                    raise error from None
            if self._stop.is_set():
                work.withdraw()
                raise _StopError

    def _send(self, array: AnyArray, tag: int, *, synchronous: bool = False) -> None:
        how: Any = {"async_op": True, "timeout_s": FOR_EVER_S, "synchronous": synchronous}
        self._wait(self._pair.send(array, self._other, tag, **how))

    def _receive(self, array: AnyArray, tag: int) -> None:
        how: Any = {"async_op": True, "timeout_s": FOR_EVER_S}
        self._wait(self._pair.recv(array, self._other, tag, **how))


class Server(_Thread):
    """Sends the source's versions to the carrier of another host.

    Parameters
    ----------
    board, pair
    place : int
        Of the pin of this thread.
    """

    def __init__(self, board: Board, pair: Communicator, place: int) -> None:
        self._place = place
        super().__init__(board, pair)

    def finish(self, until_s: float) -> None:
        """Let the carrier take the last version and hear that the source has closed."""
        self._thread.join(max(until_s - time.monotonic(), 0.0))

    def _carry(self) -> None:
        asked = np.zeros(1, np.int64)
        while True:
            self._receive(asked, ASK)
            try:
                self._wait_newer(int(asked[0]))
            except _EndedError:
                self._send(NOTHING, VERSION, synchronous=True)
                self._is_orderly = True
                return
            word = self._board.pin(self._place)
            try:
                self._send(np.array([version_of(word)]), VERSION)
                self._send(self._board.slot(word), CONTENT)
            finally:
                self._board.unpin(self._place)

    def _wait_newer(self, version: int) -> None:
        board = self._board
        while not wait_newer(board.word, board.latest, version, time.monotonic() + 1, self._look):
            pass

    def _look(self, word: int) -> None:
        self._check()
        if end_of(word):
            raise _EndedError


class Carrier(_Thread):
    """Receives the source's versions, and is the writer of its host's board."""

    def _run(self) -> None:
        reason = GONE
        try:
            self._carry()
        except _EndedError:
            reason = CLOSED
        except SharedMemoryError:
            reason = LEFT
        except (_StopError, GpucollError):
            pass
        finally:
            if not self._stop.is_set():
                self._board.end(reason)

    def _carry(self) -> None:
        came = np.zeros(1, np.int64)
        while True:
            self._send(np.array([version_of(self._board.word())]), ASK)
            self._receive(came, VERSION)
            if not came[0]:
                self._is_orderly = True
                raise _EndedError
            slot = self._board.free_slot()
            self._receive(self._board.slot(slot), CONTENT)
            self._board.announce(int(came[0]), slot)
