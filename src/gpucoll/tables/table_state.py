"""What a table consists of on this rank: how it is made, how its rows are reached, how it ends."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gpucoll.api.agreement import agree
from gpucoll.api.communicator import Communicator
from gpucoll.errors import ArgumentError, GpucollError, StateError
from gpucoll.finalizers import leave
from gpucoll.tables.arguments import Reader
from gpucoll.tables.moving import Held, move
from gpucoll.tables.owners import Owners
from gpucoll.tables.rows import Places, Rows
from gpucoll.tables.setup import Init, Setup, converted
from gpucoll.tables.several_hosts import SeveralHosts, not_applied
from gpucoll.wording import rank_of

__all__ = ["ROWS_AT_ONCE", "TableState", "chain"]

ROWS_AT_ONCE = 4096


class TableState:
    """A table without its calls: rows, owners, what is on its way to other hosts."""

    def _enter(
        self,
        comm: Communicator,
        setup: Setup | None,
        problem: Exception | None,
        init: Init,
        before: TableState | None,
    ) -> None:
        """Take part in making the table, or in taking it over from `before`. Collective.

        The last call may fail on one rank and succeed on another. A rank on which it fails keeps
        what it has made (`_next`). The ranks go on from the newest table that one of them has got.
        """
        settings = setup.settings() if setup else {}
        offered = [(each._number, each._clock, each._owners.hosts) for each in chain(before)]
        found = agree(comm, "Table", problem, settings, offered)
        assert setup is not None
        newest = max((each[0][0] for each in found if each), default=0)
        given, before = before, next((t for t in chain(before) if t._number == newest), None)
        for each in [*chain(before._next if before else None)]:
            each._close(False)
        chosen = [next((it[1:] for it in each if it[0] == newest), (-1, [])) for each in found]
        self._setup, self._comm, self._init = setup, comm, init
        self._clock: int
        self._rows: Rows
        self._owners: Owners
        self._number: int
        self.lost_rows: Places
        self.rows, self.width, self.dtype = setup.rows, setup.width, setup.dtype
        self._row_bytes = self.width * self.dtype.itemsize
        self._who = rank_of(comm.rank, comm.world_size)
        self._reader = Reader(self._who, setup.rows, setup.width, setup.dtype)
        self._pid = os.getpid()
        self._lock, self._is_closed = threading.RLock(), False
        """A signal handler may call while its thread has the lock."""
        self._calls: set[object] = set()
        """One for each call that is under way."""
        self._pending: list[tuple[Places, Any]] = before._pending if before else []
        self._number = newest + 1
        self._left: deque[tuple[Places, Any]] = deque()
        """Pushes that this rank made before, and that other hosts had not applied."""
        least = min((clock for clock, _ in chosen if clock >= 0), default=0)
        clocks = [clock if clock >= 0 else least for clock, _ in chosen]
        if setup.is_sync:  # the last clock may have ended on some ranks only
            clocks = [max(clocks)] * len(clocks)
        hosts_before = next((hosts for _, hosts in chosen if hosts), [])
        if before is not None and before._between is not None:
            before._between.stop()
        self._next: TableState | None = None
        self._between: SeveralHosts | None = None
        self._parts = contextlib.ExitStack()
        self._finalizer = weakref.finalize(self, leave, _close_parts, self._parts, self._pid)
        self._finalizer.atexit = False
        try:
            self._make_rows(before, hosts_before, given)
            self._clock = self._rows.members.clock = clocks[comm.rank]
            if self._owners.is_divided:
                self._rows.members.note_clocks(clocks, self._rows.memory.ranks)
                between = SeveralHosts(comm, self._owners, self._rows, self._row_bytes)
                self._parts.callback(between.close)
                self._between = between
            left = not_applied(comm, hosts_before, before._between if before else None)
            for ids, values in [*(before._left if before else []), *left]:
                is_kept = ~np.isin(ids, self.lost_rows)
                self._left.append((ids[is_kept], values[is_kept]))
            if before is not None:
                before._next = self
            comm.barrier()
        except BaseException:
            if before is None or before._next is not self:
                self._release()
            raise

    def _make_rows(
        self, before: TableState | None, hosts_before: list[str], given: TableState | None
    ) -> None:
        """Make the rows of this host, or take them over from `before`, and fill what is new."""
        comm, setup = self._comm, self._setup
        self._owners = owners = Owners(comm, setup.rows)
        self._parts.callback(owners.close)
        moves = bool(hosts_before) and set(hosts_before) != set(owners.hosts)
        kept = None if before is None or moves else before._rows
        count = owners.counts[owners.here]
        self._rows = rows = Rows(comm, count, self.width, self.dtype, setup.rule, kept)
        self._parts.callback(rows.close)
        self.lost_rows = places = np.empty(0, np.int64)
        if moves:
            held = None if before is None else Held(before._owners, before._rows)
            places = move(comm, held, owners, rows)
            lost = comm.all_gather_object(owners.owned_by(owners.here)[places])
            self.lost_rows = np.sort(np.concatenate(lost))
            if before is not None and before is not given:  # the program has not seen this one
                self.lost_rows = np.union1d(self.lost_rows, before.lost_rows)
        elif rows.is_new:
            here = rows.memory.ranks
            share = here.index(comm.rank)
            places = np.arange(count * share // len(here), count * (share + 1) // len(here))
        trouble = None if self._init is None else self._tried_to_fill(self._init, places)
        agree(comm, "Table", trouble, {}, None)

    def _tried_to_fill(self, init: Any, places: Places) -> GpucollError | None:
        """Fill rows of this host; return what is wrong with `init`."""
        owned = self._owners.owned_by(self._owners.here) if len(places) else places
        for first in range(0, len(places), ROWS_AT_ONCE):
            here = places[first : first + ROWS_AT_ONCE]
            ids = owned[here]
            try:
                given = init
                if callable(init):
                    given = np.reshape(init(ids), (len(ids), self.width))
                    given = converted(given, self.dtype)
                elif init.ndim == 2:
                    given = init[ids]
                self._rows.values[here] = given
            except Exception as error:
                trouble = ArgumentError(
                    f"{self._who}: Table: init of rows {ids[0]} to {ids[-1]}: "
                    f"{type(error).__name__}: {error}"
                )
                trouble.__cause__ = error
                return trouble
        return None

    def _set_clock(self, clock: int) -> None:
        """Begin at a clock, as all ranks do at the same time."""
        self._clock = self._rows.members.clock = clock
        here = self._rows.memory.ranks
        self._rows.members.note_clocks([clock] * self._comm.world_size, here)

    # --- where rows are ---------------------------------------------------------------------------

    def _take(self, ids: Places, out: Any) -> None:
        self._repeat()
        if self._between is None:
            self._rows.take(ids, out)
            return
        with self._naming_losses():
            self._between.requests.pull(ids, self._bytes_of(out, len(ids)))

    def _apply(self, ids: Places, values: Any) -> None:
        self._repeat()
        self._push(ids, values)

    def _push(self, ids: Places, values: Any) -> None:
        if self._between is None:
            self._rows.apply(ids, values)
            return
        with self._naming_losses():
            self._between.requests.push(ids, self._bytes_of(values, len(ids)))

    def _bytes_of(self, rows: Any, count: int) -> Any:
        """Return a view of contiguous rows as bytes."""
        return rows.reshape(-1).view(np.uint8).reshape(count, self._row_bytes)

    def _repeat(self) -> None:
        """Make the pushes to other hosts that the loss of a rank had kept from being applied."""
        while self._left:
            with self._naming_losses(), self._lock:
                pushed = self._left.popleft() if self._left else None
            if pushed is not None:
                self._push(*pushed)

    def _flush(self) -> None:
        self._repeat()
        if self._between is not None:
            with self._naming_losses():
                self._between.requests.flush()

    def _naming_losses(self) -> contextlib.AbstractContextManager[Callable[[], object] | None]:
        """Return a context in which errors say what is lost, and a function that raises them."""
        return contextlib.nullcontext() if self._between is None else self._between.naming_losses()

    # --- calls that use it, and the end -----------------------------------------------------------

    def _begin(self, call: str, mine: object) -> None:
        """Note in `_calls` that a call uses the memory; raise if it must not.

        The caller removes `mine` at the end, also if an interrupt has come within this method.
        """
        if os.getpid() != self._pid:
            raise StateError(
                f"{call}: this process was forked from {self._who}: a child cannot use its "
                "parent's table"
            )
        with self._lock:
            if self._is_closed:
                raise StateError(f"{self._who}: {call}: the table is closed")
            self._calls.add(mine)

    def _close(self, waits: bool) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._calls:
                raise StateError(
                    f"{self._who}: another thread is in a call on this table, or this one is in a "
                    "signal handler that has interrupted a call"
                )
            is_closed, self._is_closed = self._is_closed, True
        if is_closed:
            return
        try:
            if waits:
                self._finish()
        finally:
            self._release()

    def _finish(self) -> None:
        """Wait until the other hosts need this rank's rows no more."""
        if self._between is not None and not self._between.was_told:
            self._flush()
            self._between.finish()

    def _release(self) -> None:
        if self._finalizer.detach():
            self._parts.close()


def _close_parts(parts: contextlib.ExitStack, pid: int) -> None:
    """Release a table that was dropped, unless it is a forked child that has dropped it."""
    if os.getpid() == pid:
        parts.close()


def chain(table: TableState | None) -> Iterator[TableState]:
    """Return a table and those that were made of it by calls of `kept_for` that failed at last."""
    while table is not None:
        yield table
        table = table._next
