"""Carriers that send messages between ranks of different hosts through MPI instead of a socket."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from gpucoll.backends.mpi.blocks import CommunicatorWords
from gpucoll.backends.mpi.carrying import carry_away, carry_here
from gpucoll.backends.mpi.ranks import keep_for_ever
from gpucoll.backends.mpi.words import N_SLOTS, SLOT_BYTES, Carrier, MpiWords

_SLEEP_S = 0.0001


class MpiCarrier:
    """Carries bytes to and from one rank.

    Parameters
    ----------
    words : CommunicatorWords
        The communicator's words, which live as long as this object.
    rank : int
        The other rank.
    """

    def __init__(self, words: CommunicatorWords, rank: int) -> None:
        self._mpi = words.library.mpi
        self._request_bytes = words.library.request_bytes
        self._words = mine = np.zeros(Carrier.n_words, np.int64)
        self.address = mine.ctypes.data
        self._slots = np.empty((2, N_SLOTS, SLOT_BYTES), np.uint8)
        self._status = np.zeros(words.library.status_bytes, np.uint8)
        mine[Carrier.mpi], mine[Carrier.peer] = words.words.ctypes.data, rank
        mine[Carrier.status] = self._status.ctypes.data
        mine[Carrier.in_memory], mine[Carrier.out_memory] = (
            slots.ctypes.data for slots in self._slots
        )
        mine[Carrier.in_requests :] = words.library.handle(self._mpi.REQUEST_NULL)

    @property
    def failure(self) -> str:
        """Why nothing can be carried any more."""
        return f"MPI: {self._mpi.Get_error_string(int(self._words[Carrier.error]))}"

    def requests(self, first: int) -> list[Any]:
        """Return receives or sends that MPI has not ended yet, as far as is known."""
        words = self._words[first : first + N_SLOTS]
        handles = words.view(np.uint64 if self._request_bytes == 8 else np.uint32)
        handles = handles[:: 8 // self._request_bytes]
        found = [self._mpi.Request.fromhandle(int(handle)) for handle in handles]
        return [request for request in found if request != self._mpi.REQUEST_NULL]


class Carriers:
    """Makes carriers, and ends them: `gpucoll.backends.cpu.world.message_wires.Carriers`.

    Parameters
    ----------
    words : CommunicatorWords
        The communicator's words.
    """

    def __init__(self, words: CommunicatorWords) -> None:
        self._words = words
        self._made: list[MpiCarrier] = []

    @property
    def functions(self) -> tuple[int, int]:
        """The addresses of the functions that send and receive."""
        return carry_away.address, carry_here.address

    def to(self, rank: int) -> MpiCarrier:
        """Return a new carrier to a rank; each end makes its own."""
        self._made.append(MpiCarrier(self._words, rank))
        return self._made[-1]

    def close(self, limit_s: float) -> None:
        """Have MPI end what is under way; nothing uses the carriers any more.

        Requests that MPI does not end within `limit_s` are kept for ever, with the communicator.
        """
        made, self._made = self._made, []
        listening = [each for carrier in made for each in carrier.requests(Carrier.in_requests)]
        for request in listening:
            request.Cancel()
        sending = [each for carrier in made for each in carrier.requests(Carrier.out_requests)]
        pending, until = listening + sending, time.monotonic() + limit_s
        while pending := [request for request in pending if not _has_ended(request)]:
            if time.monotonic() > until:
                keep_for_ever((made, pending))
                self._words.words[MpiWords.is_given_up] = 1
                return
            time.sleep(_SLEEP_S)


def _has_ended(request: Any) -> bool:
    """Return whether MPI has ended a request; False if MPI cannot even test it."""
    try:
        return bool(request.Test())
    except RuntimeError:  # mpi4py's Exception is one
        return False
