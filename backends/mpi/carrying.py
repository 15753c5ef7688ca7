"""A stream of bytes between two ranks by messages of MPI, in place of a socket.

Outgoing bytes are copied into one of a few slots and sent from there. Receives are posted for the
same number of slots, in turn. So MPI never has addresses of the user's memory, and none of it is
left with MPI when a call is given up. Nothing here waits; every function is called under the lock
of the table of messages.
"""

from __future__ import annotations

from gpucoll.backends.mpi.words import MESSAGE_TAG, N_SLOTS, SLOT_BYTES, Carrier
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import call_foreign, load32

_FAILED = -1

_i64 = types.int64
_move_bytes = types.ExternalFunction("memmove", _i64(_i64, _i64, _i64))


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
def _has_ended(carrier: Carrier, request: int) -> bool:
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
    if not _has_ended(carrier, carrier.at.in_requests + 8 * (carrier.in_slot)):
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
    if not _has_ended(carrier, request):
        return _FAILED if carrier.error != 0 else 0
    memory, size_bytes = carrier.out_memory + slot * SLOT_BYTES, min(most_bytes, SLOT_BYTES)
    _move_bytes(memory, address, size_bytes)
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
    _move_bytes(address, carrier.in_memory + slot * SLOT_BYTES + start, size_bytes)
    carrier.in_start = start + size_bytes
    if start + size_bytes == carrier.in_stop:
        _listen(carrier, slot)
        carrier.in_slot = (slot + 1) % N_SLOTS
    return size_bytes
