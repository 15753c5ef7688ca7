"""Peers' arenas, mapped into this process once for all communicators of the same ranks."""

from __future__ import annotations

import os
import threading
from typing import Any

from gpucoll.transport.shared import mapping

_mapped: dict[tuple[int, int], list[Any]] = {}
"""By the identity of the memory: how many use it, and its mapping."""
_mapped_lock = threading.Lock()  # communicators may be made and closed in several threads


def map_arena(fd: int, size_bytes: int) -> int:
    """Return where a peer's arena is mapped; once more in use."""
    status = os.fstat(fd)
    key = (status.st_dev, status.st_ino)
    with _mapped_lock:
        if key not in _mapped:
            _mapped[key] = [0, mapping.Mapping(fd, size_bytes, "a peer's arena")]
        entry = _mapped[key]
        entry[0] += 1
        address: int = entry[1].address
        return address


def release_arena(address: int) -> None:
    """Let go of a peer's arena; the last one unmaps it."""
    with _mapped_lock:
        for key, entry in list(_mapped.items()):
            if entry[1].address == address:
                entry[0] -= 1
                if entry[0] == 0:
                    entry[1].unmap()
                    del _mapped[key]
                return


def _renew_in_child() -> None:
    global _mapped_lock
    _mapped_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_in_child)
