"""Versions in the shared memory of a host: one process writes them, the others copy them.

The memory has slots for whole versions and a few words. The word LATEST names the last version and
its slot. Each reader has a word of its own, its pin. It stores there which slot it is about to copy
and then looks at LATEST again: if that is unchanged, the writer will see the pin before it takes
another slot (a hazard pointer). The writer takes a slot that is neither the latest nor pinned.
There are two slots more than pins, so it always finds one, even if readers are stopped or dead.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll import Communicator, SharedMemoryError
from gpucoll.api.host_memory import HostMemory
from gpucoll.transport.shared import ordering
from gpucoll.transport.shared.flags import EVERYBODY, FUTEX_WAIT, FUTEX_WAKE, NANOSECONDS, SYS_FUTEX

__all__ = [
    "CLOSED",
    "GONE",
    "LEFT",
    "SLICE_S",
    "VERSION_SHIFT",
    "Board",
    "end_of",
    "version_of",
    "wait_newer",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]
LINE_BYTES, PAGE_BYTES = 64, 4096
VERSION_SHIFT, END_SHIFT = 16, 14
SLOT_MASK = (1 << END_SHIFT) - 1
CLOSED, GONE, LEFT = 1, 2, 3
"""Why no version follows: the source has closed, is gone, or this host's carrier has closed."""
SLICE_S = 0.05
"""How long a wait sleeps at a time. Only a new version wakes it earlier."""

_system_call = ctypes.CDLL(None).syscall
_system_call.argtypes = [ctypes.c_long] * 4 + [ctypes.c_void_p] + [ctypes.c_long] * 2
_system_call.restype = ctypes.c_long


def version_of(word: int) -> int:
    """Return the number of the version that a word names; 0: there is none."""
    return word >> VERSION_SHIFT


def end_of(word: int) -> int:
    """Return why no further version follows; 0: one may follow."""
    return (word >> END_SHIFT) & 3


class Board:
    """The words and slots of one host. Collective over a communicator.

    Parameters
    ----------
    comm : Communicator
    n_pins : int
        Number of readers on this host.
    slot_bytes : int
        Size of a version.

    Attributes
    ----------
    latest : int
        Address of LATEST: ``version << 16 | end << 14 | slot``.
    memory : HostMemory
    """

    def __init__(self, comm: Communicator, n_pins: int, slot_bytes: int) -> None:
        self._n_pins, self._slot_bytes = n_pins, slot_bytes
        words_bytes = LINE_BYTES * (1 + n_pins)
        self._slots_at = -(-words_bytes // PAGE_BYTES) * PAGE_BYTES
        self._stride = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        size_bytes = self._slots_at + (n_pins + 2) * self._stride
        self.memory = HostMemory(comm, size_bytes, "published")
        self.latest = self.memory.address
        self._reserved: set[int] = set()

    def word(self) -> int:
        """Return LATEST."""
        return ordering.load(self.latest)

    def slot(self, word: int) -> Bytes:
        """Return the bytes of the version that a word names."""
        where = self._slots_at + (word & SLOT_MASK) * self._stride
        return self.memory.array(where, (self._slot_bytes,), np.uint8)

    # --- readers ----------------------------------------------------------------------------------

    def pin(self, place: int) -> int:
        """Keep the latest version in its slot until `unpin`; return the word that names it."""
        word = self.word()
        while True:
            ordering.store(self._pin_at(place), 1 + (word & SLOT_MASK))
            seen = ordering.load_after(self.latest)
            if seen == word:
                return word
            word = seen  # only if the writer has been here in these nanoseconds

    def unpin(self, place: int) -> None:
        """Release the slot that this place has pinned."""
        ordering.store(self._pin_at(place), 0)

    def _pin_at(self, place: int) -> int:
        return self.latest + LINE_BYTES * (1 + place)

    # --- the writer -------------------------------------------------------------------------------

    def free_slot(self) -> int:
        """Return the lowest slot that is neither the latest nor pinned. For the writer alone.

        Raises
        ------
        SharedMemoryError
            The host has no memory for it.
        """
        word = self.word()
        taken = {word & SLOT_MASK} if version_of(word) else set()
        taken.update(ordering.load_after(self._pin_at(place)) - 1 for place in range(self._n_pins))
        slot = min(set(range(self._n_pins + 2)) - taken)
        if slot not in self._reserved and self._slot_bytes:
            where = self._slots_at + slot * self._stride
            try:  # a lack of memory is an error here, and not a SIGBUS when it is written
                os.posix_fallocate(self.memory.fd, where, self._slot_bytes)
            except OSError as error:
                raise SharedMemoryError(
                    f"no shared memory for another version: {self._slot_bytes} bytes were refused "
                    f"({error.strerror}). Free memory, or let fewer ranks read at the same time"
                ) from error
            self._reserved.add(slot)
        return slot

    def announce(self, version: int, slot: int) -> None:
        """Make the version in a slot the latest, and wake all that wait."""
        ordering.store(self.latest, version << VERSION_SHIFT | slot)
        self._wake()

    def end(self, reason: int) -> None:
        """Note that no version follows, and wake all that wait."""
        word = self.word()
        if not end_of(word):
            ordering.store(self.latest, word | reason << END_SHIFT)
            self._wake()

    def _wake(self) -> None:
        _system_call(SYS_FUTEX, self.latest, FUTEX_WAKE, EVERYBODY, None, 0, 0)


def wait_newer(
    load: Callable[[], int],
    address: int,
    newer_than: int,
    until_s: float,
    look: Callable[[int], object],
) -> int:
    """Wait for a version newer than one; return the word that names it, or 0 after the deadline.

    Parameters
    ----------
    load : callable
        Returns LATEST, or raises an error that ends the wait.
    address : int
        Where LATEST is. The kernel wakes the wait when the writer has changed it.
    newer_than : int
        A version.
    until_s : float
        The deadline, by the monotonic clock.
    look : callable
        Is called with LATEST before each sleep, and raises if no version can follow.
    """
    while True:
        word = load()
        if version_of(word) > newer_than:
            return word
        look(word)
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return 0
        slice_ns = int(min(left_s, SLICE_S) * NANOSECONDS)
        timeout = (ctypes.c_long * 2)(slice_ns // NANOSECONDS, slice_ns % NANOSECONDS)
        low = word & 0xFFFFFFFF  # of a version's number, 16 bits: they differ at each new one
        _system_call(SYS_FUTEX, address, FUTEX_WAIT, low, timeout, 0, 0)
