"""Carriers: messages between ranks of different hosts through MPI instead of a socket.

A carrier is a stream of bytes between two ranks by messages of MPI. Outgoing bytes are copied into
one of a few slots and sent from there. Receives are posted for the same number of slots, in turn.
So MPI never has addresses of the user's memory, and none of it is left with MPI when a call is
given up. No compiled function here waits; each is called under the lock of the table of messages.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from gpucoll.backends.mpi.backend import CommunicatorWords
from gpucoll.backends.mpi.ranks import keep_for_ever
from gpucoll.backends.mpi.words import MESSAGE_TAG, N_SLOTS, SLOT_BYTES, Carrier, MpiWords
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import call_foreign, load32
from gpucoll.transport.shared.libc import memmove

# --- in compiled code -----------------------------------------------------------------------------


_FAILED = -1


@inline
def _has_failed(carrier: Carrier, error: int) -> bool:
    """Note MPI's return value; return whether it is an error."""
    if error != 0:
        carrier.error = error
    return error != 0


@inline
def _issue(carrier: Carrier, function: int, memory: int, size_bytes: int, request: int) -> None:
    """Begin to send or receive a slot."""
    words = carrier.mpi
    byte, comm, peer = words.byte, words.communicator, carrier.peer
    error = call_foreign(
        function, memory, size_bytes, byte, peer, MESSAGE_TAG, comm, request, 0, 0, 0
    )
    _has_failed(carrier, error)


@inline
def _slot_has_ended(carrier: Carrier, request: int) -> bool:
    """Return whether a request has ended; True also for a null request."""
    flag = carrier.at.flag
    carrier.flag = 0
    test = carrier.mpi.test
    error = call_foreign(test, request, flag, carrier.status, 0, 0, 0, 0, 0, 0, 0)
    return not _has_failed(carrier, error) and load32(flag) != 0


@inline
def _listen(carrier: Carrier, slot: int) -> None:
    memory = carrier.in_memory + slot * SLOT_BYTES
    _issue(carrier, carrier.mpi.receive, memory, SLOT_BYTES, carrier.at.in_requests + 8 * slot)


@inline
def _has_come(carrier: Carrier) -> bool:
    """Return whether the next slot has bytes that were not taken yet."""
    if carrier.in_start < carrier.in_stop:
        return True
    if not _slot_has_ended(carrier, carrier.at.in_requests + 8 * (carrier.in_slot)):
        return False
    words, count = carrier.mpi, carrier.at.count
    carrier.count = 0
    byte, function = words.byte, words.get_count
    error = call_foreign(function, carrier.status, byte, count, 0, 0, 0, 0, 0, 0, 0)
    if _has_failed(carrier, error):
        return False
    carrier.in_start = 0
    carrier.in_stop = load32(count)
    return True


@compiled_when_used()
def carry_away(carrier: Carrier, address: int, most_bytes: int) -> int:
    """Send as much as a slot takes; return the bytes, 0: none now, -1: MPI has failed."""
    slot = carrier.out_slot
    request = carrier.at.out_requests + 8 * slot
    if carrier.error != 0:
        return _FAILED
    if not _slot_has_ended(carrier, request):
        return _FAILED if carrier.error != 0 else 0
    memory, size_bytes = carrier.out_memory + slot * SLOT_BYTES, min(most_bytes, SLOT_BYTES)
    memmove(memory, address, size_bytes)
    _issue(carrier, carrier.mpi.send, memory, size_bytes, request)
    carrier.out_slot = (slot + 1) % N_SLOTS
    return _FAILED if carrier.error != 0 else size_bytes


@compiled_when_used()
def carry_here(carrier: Carrier, address: int, most_bytes: int) -> int:
    """Take bytes that arrived; return how many, 0: none now, -1: MPI has failed."""
    if carrier.is_listening == 0:
        carrier.is_listening = 1
        for slot in range(N_SLOTS):
            _listen(carrier, slot)
    if carrier.error != 0:
        return _FAILED
    if not _has_come(carrier):
        return _FAILED if carrier.error != 0 else 0
    slot, start = carrier.in_slot, carrier.in_start
    size_bytes = min(most_bytes, carrier.in_stop - start)
    memmove(address, carrier.in_memory + slot * SLOT_BYTES + start, size_bytes)
    carrier.in_start = start + size_bytes
    if start + size_bytes == carrier.in_stop:
        _listen(carrier, slot)
        carrier.in_slot = (slot + 1) % N_SLOTS
    return size_bytes


# --- for Python -----------------------------------------------------------------------------------


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
