"""The other processes of this host, once for all communicators with the same ranks.

Of each its arena, mapped as far as it is used, and a descriptor that says when it has ended. A
process is known by the memory of its arena: as long as that is mapped here nothing else has its
number.
"""

from __future__ import annotations

import os
import threading

import numpy as np
import numpy.typing as npt

from gpucoll.transport.shared import mapping
from gpucoll.transport.shared.peer_arena import ARENA_WORDS, FIRST_BYTES, GROWTHS, PeerArena

__all__ = ["PeerProcess", "arena_words", "meet"]

_known: dict[tuple[int, int], PeerProcess] = {}
_lock = threading.RLock()
"""Communicators may be made and closed in several threads; and a user's finalizer, which a garbage
collection calls anywhere, may close one."""


def arena_words(size_bytes: int) -> npt.NDArray[np.int64]:
    """Return the `PeerArena` words of an arena that is not mapped yet."""
    # Not NumPy's memory: that may be shared with a forked child, who writes here.
    words = np.frombuffer(bytearray(8 * ARENA_WORDS), np.int64)
    words[PeerArena.SIZE_BYTES] = size_bytes
    return words


class PeerProcess:
    """Another process of this host: its arena, and whether it has ended.

    Attributes
    ----------
    life_fd : int
        Readable when the process has ended.
    arena : array of int64
        The `PeerArena` words.
    """

    def __init__(self, key: tuple[int, int], arena_fd: int, arena_bytes: int, life_fd: int) -> None:
        self._key = key
        self._uses = 0
        self.arena = arena_words(arena_bytes)
        first = mapping.Mapping(arena_fd, min(FIRST_BYTES, arena_bytes), "a peer's arena")
        self.arena[PeerArena.ADDRESS] = first.address
        self.life_fd = life_fd

    @property
    def arena_address(self) -> int:
        """Where the words are that compiled code gets."""
        address: int = self.arena.ctypes.data
        return address

    def release(self) -> None:
        """Let go of it; the last communicator unmaps and closes what there is."""
        with _lock:
            self._uses -= 1
            if self._uses > 0:
                return
            del _known[self._key]
            os.close(self.life_fd)
            size_bytes = int(self.arena[PeerArena.SIZE_BYTES])
            for growth in range(GROWTHS + 1):
                if address := int(self.arena[PeerArena.ADDRESS + growth]):
                    mapping.unmap(address, min(FIRST_BYTES << (2 * growth), size_bytes))


def meet(arena_fd: int, arena_bytes: int, life_fd: int) -> PeerProcess:
    """Return the process with this arena, once more in use; `life_fd` belongs to it."""
    status = os.fstat(arena_fd)
    key = (status.st_dev, status.st_ino)
    with _lock:
        if key not in _known:
            _known[key] = PeerProcess(key, arena_fd, arena_bytes, life_fd)
        else:
            os.close(life_fd)
        known = _known[key]
        known._uses += 1
        return known


def _renew_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_in_child)
