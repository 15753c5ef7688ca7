"""The ranks of a table, as each host's memory has them: their processes, clocks, and who is gone.

A communicator notices that a rank is gone when all ranks call it together. Pushes and clocks go on
without that, so they look at the process itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from gpucoll.api.host_memory import HostMemory
from gpucoll.errors import DeadlineError, PeerLostError, StateError
from gpucoll.rendezvous.marks import WaitMark
from gpucoll.tables.loops import MEMBER_BYTES, Member, advance_clock, note_clock, wait_for_clocks
from gpucoll.topology.processes import start_time
from gpucoll.transport.shared import ordering
from gpucoll.wording import rank_of

if TYPE_CHECKING:
    from gpucoll.api.communicator import Communicator

__all__ = ["MOST_RANKS", "SIZE_BYTES", "Members"]

MOST_RANKS = 4096
_BELL, _LINES = 64, 128
SIZE_BYTES = _LINES + MOST_RANKS * MEMBER_BYTES
"""The size of what they take at the beginning of a host's memory; most of it is never touched."""
_SLICE_NS = 20_000_000
_LOOK_S = 0.1


class Members:
    """The ranks of a table.

    Parameters
    ----------
    memory : HostMemory
        The memory of this rank's host, with `SIZE_BYTES` at its beginning.
    comm : Communicator
        The table's ranks.

    Attributes
    ----------
    epoch : int
        The number of communicators that the memory has had.
    """

    def __init__(self, memory: HostMemory, comm: Communicator) -> None:
        self.rank, self.world_size = comm.rank, comm.world_size
        self.timeout_s = comm._group.timeout_s
        self.epoch_word = memory.address
        self._bell, self._lines = memory.address + _BELL, memory.address + _LINES
        self._slice = np.array([0, _SLICE_NS], np.int64)
        if comm.rank == memory.ranks[0]:
            memory.array(_LINES, (self.world_size * MEMBER_BYTES,), np.uint8)[:] = 0
            ordering.store(self.epoch_word, ordering.load(self.epoch_word) + 1)
        comm.barrier()
        self.epoch = ordering.load(self.epoch_word)
        self._own = self._member(self.rank)
        self._own.pid = os.getpid()
        self._own.started = start_time(os.getpid())
        comm.barrier()

    def _member(self, rank: int) -> Member:
        return Member(self._lines + rank * MEMBER_BYTES)

    def pid_of(self, rank: int) -> int:
        """Return the process of a rank of this host; 0: there is none."""
        return self._member(rank).pid if 0 <= rank < self.world_size else 0

    def is_gone(self, rank: int) -> bool:
        """Return whether the process of a rank of this host has ended."""
        member = self._member(rank)
        return member.pid != 0 and start_time(member.pid) != member.started

    @property
    def clock(self) -> int:
        """How often this rank has called `advance`."""
        return self._own.clock

    @clock.setter
    def clock(self, value: int) -> None:
        ordering.store(self._own.at.clock, value)

    def advance(self) -> int:
        """Advance this rank's clock, and wake the ranks that wait for it; return the clock.

        Raises
        ------
        StateError
            The other ranks have continued without this one.
        """
        self._check_epoch()
        return advance_clock.ctypes(self._own.address, self._bell)

    def note_clocks(self, clocks: list[int], here: list[int]) -> None:
        """Note the first clocks of the ranks of other hosts."""
        if self.rank == here[0]:
            for rank, clock in enumerate(clocks):
                if rank not in here:
                    self.note_clock(rank, clock)

    def note_clock(self, rank: int, clock: int) -> None:
        """Note the clock of a rank of another host, and wake the ranks that wait for it."""
        note_clock.ctypes(self._member(rank).address, clock, self._bell)

    def wait_for(self, target: int, check: Callable[[], object] | None = None) -> None:
        """Wait until the clock of every rank has reached a target.

        A rank that has closed the table pushes no more, and nobody waits for it. `check` is called
        now and then, and raises an error if a rank of another host is gone.

        Raises
        ------
        PeerLostError, DeadlineError
            A rank has ended, late or not, or one stays late for longer than the deadline.
        """
        words = self._lines, self.world_size, target, self._bell, self._slice.ctypes.data
        if (late := wait_for_clocks.ctypes(*words)) >= 0:
            mark = WaitMark(self.rank)
            try:
                self._wait_for(late, words, check, mark)
            finally:
                mark.close()

    def _wait_for(
        self, late: int, words: tuple[int, ...], check: Callable[[], object] | None, mark: WaitMark
    ) -> None:
        """Go on with a wait for a rank that was late at the first look."""
        start_s = looked_s = time.monotonic()
        target = words[2]
        while late >= 0:
            pid = self.pid_of(late)
            what = f"waiting in clock() of a table for clock {target}"
            mark.note(what, {late: pid} if pid else {}, awaits_other_hosts=not pid)
            clock = ordering.load(self._member(late).at.clock)
            text = (
                f"{rank_of(self.rank, self.world_size)}: clock: rank {late} is at clock {clock}, "
                f"and this rank waits for its clock {target}"
            )
            now_s = time.monotonic()
            others: Iterable[int] = ()
            if now_s - looked_s > _LOOK_S:  # the late rank may have left since another one is gone
                others, looked_s = range(self.world_size), now_s
            for rank in (late, *others):
                if self.is_gone(rank):
                    which = "its process" if rank == late else f"the process of rank {rank}"
                    raise PeerLostError(
                        f"{text}, but {which} has ended; continue by "
                        "table.kept_for(comm.shrink()): no row is lost"
                    )
            self._check_epoch()
            if check is not None:
                check()
            if now_s - start_s > self.timeout_s:
                raise DeadlineError(f"{text} since {self.timeout_s:g} s (timeout_s)")
            late = wait_for_clocks.ctypes(*words)

    def _check_epoch(self) -> None:
        """Raise if the lines of the memory have come to other members."""
        if ordering.load(self.epoch_word) != self.epoch:
            raise StateError(
                f"{rank_of(self.rank, self.world_size)}: clock: the other ranks have continued "
                "without this one"
            )

    def close(self) -> None:
        """Say that this rank pushes no more, unless the memory has come to other members."""
        if ordering.load(self.epoch_word) != self.epoch:
            return
        ordering.store(self._own.at.closed, 1)
        ordering.store(self._own.at.pid, 0)
        advance_clock.ctypes(self._own.address, self._bell)
