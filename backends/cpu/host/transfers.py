"""Sends, receives and probes for compiled loops: rows, and the table that contains them.

Their fields are `words.Transfer` and `words.TransferTable`. Only a thread that holds the table's
lock may touch the table's content. Any thread may check whether a row is over.
"""

from __future__ import annotations

from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import exchange64, load64_acquire, store64_release
from gpucoll.transport.shared.words import LinkedList, Transfer, TransferTable

ANY = -1


@inline
def try_lock(table: TransferTable) -> bool:
    """Take the table's lock, unless another thread has it; return whether it was taken."""
    return exchange64(table.at.lock, 1) == 0


@inline
def unlock(table: TransferTable) -> None:
    """Release the table's lock."""
    store64_release(table.at.lock, 0)


@inline
def state_of(row: Transfer) -> int:
    """Return how far a row is; if it is over, later loads see its results."""
    return load64_acquire(row.at.state)


@inline
def finish(table: TransferTable, row: Transfer, state: int) -> None:
    """Note that a row is over: from here on its owner may read it and reuse it."""
    table.pending -= 1
    table.finished += 1
    store64_release(row.at.state, state)


@inline
def append(items: LinkedList, item: int, next_field: int) -> None:
    """Append an item, of which this field names the next, to a list."""
    Words(item)[next_field] = 0
    if items.first == 0:
        items.first = item
    else:
        Words(items.last)[next_field] = item
    items.last = item


@inline
def remove(items: LinkedList, before: int, item: int, next_field: int) -> None:
    """Remove an item from a list; `before` is the one before it, or 0."""
    after = Words(item)[next_field]
    if before == 0:
        items.first = after
    else:
        Words(before)[next_field] = after
    if items.last == item:
        items.last = before
