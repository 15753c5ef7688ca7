"""The other processes of this host, shared by all communicators with the same ranks.

For each process this has its arena, mapped as far as it is used, and a descriptor that becomes
readable when the process has ended. A process is identified by its arena's memory: as long as that
is mapped here, no other arena has the same number.
"""

from __future__ import annotations

import os
import threading

import numpy as np
import numpy.typing as npt

from gpucoll.transport.shared import mapping
from gpucoll.transport.shared.peer_memory import FIRST_BYTES, GROWTHS, PeerArena

_known: dict[tuple[int, int], PeerProcess] = {}
_lock = threading.RLock()
"""Reentrant. Several threads may make and close communicators; and a user's finalizer, which a
garbage collection runs anywhere, may close one."""


def arena_words(size_bytes: int) -> npt.NDArray[np.int64]:
    """Return the `PeerArena` words of an arena that is not mapped yet."""
    # Not NumPy's memory: a forked child may share that, and would write here.
    words = np.frombuffer(bytearray(PeerArena.n_bytes), np.int64)
    words[PeerArena.size_bytes] = size_bytes
    return words


class PeerProcess:
    """Another process of this host: its arena, and a descriptor of its end.

    Attributes
    ----------
    life_fd : int
        Becomes readable when the process has ended.
    arena : array of int64
        The `PeerArena` words.
    """

    def __init__(self, key: tuple[int, int], arena_fd: int, arena_bytes: int, life_fd: int) -> None:
        self._key = key
        self._uses = 0
        self.arena = arena_words(arena_bytes)
        first = mapping.Mapping(arena_fd, min(FIRST_BYTES, arena_bytes), "a peer's arena")
        self.arena[PeerArena.mappings] = first.address
        self.life_fd = life_fd

    @property
    def arena_address(self) -> int:
        """The address of the words, for compiled code."""
        address: int = self.arena.ctypes.data
        return address

    def release(self) -> None:
        """Release it; the last communicator that does so unmaps and closes everything."""
        with _lock:
            self._uses -= 1
            if self._uses > 0:
                return
            del _known[self._key]
            os.close(self.life_fd)
            size_bytes = int(self.arena[PeerArena.size_bytes])
            for growth in range(GROWTHS + 1):
                if address := int(self.arena[PeerArena.mappings + growth]):
                    mapping.unmap(address, min(FIRST_BYTES << (2 * growth), size_bytes))


def meet(arena_fd: int, arena_bytes: int, life_fd: int) -> PeerProcess:
    """Return the process with this arena, and count one more use. It takes over `life_fd`."""
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
