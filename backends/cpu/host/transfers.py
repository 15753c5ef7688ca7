"""A table of point-to-point operations, as compiled loops read it: a row for each.

Its fields are `words.Transfer`; sends and receives are in `sending` and `receiving`.
"""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline
from gpucoll.transport.shared.words import TRANSFER_WORDS, Context, Kind, Progress, Transfer

ROW_BYTES = 8 * TRANSFER_WORDS
KIND, PEER, TAG = int(Transfer.KIND), int(Transfer.PEER), int(Transfer.TAG)
ADDRESS, SIZE_BYTES = int(Transfer.ADDRESS), int(Transfer.SIZE_BYTES)
DTYPE, STATE = int(Transfer.DTYPE), int(Transfer.STATE)
DONE_BYTES, POST = int(Transfer.DONE_BYTES), int(Transfer.POST)
FOUND_PEER, FOUND_TAG = int(Transfer.FOUND_PEER), int(Transfer.FOUND_TAG)
SEND, RECV, PROBE = int(Kind.SEND), int(Kind.RECV), int(Kind.PROBE)
WAITING, UNDER_WAY = int(Progress.WAITING), int(Progress.UNDER_WAY)
DONE, MISFIT = int(Progress.DONE), int(Progress.MISFIT)
ANY = -1
KEPT_ASIDE = 1
"""In the word POST of a receive: nobody has asked for it."""
LAST_SENDER = int(Context.MESSAGE_ROWS) + FOUND_PEER
"""Whose message came last, in the context's own row: ANY_SOURCE looks at the next rank first."""


@inline
def row_of(table, place):
    """Return the address of an operation's row."""
    return table + place * ROW_BYTES
