"""What ranks tell each other in a cycle: one all-gather of a row of 448 bytes.

A row has two words (how many requests follow, and flags), and for each request the digest of its
name and that of its signature. A rank with more than fit says so, and everybody goes around again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from gpucoll import Communicator
    from gpucoll.integrations.horovod.engine.forms import Form
    from gpucoll.integrations.horovod.engine.table import Entry, Table

__all__ = ["WAIT_S", "Exchange"]

WAIT_S = 86_400.0
"""How long a rank waits for the others: Horovod's programs expect no limit; see `StallCheck`."""
_WORDS = 56
_HEAD = 2
_FIT = (_WORDS - _HEAD) // 2
_MORE, _JOINED = 1, 2


class Exchange:
    """Tells the other ranks what is new here, and enters into the table what is new there."""

    def __init__(self, comm: Communicator, table: Table) -> None:
        self._comm, self._table = comm, table
        self._row = np.zeros(_WORDS, np.int64)
        self._rows = np.zeros(_WORDS * comm.world_size, np.int64)
        self._own, self._all = (memoryview(cast(Any, row)) for row in (self._row, self._rows))

    def run(self, new: deque[Form], has_joined: bool, ready: list[Entry]) -> bool:
        """Exchange all that is new; return whether anything was, on any rank.

        Parameters
        ----------
        new : deque of Form
            What this rank has not told yet; emptied.
        has_joined : bool
            Whether this rank waits in `join`.
        ready : list of Entry
            Gets what no rank is missing in any longer, in the same order on every rank.
        """
        any_news, more = False, True
        while more:
            self._fill(new, has_joined)
            self._comm.all_gather(self._row, out=self._rows, timeout_s=WAIT_S)
            more = self._read(ready)
            any_news = any_news or more or self._had_news
        return any_news

    def _fill(self, new: deque[Form], has_joined: bool) -> None:
        row, word = self._own, _HEAD
        while new and word < _WORDS:
            form = new.popleft()
            row[word], row[word + 1] = form.key, form.digest
            word += 2
        row[0] = (word - _HEAD) // 2
        # A rank has joined when the others know of all that it submitted before.
        row[1] = _MORE if new else _JOINED if has_joined else 0

    def _read(self, ready: list[Entry]) -> bool:
        rows, table = self._all, self._table
        flags, self._had_news = 0, False
        for rank in range(self._comm.world_size):
            base = rank * _WORDS
            flags |= (own := rows[base + 1])
            if n := rows[base]:
                self._had_news = True
                for at in range(base + _HEAD, base + _HEAD + 2 * n, 2):
                    table.add(rank, rows[at], rows[at + 1], ready)
            if own & _JOINED and not table.joined >> rank & 1:
                self._had_news = True
                table.join(rank, ready)
        return bool(flags & _MORE)
