"""Running a schedule of sends, receives and reductions over connections, outside the interpreter.

A schedule is a table of rows (`Row`), int64, in the order of their steps. Each row sends a range of
one working buffer over a link, receives one over a link, or does both. On every link bytes go and
come in the order of the rows, unframed, behind one header for each direction that a call uses. All
of a step is done at the same time; steps overlap as far as the data allow:

- Rows are of one section or of several, one behind the other. No two sections have a byte in
  common, and no row waits for one of another section, but for its turn on its link. Where several
  pieces of an array become ready one after the other, each is a section: ``gate`` says how many
  must be.
- A send of step s begins when all receives of earlier steps are there, and reduced. With
  ``forwards`` it begins sooner, and goes as far as the last row before that receives exactly the
  same range has come; no row between the two may receive a part of that range.
- A receive overwrites, or reduces into, a byte when all sends of that byte in its own and earlier
  steps are through, and all receives of it in earlier rows. So every schedule may work in place:
  what comes too early waits, in up to 256 KiB of memory and then in the connection.
- Which schedules end: those in which no rank waits for itself. With at most one message each way
  for each link and step it is enough that, on each rank, any two ranges of one step are the same or
  share no byte (two that are sent may), and that the schedule ends where each step begins after the
  one before. Rings, recursive doubling, halving-doubling, Bruck, trees, chains and pairwise
  exchanges are such, in place.
- A range without bytes is its link's header alone: it begins with its step, so that steps of them
  make a barrier. Only the first message of a direction is held by the header, so that each of
  those steps needs a link of its own; of a later one without bytes nothing is sent.

Reduced ranges hold whole items; the kernel gets two operands, out in place, and ``theirs_first``
says which is the left one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpucoll.transport.tcp.stream_loop import run_streams
from gpucoll.transport.tcp.stream_words import (
    HEADER_BYTES,
    HEADER_WORDS,
    LINK_WORDS,
    MAGIC,
    PLAN_WORDS,
    ROW_WORDS,
    SCRATCH_BYTES,
    STATE_WORDS,
    Fault,
    Link,
    Row,
    State,
    StreamStatus,
)

__all__ = [
    "ALL",
    "NO_DEADLINE",
    "Outcome",
    "Reduction",
    "Row",
    "StreamStatus",
    "Streams",
    "deadline_after",
]

NO_DEADLINE = 2**63 - 1
ALL = 2**62
"""Of pieces that are ready: as many as there may be."""
SLICE_NS = 20_000_000
_FEW_BYTES = 1 << 20
"""A call of at most so much yields a while before it sleeps: its time is that of its steps."""
_YIELDS = 100
_LINE_BYTES = 64
_LINK_BYTES = SCRATCH_BYTES + 2 * _LINE_BYTES
_AGAIN = int(StreamStatus.AGAIN)
_FAULTS = {
    Fault.STEPS: "its step is less than that of the row before",
    Fault.PEER: "there is no link of that number",
    Fault.RANGE: "its range is not in the working buffer",
    Fault.ITEMS: "it reduces, but has no kernel or no whole number of items",
    Fault.FORWARDS: "it forwards what no row before receives, or what a later one changes",
    Fault.SECTION: "it is not among the rows of its section, or they are not of one mind",
}


class Reduction(NamedTuple):
    """How what comes is combined with what is there.

    Attributes
    ----------
    kernel : int
        Address of a reduce kernel (`gpucoll.kernels.cpu.addresses.reduce_kernel`).
    item_bytes : int
        Of an element, complex numbers as a whole.
    parts : int
        What the kernel counts of each (`parts_per_element`).
    parameter : int
        Address of the kernel's parameter, if it has one.
    """

    kernel: int
    item_bytes: int
    parts: int = 1
    parameter: int = 0


NO_REDUCTION = Reduction(0, 1)


class Outcome(NamedTuple):
    """How a call ended.

    Attributes
    ----------
    status : StreamStatus
        `AGAIN` only of `Streams.proceed`.
    link : int
        Which link is gone, or does not match; else -1.
    errno : int
        Of a link that is gone: 0 where the other end has closed it.
    header : tuple of int
        The header that came where it does not match: magic, epoch, sequence, digest.
    """

    status: StreamStatus
    link: int = -1
    errno: int = 0
    header: tuple[int, ...] = ()


_DONE = Outcome(StreamStatus.DONE)


class Streams:
    """Connections to other ranks, over which calls run one after the other.

    A call that does not end with `DONE`, or out of which a signal handler raises, leaves the
    connections in the middle of their bytes: they can only be closed. That a connection is gone is
    known when something is to be sent or received on it. One thread at a time.

    Parameters
    ----------
    fds : sequence of int
        Descriptors of connected sockets that do not block; they stay the caller's. A link is known
        by its place here.
    """

    _loop = run_streams

    def __init__(self, fds: Sequence[int]) -> None:
        self._run = self._loop.ctypes  # takes 3 s where nobody has needed it on this machine
        n_links = len(fds)
        self._links = np.zeros((n_links, LINK_WORDS), np.int64)
        self._poll_fds = np.zeros(n_links, np.int64)
        # Takes memory where it is used only: NumPy does not write to it.
        self._scratch = np.empty(_LINE_BYTES + n_links * _LINK_BYTES, np.uint8)
        self._state = np.zeros(STATE_WORDS, np.int64)
        self._plan = np.zeros((0, PLAN_WORDS), np.int64)
        self._rows = np.zeros((0, ROW_WORDS), np.int64)
        first = self._scratch.ctypes.data + 2 * _LINE_BYTES & -_LINE_BYTES
        self._links[:, Link.FD] = fds
        self._links[:, Link.SCRATCH] = first + np.arange(n_links) * _LINK_BYTES
        self._state[State.LINKS] = self._links.ctypes.data
        self._state[State.N_LINKS] = n_links
        self._state[State.POLL_FDS] = self._poll_fds.ctypes.data
        self._address = self._state.ctypes.data

    def run(
        self,
        rows: npt.NDArray[np.int64],
        work_address: int,
        work_bytes: int,
        header: tuple[int, int, int],
        *,
        reduction: Reduction = NO_REDUCTION,
        deadline_ns: int = NO_DEADLINE,
        abort_address: int = 0,
        slice_ns: int = SLICE_NS,
    ) -> Outcome:
        """Run a schedule to its end. Other Python threads run meanwhile, and signal handlers.

        Parameters
        ----------
        rows : ndarray
            int64, shape (n, 13), C-contiguous: the columns of `Row`.
        work_address, work_bytes : int
            The working buffer.
        header : (int, int, int)
            Epoch, sequence and digest of the call, each as a signed 64-bit integer; the other ends
            must send the same.
        reduction : Reduction
            Of the rows that reduce.
        deadline_ns : int
            By the monotonic clock (`time.monotonic_ns`).
        abort_address : int
            Of a 64-bit word that ends the call when it is not 0; 0: there is none.
        slice_ns : int
            How often signal handlers may run, and how late an abort or a signal may be seen.

        Returns
        -------
        Outcome

        Raises
        ------
        ValueError
            The rows cannot be.
        """
        self.begin(
            rows,
            work_address,
            work_bytes,
            header,
            reduction=reduction,
            deadline_ns=deadline_ns,
            abort_address=abort_address,
            slice_ns=slice_ns,
        )
        return self.finish()

    def begin(
        self,
        rows: npt.NDArray[np.int64],
        work_address: int,
        work_bytes: int,
        header: tuple[int, int, int],
        *,
        reduction: Reduction = NO_REDUCTION,
        deadline_ns: int = NO_DEADLINE,
        abort_address: int = 0,
        slice_ns: int = SLICE_NS,
        ready: int = ALL,
    ) -> None:
        """Take a schedule, as `run` does; nothing moves before `proceed`, or `finish`.

        Parameters
        ----------
        ready : int
            Rows whose gate is higher wait, until `let` says more.
        """
        n_rows = len(rows)
        is_table = rows.dtype == np.int64 and rows.flags.c_contiguous
        if not is_table or rows.shape != (n_rows, ROW_WORDS):
            raise ValueError(
                f"a schedule is a C-contiguous table of int64 with {ROW_WORDS} columns, not "
                f"{rows.dtype} of shape {rows.shape}"
            )
        if n_rows > len(self._plan):
            self._plan = np.zeros((n_rows, PLAN_WORDS), np.int64)
        self._rows = rows  # the loop reads it
        self._state[: State.LINKS] = (
            rows.ctypes.data,
            n_rows,
            self._plan.ctypes.data,
            work_address,
            work_bytes,
            *reduction,
            MAGIC,
            *header,
            abort_address,
            deadline_ns,
            slice_ns,
            ready,
            ALL,
            0,
            _YIELDS if work_bytes <= _FEW_BYTES else 0,
            0,
        )

    def proceed(self) -> Outcome:
        """Go on with what was begun for one slice; `AGAIN` where it is not over."""
        return self._outcome(self._proceed())

    def let(self, ready: int) -> Outcome:
        """Say how many pieces are ready now, and move what can move without waiting."""
        self._state[State.READY] = ready
        self._state[State.STOPS_IDLE] = 1
        try:
            return self.proceed()
        finally:
            self._state[State.STOPS_IDLE] = 0

    def finish(self, until: int = ALL) -> Outcome:
        """Go on to the end.

        Parameters
        ----------
        until : int
            Or until all rows below this one have sent and received: then the outcome is `AGAIN`,
            unless those were all.
        """
        self._state[State.UNTIL] = until
        while (status := self._proceed()) == _AGAIN:
            if self._state[State.FIRST_SEND : State.FIRST_RECEIVE + 1].min() >= until:
                break
        return _DONE if status == 0 else self._outcome(status)

    def _proceed(self) -> int:
        return int(self._run(self._address))

    def _outcome(self, number: int) -> Outcome:
        status = StreamStatus(number)
        link, errno = int(self._state[State.LINK]), int(self._state[State.ERRNO])
        if status == StreamStatus.INVALID:
            row = dict(zip((column.name for column in Row), self._rows[link].tolist(), strict=True))
            raise ValueError(f"row {link} of the schedule, {row}: {_FAULTS[Fault(errno)]}")
        if status == StreamStatus.GONE:
            return Outcome(status, link, errno)
        if status == StreamStatus.MISMATCH:
            return Outcome(status, link, header=self._header_that_came(link))
        return Outcome(status)

    def _header_that_came(self, link: int) -> tuple[int, ...]:
        start = int(self._links[link, Link.SCRATCH]) - HEADER_BYTES - self._scratch.ctypes.data
        came = self._scratch[start : start + HEADER_BYTES].view(np.int64)
        return tuple(came.tolist())[:HEADER_WORDS]


def deadline_after(seconds: float) -> int:
    """Return the deadline that is so many seconds from now."""
    return time.monotonic_ns() + int(seconds * 1e9)
