"""What ranks tell each other in a cycle: one all-gather of a row of 448 bytes.

The head of a row has the number of requests in it, flags, the number of all that are new, and the
sum of their marks, in which their order does not count. The row goes on with the digests of the
name and the signature of each request, if all fit. Where heads are equal, everything new is ready
at once. Otherwise the table tells what is, and a rank with more than fits in a row says so:
everybody goes around again.
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gpucoll.integrations.horovod.engine.forms import MASK

if TYPE_CHECKING:
    from gpucoll import Communicator
    from gpucoll.integrations.horovod.engine.forms import Form
    from gpucoll.integrations.horovod.engine.table import Ready, Table

__all__ = ["WAIT_S", "Exchange"]

WAIT_S = 86_400.0
"""How long a rank waits for the others: Horovod's programs expect no limit; see `StallCheck`."""
_WORDS = 56
_HEAD = 4
_FIT = (_WORDS - _HEAD) // 2
_MORE, _JOINED = 1, 2
_ONE = _HEAD + 2
_key = attrgetter("key")


class Exchange:
    """Tells the other ranks what is new here, and enters into the table what is new there."""

    def __init__(self, comm: Communicator, table: Table) -> None:
        self._comm, self._table = comm, table
        self.have_agreed = False
        """Whether all ranks told of the same in the last cycle."""
        self._row = np.zeros(_WORDS, np.int64)
        self._rows = np.zeros(_WORDS * comm.world_size, np.int64)
        self._own, self._all = (memoryview(cast(Any, row)) for row in (self._row, self._rows))

    def run(self, new: deque[Form], has_joined: bool, ready: list[Ready]) -> bool:
        """Exchange all that is new; return whether anything was, on any rank.

        Parameters
        ----------
        new : deque of Form
            What this rank has not told yet; emptied.
        has_joined : bool
            Whether this rank waits in `join`.
        ready : list of Ready
            Gets what no rank is missing in any longer, in the same order on every rank.
        """
        told = [new.popleft() for _ in range(len(new))]
        row, rest = self._own, told
        any_news, more = False, len(told) > _FIT
        if len(told) == 1:
            row[:_ONE], rest = told[0].row, []
            row[1] = _JOINED if has_joined else 0
        else:
            row[2], row[3] = len(told), sum([form.mark for form in told]) & MASK
            if more:  # perhaps nobody needs to know each
                row[0], row[1] = 0, _MORE
            else:
                rest = self._fill(told, has_joined)
        self._comm.all_gather(self._row, out=self._rows, timeout_s=WAIT_S)
        self.have_agreed = bool(told) and self._are_equal()
        if self.have_agreed:
            ready += told if len(told) == 1 else sorted(told, key=_key)
            return True
        more = self._read(ready)
        any_news = more or self._had_news
        while more:
            rest = self._fill(rest, has_joined)
            self._comm.all_gather(self._row, out=self._rows, timeout_s=WAIT_S)
            more = self._read(ready)
        return any_news

    def _are_equal(self) -> bool:
        """Return whether every rank has told of the same, and nothing else counts."""
        rows, table = self._all, self._table
        if table.entries or table.joined or rows[1] & _JOINED:
            return False
        n, total = rows[2], rows[3]
        for base in range(_WORDS, len(rows), _WORDS):
            if rows[base + 3] != total or rows[base + 2] != n or rows[base + 1] & _JOINED:
                return False
        return True

    def _fill(self, told: list[Form], has_joined: bool) -> list[Form]:
        """Write what fits into the row; return the rest."""
        row, word = self._own, _HEAD
        for form in told[:_FIT]:
            row[word], row[word + 1] = form.key, form.digest
            word += 2
        rest = told[_FIT:]
        row[0] = (word - _HEAD) // 2
        # A rank has joined when the others know of all that it submitted before.
        row[1] = _MORE if rest else _JOINED if has_joined else 0
        return rest

    def _read(self, ready: list[Ready]) -> bool:
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
