"""Sends, receives and probes for compiled loops: rows, and the table that contains them.

Their fields are `words.Transfer` and `words.TransferTable`. Only a thread that holds the table's
lock may touch the table's content. Any thread may check whether a row is over.
"""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import exchange64, get, load64_acquire, put, store64_release
from gpucoll.transport.shared.words import (
    TRANSFER_WORDS,
    Kind,
    Mode,
    Progress,
    Transfer,
    TransferTable,
)

ROW_BYTES = 8 * TRANSFER_WORDS
KIND, PEER, TAG = int(Transfer.KIND), int(Transfer.PEER), int(Transfer.TAG)
ADDRESS, SIZE_BYTES = int(Transfer.ADDRESS), int(Transfer.SIZE_BYTES)
DTYPE, STATE = int(Transfer.DTYPE), int(Transfer.STATE)
DONE_BYTES, WAY, PLACE = int(Transfer.DONE_BYTES), int(Transfer.WAY), int(Transfer.PLACE)
ACKNOWLEDGEMENT, MODE = int(Transfer.ACKNOWLEDGEMENT), int(Transfer.MODE)
FOUND_PEER, FOUND_TAG = int(Transfer.FOUND_PEER), int(Transfer.FOUND_TAG)
FOUND_BYTES, FOUND_DTYPE = int(Transfer.FOUND_BYTES), int(Transfer.FOUND_DTYPE)
FOUND_NUMBER, NUMBER, HELD = (
    int(Transfer.FOUND_NUMBER),
    int(Transfer.NUMBER),
    int(Transfer.HELD),
)
DIMENSIONS, DIMENSION = int(Transfer.DIMENSIONS), int(Transfer.DIMENSION)
DESCRIPTION, DESCRIPTION_BYTES = int(Transfer.DESCRIPTION), int(Transfer.DESCRIPTION_BYTES)
TIMEOUT_NS, DEADLINE_NS = int(Transfer.TIMEOUT_NS), int(Transfer.DEADLINE_NS)
NEXT, IS_WAITING = int(Transfer.NEXT), int(Transfer.IS_WAITING)

SEND, RECV, PROBE, TAKE = int(Kind.SEND), int(Kind.RECV), int(Kind.PROBE), int(Kind.TAKE)
SYNCHRONOUS, FOLLOWS = int(Mode.SYNCHRONOUS), int(Mode.FOLLOWS)
WITHDRAWS = int(Mode.WITHDRAWS)
NEW, WAITING, UNDER_WAY = int(Progress.NEW), int(Progress.WAITING), int(Progress.UNDER_WAY)
DONE, MISFIT = int(Progress.DONE), int(Progress.MISFIT)
GONE, DROPPED = int(Progress.GONE), int(Progress.DROPPED)
EXPIRED = int(Progress.EXPIRED)
ANY = -1

LOCK, PENDING = int(TransferTable.LOCK), int(TransferTable.PENDING)
FINISHED, MOVES = int(TransferTable.FINISHED), int(TransferTable.MOVES)
IS_DEAD, CONTEXT = int(TransferTable.IS_DEAD), int(TransferTable.CONTEXT)
CALLS, PEERS = int(TransferTable.CALLS), int(TransferTable.PEERS)
FIRST, LAST = int(TransferTable.FIRST), int(TransferTable.LAST)
FIRST_POSTED, LAST_POSTED = int(TransferTable.FIRST_POSTED), int(TransferTable.LAST_POSTED)
N_WANTED, N_ANY = int(TransferTable.N_WANTED), int(TransferTable.N_ANY)
FIRST_HELD, LAST_HELD = int(TransferTable.FIRST_HELD), int(TransferTable.LAST_HELD)
LAST_SENDER = int(TransferTable.LAST_SENDER)
FREE_WORDS, N_FREE_WORDS = int(TransferTable.FREE_WORDS), int(TransferTable.N_FREE_WORDS)
FETCH, LEFT, WIRES = int(TransferTable.FETCH), int(TransferTable.LEFT), int(TransferTable.WIRES)
NEEDS_ROOM, TURN, NOTED = (
    int(TransferTable.NEEDS_ROOM),
    int(TransferTable.TURN),
    int(TransferTable.NOTED),
)


@inline
def try_lock(table):
    """Take the table's lock, unless another thread has it; return whether it was taken."""
    return exchange64(table + 8 * LOCK, 1) == 0


@inline
def unlock(table):
    """Release the table's lock."""
    store64_release(table + 8 * LOCK, 0)


@inline
def state_of(row):
    """Return how far a row is; if it is over, later loads see its results."""
    return load64_acquire(row + 8 * STATE)


@inline
def finish(table, row, state):
    """Note that a row is over: from here on its owner may read it and reuse it."""
    put(table, PENDING, get(table, PENDING) - 1)
    put(table, FINISHED, get(table, FINISHED) + 1)
    store64_release(row + 8 * STATE, state)


@inline
def append(table, first, last, item, next_field):
    """Append an item to one of the table's lists."""
    put(item, next_field, 0)
    if get(table, first) == 0:
        put(table, first, item)
    else:
        put(get(table, last), next_field, item)
    put(table, last, item)


@inline
def remove(table, first, last, before, item, next_field):
    """Remove an item from one of the table's lists; `before` is the one before it, or 0."""
    after = get(item, next_field)
    if before == 0:
        put(table, first, after)
    else:
        put(before, next_field, after)
    if get(table, last) == item:
        put(table, last, before)
