"""The rows that one host owns: in memory that all its ranks share, with a lock for each row.

Every rank of the host reads and writes them directly; there is no server process.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.api.host_memory import HostMemory
from gpucoll.arrays.numpy_arrays import address_of, array_at
from gpucoll.errors import ArgumentError, DeadlineError, StateError
from gpucoll.rendezvous.marks import WaitMark
from gpucoll.tables import members
from gpucoll.tables.loops import TORN, Outcome, Push, push_rows, take_rows
from gpucoll.tables.members import Members
from gpucoll.transport.shared import ordering
from gpucoll.wording import rank_of

if TYPE_CHECKING:
    from gpucoll.api.communicator import Communicator
    from gpucoll.tables.updates import Rule

__all__ = ["Places", "Rows"]

AnyArray: TypeAlias = npt.NDArray[Any]
Places: TypeAlias = npt.NDArray[np.int64]
"""Numbers of rows on this host, a C-contiguous array of one dimension."""

_PAGE_BYTES = 4096
_RANK_BITS = 20
_NAP_S = 2e-4
_NAPS_AFTER_S = 0.01


class Rows:
    """The rows that this host owns. Collective over the communicator.

    Parameters
    ----------
    comm : Communicator
        Whose ranks use them; ranks of other hosts have rows of their own.
    count : int
        Number of rows, the same on all ranks of a host.
    width : int
        Number of elements of a row.
    dtype : dtype
        Their dtype.
    rule : Rule
        What `apply` does.
    before : Rows, optional
        The rows of this rank for another communicator. They stay, and so do those of `count` and
        the rule; ranks without `before` on a host that has rows get them, too.

    Attributes
    ----------
    is_new : bool
        Whether no rank of this host had them before; then all are zero.
    values : ndarray
        A view of them, of shape (count, width). It must not be used after `close`.
    sums : ndarray or None
        A view of what the rule keeps beside them, of the same shape.
    members : Members
        The ranks, and their clocks.
    is_over : bool
        Another thread sets it: whoever waits for a lock gives up.
    """

    def __init__(
        self,
        comm: Communicator,
        count: int,
        width: int,
        dtype: npt.DTypeLike,
        rule: Rule,
        before: Rows | None = None,
    ) -> None:
        if comm.world_size > members.MOST_RANKS:
            raise ArgumentError(
                f"a table has at most {members.MOST_RANKS} ranks; got {comm.world_size}"
            )
        self.count, self.width, self.dtype, self.rule = count, width, np.dtype(dtype), rule
        self._who = rank_of(comm.rank, comm.world_size)
        self._row_bytes = width * self.dtype.itemsize
        self._pitch = -(-self._row_bytes // 8) * 8
        sums_dtype = np.dtype(rule.sums_dtype or "float32")
        self._sums_bytes = width * sums_dtype.itemsize if rule.sums_dtype else 0
        locks = _whole_pages(members.SIZE_BYTES)
        values = locks + _whole_pages(8 * count)
        sums = values + _whole_pages(self._pitch * count)
        size = sums + _whole_pages(self._sums_bytes * count)
        self.memory: HostMemory
        self.memory = HostMemory(comm, size, "table", before.memory if before else None)
        self.is_new = self.memory.is_new
        address = self.memory.address
        self._locks = self.memory.array(locks, (count,), np.int64)
        if not self.is_new and comm.rank == self.memory.ranks[0]:
            self._locks[self._locks != 0] = TORN  # whoever holds one takes no part any more
        try:
            self.members = Members(self.memory, comm)
        except BaseException:
            self.memory.close()
            raise
        self.values = _strided(address + values, (count, width), self.dtype, self._pitch)
        self.sums: AnyArray | None = None
        if rule.sums_dtype:
            self.sums = _strided(address + sums, (count, width), sums_dtype, self._sums_bytes)
        self._rows = address + values
        self._mine = self.members.epoch << _RANK_BITS | (comm.rank + 1)
        self._push = self._prepared(address + sums, rule)
        self.is_over = False

    def _prepared(self, sums: int, rule: Rule) -> npt.NDArray[np.int64]:
        """Return the words of a push that are the same in all."""
        push = Push.new()
        push.rows, push.row_bytes, push.pitch = self._rows, self._row_bytes, self._pitch
        push.sums, push.sums_bytes = sums, self._sums_bytes
        push.locks = address_of(self._locks)
        push.epoch_word, push.epoch = self.members.epoch_word, self.members.epoch
        push.mine = self._mine
        push.kernel, push.elements = rule.kernel, self.width * rule.parts
        push.parameter = address_of(rule.parameter)
        return push.words

    def take(self, places: Places, out: AnyArray) -> None:
        """Copy rows, without a lock: no element is torn, a row may be between two updates.

        Parameters
        ----------
        places : ndarray
            int64, numbers of rows, which the caller has checked.
        out : ndarray
            C-contiguous memory for the rows, of any dtype and shape.
        """
        assert out.nbytes == len(places) * self._row_bytes
        take_rows.ctypes(
            self._rows,
            self._row_bytes,
            self._pitch,
            address_of(places),
            len(places),
            address_of(out),
        )

    def apply(self, places: Places, values: AnyArray) -> None:
        """Update rows by the rule, one after the other, each under its lock.

        Parameters
        ----------
        places : ndarray
            int64, numbers of rows, which the caller has checked. One that occurs several times is
            updated several times.
        values : ndarray
            C-contiguous memory of the values, of any dtype and shape.

        Raises
        ------
        DeadlineError
            A row stayed locked. The rows before it are updated.
        StateError
            The other ranks have continued without this one; or `is_over` was set.
        """
        assert values.nbytes == len(places) * self._row_bytes
        words = self._push.copy()
        words[Push.places], words[Push.values] = address_of(places), address_of(values)
        words[Push.count] = len(places)
        address = address_of(words)
        outcome = push_rows.ctypes(address)
        if outcome == Outcome.LOCKED:
            mark = WaitMark(self.members.rank)
            try:
                outcome = self._push_locked(places, words, mark)
            finally:
                mark.close()
        if outcome == Outcome.LEFT_BEHIND:
            raise StateError(
                f"{self._who}: push: the other ranks have continued without this one; "
                f"{words[Push.done]} of {len(places)} rows were updated"
            )

    def _push_locked(self, places: Places, words: npt.NDArray[np.int64], mark: WaitMark) -> int:
        """Go on with a push that has come to a locked row."""
        outcome, since_s, locked = int(Outcome.LOCKED), 0.0, -1
        while outcome == Outcome.LOCKED:
            place, now_s = int(places[words[Push.done]]), time.monotonic()
            if place != locked:
                locked, since_s = place, now_s
            holder = int(words[Push.holder])
            self._look_at(place, holder, now_s - since_s, words)
            rank = (holder & ((1 << _RANK_BITS) - 1)) - 1
            if pid := self.members.pid_of(rank):
                mark.note(f"waiting in push() of a table for the lock of row {place}", {rank: pid})
            outcome = push_rows.ctypes(address_of(words))
        return outcome

    def _look_at(
        self, place: int, holder: int, waited_s: float, words: npt.NDArray[np.int64]
    ) -> None:
        """Take a row's lock from a rank that is gone; otherwise wait a little, or raise."""
        rank = (holder & ((1 << _RANK_BITS) - 1)) - 1
        if self._has_left(holder):
            ordering.compare_exchange(address_of(self._locks) + 8 * place, holder, TORN)
            return
        if self.is_over:
            raise StateError(
                f"{self._who}: push: the table is closed; {words[Push.done]} of "
                f"{words[Push.count]} rows were updated"
            )
        if waited_s > self.members.timeout_s:
            raise DeadlineError(
                f"{self._who}: push: rank {rank} has held the lock of row {place} of this host "
                f"for {self.members.timeout_s:g} s (timeout_s): is it stopped? {words[Push.done]} "
                f"of {words[Push.count]} rows were updated"
            )
        if waited_s > _NAPS_AFTER_S:
            time.sleep(_NAP_S)

    def _has_left(self, holder: int) -> bool:
        """Return whether who holds a lock has ended, or was left behind by this communicator."""
        epoch, rank = (holder & ~TORN) >> _RANK_BITS, (holder & ((1 << _RANK_BITS) - 1)) - 1
        if epoch != self.members.epoch:
            return epoch < self.members.epoch  # otherwise this rank is the one left behind
        return self.members.is_gone(rank)

    def torn(self) -> Places:
        """Return the rows that a rank may have updated half, since it died meanwhile."""
        locks = self._locks.copy()
        torn = locks & TORN != 0
        for place in np.flatnonzero((locks != 0) & ~torn):
            torn[place] = self._has_left(int(locks[place]))
        return np.flatnonzero(torn).astype(np.int64)

    def mark_torn(self, places: Places) -> None:
        """Put rows into that list, while nobody pushes."""
        self._locks[places] = TORN

    def close(self) -> None:
        """Release this rank's part in them. Closing twice does nothing."""
        if self.memory.fd >= 0:
            self.members.close()
            self.memory.close()


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _strided(address: int, shape: tuple[int, int], dtype: np.dtype[Any], pitch: int) -> AnyArray:
    """Return a view of rows that begin every `pitch` bytes."""
    whole = array_at(address, (shape[0] * pitch,), np.dtype(np.uint8))
    if not whole.size:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, whole, strides=(pitch, dtype.itemsize))
