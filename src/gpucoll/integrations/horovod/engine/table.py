"""Who has submitted what: a table that is the same on every rank after every cycle."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Entry", "Ready", "Table"]


class Ready(Protocol):
    """What no rank is missing in: an `Entry`, or a `Form` that all ranks have told at once."""

    @property
    def key(self) -> int: ...
    @property
    def differs(self) -> bool: ...


class Entry:
    """A name that some ranks have submitted."""

    __slots__ = ("differs", "digest", "key", "ranks")

    def __init__(self, key: int, digest: int) -> None:
        self.key, self.digest = key, digest
        self.ranks = 0
        """Bit r: rank r has submitted it."""
        self.differs = False
        """Whether two ranks have submitted different things under this name."""


class Table:
    """The names that wait for ranks.

    Parameters
    ----------
    world_size : int
        Ranks of the process set.
    """

    def __init__(self, world_size: int) -> None:
        self._all = (1 << world_size) - 1
        self.entries: dict[int, Entry] = {}
        self.joined = 0
        """Bit r: rank r has joined, and counts for every name."""
        self.last_joined = -1

    def add(self, rank: int, key: int, digest: int, ready: list[Ready]) -> None:
        """Note that a rank has submitted a name; append its entry to `ready` if it was the last."""
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = Entry(key, digest)
        elif entry.digest != digest:
            entry.differs = True
        entry.ranks |= 1 << rank
        if entry.ranks | self.joined == self._all:
            del self.entries[key]
            ready.append(entry)

    def join(self, rank: int, ready: list[Ready]) -> None:
        """Note that a rank has joined; append to `ready` what waited for it alone."""
        if self.joined >> rank & 1:
            return
        self.joined |= 1 << rank
        self.last_joined = rank
        for entry in [e for e in self.entries.values() if e.ranks | self.joined == self._all]:
            del self.entries[entry.key]
            ready.append(entry)

    def have_all_joined(self) -> bool:
        """Return whether all have; then nobody counts as joined any longer."""
        if self.joined != self._all:
            return False
        self.joined = 0
        return True
