"""The board: what the ranks of one host know of the other hosts, in a small shared memory.

The leader receives news from the other hosts and writes it on the board; every rank reads the board
where it waits. Flags are loaded and stored like those of the segment.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final, NamedTuple

from gpucoll.errors import StateError
from gpucoll.transport.shared import mapping, ordering
from gpucoll.transport.shared.layout import LINE_BYTES, REASON_BYTES

TEXT_BYTES: Final = 8192
_STATE, _KIND, _AUTHOR, _LENGTH, _N_CLOSED, _ASKED = (8 * place for place in range(6))
_FREE, _TAKEN, _WRITTEN = range(3)
_TEXT: Final = LINE_BYTES
_CALLS: Final = _TEXT + TEXT_BYTES


class Failure(NamedTuple):
    """Why a communicator is broken.

    Attributes
    ----------
    kind : int
        The error's place in `gpucoll.group.world.failures.KINDS`.
    author : int
        The rank that wrote the text.
    text : str
        The error text.
    """

    kind: int
    author: int
    text: str


class Board:
    """This process's mapping of the board.

    Parameters
    ----------
    fd : int
        Descriptor of the memory; the caller keeps it.
    n_here, world_size : int
        Number of ranks on this host, and on all hosts.
    """

    def __init__(self, fd: int, n_here: int, world_size: int) -> None:
        self._closed_at = _CALLS + n_here * LINE_BYTES
        self._reasons_at = self._closed_at + 8 * world_size
        self._mapping = mapping.Mapping(fd, size_bytes(n_here, world_size), "the board of hosts")

    def _at(self, offset: int) -> int:
        if not self._mapping.is_mapped:
            raise StateError("the communicator is closed")
        return self._mapping.address + offset

    # --- why it is broken -------------------------------------------------------------------------

    def write(self, failure: Failure) -> bool:
        """Write why the communicator is broken, unless that was done; return whether it wrote."""
        if ordering.compare_exchange(self._at(_STATE), _FREE, _TAKEN) != _FREE:
            return False
        data = failure.text.encode(errors="replace")[:TEXT_BYTES]
        ctypes.memmove(self._at(_TEXT), data, len(data))
        for place, word in ((_KIND, failure.kind), (_AUTHOR, failure.author), (_LENGTH, len(data))):
            ordering.store(self._at(place), word)
        ordering.store(self._at(_STATE), _WRITTEN)
        return True

    def failure(self) -> Failure | None:
        """Return why the communicator is broken; None: nothing was written."""
        if ordering.load(self._at(_STATE)) != _WRITTEN:
            return None
        kind, author, length = (ordering.load(self._at(p)) for p in (_KIND, _AUTHOR, _LENGTH))
        text = ctypes.string_at(self._at(_TEXT), length).decode(errors="replace")
        return Failure(kind, author, text)

    def ask(self, word: int) -> None:
        """Ask the leader to inquire about a call on GPU arrays, unless a rank has asked before."""
        ordering.compare_exchange(self._at(_ASKED), 0, word)

    def asked(self) -> int:
        """Return the call that the leader was asked about; 0: none."""
        return ordering.load(self._at(_ASKED))

    # --- where the ranks of this host are ---------------------------------------------------------

    def enter(self, place: int, number: int) -> None:
        """Record that a rank of this host has begun its call of this number."""
        ordering.store(self._at(_CALLS + place * LINE_BYTES), number)

    def entered_address(self, place: int) -> int:
        """Return the address of the number that `enter` writes, for compiled code."""
        return self._at(_CALLS + place * LINE_BYTES)

    def entered(self, place: int) -> int:
        """Return the number of the last call that a rank of this host has begun."""
        return ordering.load(self._at(_CALLS + place * LINE_BYTES))

    # --- who has closed ---------------------------------------------------------------------------

    def note_closed(self, rank: int, number: int, reason: str) -> None:
        """Record that a rank, on any host, has closed after this call."""
        data = reason.encode(errors="replace")[: REASON_BYTES - 1] + b"\0"
        ctypes.memmove(self._at(self._reasons_at + rank * REASON_BYTES), data, len(data))
        ordering.store(self._at(self._closed_at + 8 * rank), number + 1)
        ordering.store(self._at(_N_CLOSED), ordering.load(self._at(_N_CLOSED)) + 1)

    def has_closed_ranks(self) -> bool:
        """Return whether any rank has closed, as `closed_after` reports."""
        return ordering.load(self._at(_N_CLOSED)) != 0

    @property
    def n_closed_address(self) -> int:
        """Address of the number of ranks that have closed, for compiled code."""
        return self._at(_N_CLOSED)

    def closed_after(self, rank: int) -> int | None:
        """Return the number of the last call of a rank that has closed; None: it has not closed."""
        number = ordering.load(self._at(self._closed_at + 8 * rank))
        return number - 1 if number else None

    def reason_of(self, rank: int) -> str:
        """Return why a rank has closed, as the end of "it closed the communicator"."""
        data = ctypes.string_at(self._at(self._reasons_at + rank * REASON_BYTES), REASON_BYTES)
        return data.partition(b"\0")[0].decode(errors="replace")

    def close(self) -> None:
        """Unmap the memory."""
        self._mapping.unmap()


def size_bytes(n_here: int, world_size: int) -> int:
    """Return the size of a board."""
    return _CALLS + n_here * LINE_BYTES + (8 + REASON_BYTES) * world_size


def create(n_here: int, world_size: int) -> list[int]:
    """Return descriptors of new memory for a board, and of the eventfd that wakes the leader."""
    board = mapping.create(
        "gpucoll-board",
        size_bytes(n_here, world_size),
        reserve_bytes=size_bytes(n_here, world_size),
    )
    try:
        return [board, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)]
    except BaseException:
        os.close(board)
        raise
