"""A stream of bytes between two ranks by messages of MPI, in place of a socket.

Outgoing bytes are copied into one of a few slots and sent from there. Receives are posted for the
same number of slots, in turn. So MPI never has addresses of the user's memory, and none of it is
left with MPI when a call is given up. Nothing here waits; every function is called under the lock
of the table of messages.
"""

from __future__ import annotations

from gpucoll.backends.mpi.words import MESSAGE_TAG, N_SLOTS, SLOT_BYTES, Carrier, Word
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import call_foreign, get, load32, put

_COMMUNICATOR, _BYTE = int(Word.COMMUNICATOR), int(Word.BYTE)
_SEND, _RECEIVE, _TEST = int(Word.SEND), int(Word.RECEIVE), int(Word.TEST)
_GET_COUNT = int(Word.GET_COUNT)
_WORDS, _PEER, _FLAG = int(Carrier.WORDS), int(Carrier.PEER), int(Carrier.FLAG)
_COUNT, _ERROR, _STATUS = int(Carrier.COUNT), int(Carrier.ERROR), int(Carrier.STATUS)
_IS_LISTENING, _IN_SLOT = int(Carrier.IS_LISTENING), int(Carrier.IN_SLOT)
_IN_START, _IN_STOP = int(Carrier.IN_START), int(Carrier.IN_STOP)
_IN_MEMORY, _IN_REQUESTS = int(Carrier.IN_MEMORY), int(Carrier.IN_REQUESTS)
_OUT_SLOT, _OUT_MEMORY = int(Carrier.OUT_SLOT), int(Carrier.OUT_MEMORY)
_OUT_REQUESTS = int(Carrier.OUT_REQUESTS)
_FAILED = -1

_i64 = types.int64
_move_bytes = types.ExternalFunction("memmove", _i64(_i64, _i64, _i64))


@inline
def _has_failed(carrier, error):
    """Note MPI's return value; return whether it is an error."""
    if error != 0:
        put(carrier, _ERROR, error)
    return error != 0


@inline
def _issue(carrier, function, memory, size_bytes, request):
    """Begin to send or receive a slot."""
    words = get(carrier, _WORDS)
    byte, comm, peer = get(words, _BYTE), get(words, _COMMUNICATOR), get(carrier, _PEER)
    error = call_foreign(
        get(words, function), memory, size_bytes, byte, peer, MESSAGE_TAG, comm, request, 0, 0, 0
    )
    _has_failed(carrier, error)


@inline
def _has_ended(carrier, request):
    """Return whether a request has ended; True also for a null request."""
    flag = carrier + 8 * _FLAG
    put(carrier, _FLAG, 0)
    test = get(get(carrier, _WORDS), _TEST)
    error = call_foreign(test, request, flag, get(carrier, _STATUS), 0, 0, 0, 0, 0, 0, 0)
    return not _has_failed(carrier, error) and load32(flag) != 0


@inline
def _listen(carrier, slot):
    memory = get(carrier, _IN_MEMORY) + slot * SLOT_BYTES
    _issue(carrier, _RECEIVE, memory, SLOT_BYTES, carrier + 8 * (_IN_REQUESTS + slot))


@inline
def _has_come(carrier):
    """Return whether the next slot has bytes that were not taken yet."""
    if get(carrier, _IN_START) < get(carrier, _IN_STOP):
        return True
    if not _has_ended(carrier, carrier + 8 * (_IN_REQUESTS + get(carrier, _IN_SLOT))):
        return False
    words, count = get(carrier, _WORDS), carrier + 8 * _COUNT
    put(carrier, _COUNT, 0)
    byte, function = get(words, _BYTE), get(words, _GET_COUNT)
    error = call_foreign(function, get(carrier, _STATUS), byte, count, 0, 0, 0, 0, 0, 0, 0)
    if _has_failed(carrier, error):
        return False
    put(carrier, _IN_START, 0)
    put(carrier, _IN_STOP, load32(count))
    return True


@compiled_when_used()
def carry_away(carrier, address, most_bytes):
    """Send as much as a slot takes; return the bytes, 0: none now, -1: MPI has failed."""
    slot = get(carrier, _OUT_SLOT)
    request = carrier + 8 * (_OUT_REQUESTS + slot)
    if get(carrier, _ERROR) != 0:
        return _FAILED
    if not _has_ended(carrier, request):
        return _FAILED if get(carrier, _ERROR) != 0 else 0
    memory, size_bytes = get(carrier, _OUT_MEMORY) + slot * SLOT_BYTES, min(most_bytes, SLOT_BYTES)
    _move_bytes(memory, address, size_bytes)
    _issue(carrier, _SEND, memory, size_bytes, request)
    put(carrier, _OUT_SLOT, (slot + 1) % N_SLOTS)
    return _FAILED if get(carrier, _ERROR) != 0 else size_bytes


@compiled_when_used()
def carry_here(carrier, address, most_bytes):
    """Take bytes that arrived; return how many, 0: none now, -1: MPI has failed."""
    if get(carrier, _IS_LISTENING) == 0:
        put(carrier, _IS_LISTENING, 1)
        for slot in range(N_SLOTS):
            _listen(carrier, slot)
    if get(carrier, _ERROR) != 0:
        return _FAILED
    if not _has_come(carrier):
        return _FAILED if get(carrier, _ERROR) != 0 else 0
    slot, start = get(carrier, _IN_SLOT), get(carrier, _IN_START)
    size_bytes = min(most_bytes, get(carrier, _IN_STOP) - start)
    _move_bytes(address, get(carrier, _IN_MEMORY) + slot * SLOT_BYTES + start, size_bytes)
    put(carrier, _IN_START, start + size_bytes)
    if start + size_bytes == get(carrier, _IN_STOP):
        _listen(carrier, slot)
        put(carrier, _IN_SLOT, (slot + 1) % N_SLOTS)
    return size_bytes
