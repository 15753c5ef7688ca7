"""A host's promises and the decisions while its ranks agree with other hosts in `shrink`.

They lie in a small memory that the ranks of the host share. If the rank that speaks for the host
dies, the next one goes on with what the first had promised. Only the speaker writes. It writes a
value before the word that announces it, so no value is ever half written.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any, Final

from gpucoll.errors import StateError
from gpucoll.transport.shared import mapping, ordering
from gpucoll.transport.shared.layout import LINE_BYTES

ROUNDS: Final = 8
"""Limit of rounds: how often ranks may agree anew after some were lost on the way."""
_LEADER, _LATEST = 0, 8
_PROMISED, _ACCEPTED, _DECIDED, _REFUSED = 0, 8, 16, 24
_DECIDED_SLOT, _REFUSED_SLOT, _SLOTS = 2, 3, 4


class Ballots:
    """This process's mapping of the ballots.

    Parameters
    ----------
    fd : int
        Descriptor of the memory; the caller keeps it.
    world_size : int
        Number of ranks on all hosts.
    """

    def __init__(self, fd: int, world_size: int) -> None:
        self._slot_bytes = _slot_bytes(world_size)
        self._mapping = mapping.Mapping(fd, size_bytes(world_size), "the ballots of hosts")

    def _at(self, offset: int) -> int:
        if not self._mapping.is_mapped:
            raise StateError("the communicator is closed")
        return self._mapping.address + offset

    def _word(self, round_: int, word: int) -> int:
        return self._at(LINE_BYTES + (round_ - 1) * self._round_bytes + word)

    @property
    def _round_bytes(self) -> int:
        return LINE_BYTES + _SLOTS * self._slot_bytes

    # --- who speaks for this host, in which round -------------------------------------------------

    def leader(self) -> int:
        """Return the place of the rank that speaks for this host; -1: none does yet."""
        return ordering.load(self._at(_LEADER)) - 1

    def follow(self, before: int, place: int) -> bool:
        """Make a rank the speaker after the one at `before`; return whether it is."""
        found = ordering.compare_exchange(self._at(_LEADER), before + 1, place + 1)
        return found in (before + 1, place + 1)

    def latest(self) -> int:
        """Return the latest round that any rank, on any host, is known to be in."""
        return ordering.load(self._at(_LATEST))

    def note(self, round_: int) -> None:
        """Record that some rank is in a round."""
        while (known := self.latest()) < round_:
            ordering.compare_exchange(self._at(_LATEST), known, round_)

    # --- what was promised and accepted -----------------------------------------------------------

    def promised(self, round_: int) -> int:
        """Return the highest ballot of a round that this host has promised to keep to."""
        return ordering.load(self._word(round_, _PROMISED))

    def promise(self, round_: int, ballot: int) -> bool:
        """Promise to keep to a ballot, unless a higher one was promised; return whether."""
        if ballot < self.promised(round_):
            return False
        ordering.store(self._word(round_, _PROMISED), ballot)
        return True

    def accepted(self, round_: int) -> tuple[int, dict[str, Any]] | None:
        """Return the last ballot of a round that this host has accepted, with its value."""
        word = ordering.load(self._word(round_, _ACCEPTED))
        return (word >> 1, json.loads(self._read(round_, word & 1))) if word else None

    def accept(self, round_: int, ballot: int, value: dict[str, Any]) -> bool:
        """Accept a value, unless a higher ballot was promised; return whether."""
        if not self.promise(round_, ballot):
            return False
        slot = 1 - (ordering.load(self._word(round_, _ACCEPTED)) & 1)
        self._write(round_, slot, json.dumps(value))
        ordering.store(self._word(round_, _ACCEPTED), ballot << 1 | slot)
        return True

    # --- how it ended -----------------------------------------------------------------------------

    def decided(self, round_: int) -> dict[str, Any] | None:
        """Return what was decided in a round."""
        if not ordering.load(self._word(round_, _DECIDED)):
            return None
        value: dict[str, Any] = json.loads(self._read(round_, _DECIDED_SLOT))
        return value

    def decide(self, round_: int, value: dict[str, Any]) -> None:
        """Write what was decided, on all hosts, in a round."""
        if not ordering.load(self._word(round_, _DECIDED)):
            self._write(round_, _DECIDED_SLOT, json.dumps(value))
            ordering.store(self._word(round_, _DECIDED), 1)

    def refusal(self, round_: int) -> str:
        """Return why the ranks of this host cannot go on; empty: no reason is known."""
        word = self._word(round_, _REFUSED)
        return self._read(round_, _REFUSED_SLOT) if ordering.load(word) else ""

    def refuse(self, round_: int, text: str) -> None:
        """Write why the ranks of this host cannot go on."""
        self._write(round_, _REFUSED_SLOT, text)
        ordering.store(self._word(round_, _REFUSED), 1)

    def _slot(self, round_: int, slot: int) -> int:
        return self._word(round_, LINE_BYTES + slot * self._slot_bytes)

    def _write(self, round_: int, slot: int, text: str) -> None:
        data, at = text.encode()[: self._slot_bytes - 8], self._slot(round_, slot)
        ctypes.memmove(at + 8, data, len(data))
        ordering.store(at, len(data))

    def _read(self, round_: int, slot: int) -> str:
        at = self._slot(round_, slot)
        return ctypes.string_at(at + 8, ordering.load(at)).decode(errors="replace")

    def close(self) -> None:
        """Unmap the memory."""
        self._mapping.unmap()


def _slot_bytes(world_size: int) -> int:
    return (4096 + 8 * world_size + 7) // 8 * 8


def size_bytes(world_size: int) -> int:
    """Return the size of the ballots' memory."""
    return LINE_BYTES + ROUNDS * (LINE_BYTES + _SLOTS * _slot_bytes(world_size))


def create(world_size: int) -> int:
    """Return a descriptor of new memory for ballots."""
    size = size_bytes(world_size)
    return mapping.create("gpucoll-ballots", size, reserve_bytes=size)
