"""Run schedules of sends, receives and reductions over connections, outside the interpreter.

A schedule is a table of rows (`Row`), int64, in the order of their steps. Each row sends a range of
one working buffer over a link, receives a range over a link, or does both. On every link, bytes are
sent and received in the order of the rows, unframed, after one header for each direction that a
call uses. All transfers of a step run at the same time; steps overlap as far as the data allows:

- Rows belong to one section, or to several that follow each other. No two sections have a byte in
  common, and a row waits for a row of another section only for its turn on its link. If several
  pieces of an array become ready one after the other, each is a section: ``gate`` is the number of
  pieces that must be ready.
- A send of step s begins when all receives of earlier steps are complete, and reduced. With
  ``forwards`` it begins earlier. It then follows the last earlier row that receives exactly the
  same range, and sends what that row has received; no row between the two may receive a part of
  that range.
- A receive overwrites, or reduces into, a byte once all sends of that byte in its own and earlier
  steps are complete, and all receives of it in earlier rows. So every schedule may work in place:
  data that comes too early waits, in up to 256 KiB of memory and then in the connection.
- A schedule ends if no rank waits for itself. With at most one message in each direction for each
  link and step, two conditions suffice. On each rank, any two ranges of one step are the same or
  share no byte (two that are sent may), and the schedule would end if each step began after the one
  before. Rings, recursive doubling, halving-doubling, Bruck, trees, chains and pairwise exchanges
  satisfy them, in place.
- A range without bytes is sent as its link's header alone: it begins with its step, so steps of
  such ranges make a barrier. Only the first range of a direction has a header, so each of these
  steps needs a link of its own; nothing is sent for a later range without bytes.

Reduced ranges consist of whole items. The kernel gets two operands, and its output is in place;
``theirs_first`` tells which operand is the left one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpucoll.blocks import Words
from gpucoll.transport.tcp.stream_loop import run_streams
from gpucoll.transport.tcp.stream_words import (
    HEADER_BYTES,
    HEADER_WORDS,
    MAGIC,
    SCRATCH_BYTES,
    Fault,
    Link,
    Plan,
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
"""In place of a number of ready pieces: all of them."""
SLICE_NS = 20_000_000
_FEW_BYTES = 1 << 20
"""A call of at most this size yields for a while before it sleeps: its steps dominate its time."""
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
    Fault.SECTION: "it is not among the rows of its section, or these disagree about the section",
}


class Reduction(NamedTuple):
    """How received data is combined with the data in place.

    Attributes
    ----------
    kernel : int
        Address of a reduce kernel (`gpucoll.kernels.cpu.addresses.reduce_kernel`).
    item_bytes : int
        Size of an element in bytes, complex numbers as a whole.
    parts : int
        How many parts of each element the kernel counts (`parts_per_element`).
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
        How it ended; `AGAIN` only from `Streams.proceed`, `let`, or `finish` with `until`.
    link : int
        The link that is gone, or does not match; else -1.
    errno : int
        For a link that is gone: the errno, or 0 if the other end has closed it.
    header : tuple of int
        The received header if it does not match: magic, epoch, sequence, digest.
    """

    status: StreamStatus
    link: int = -1
    errno: int = 0
    header: tuple[int, ...] = ()


_DONE = Outcome(StreamStatus.DONE)


class Streams:
    """Connections to other ranks, over which calls run one after the other.

    A call that does not end with `DONE`, or that a signal handler interrupts with an exception,
    leaves the connections in the middle of a transfer: they can only be closed. A lost connection
    is noticed when something is to be sent or received on it. Only one thread at a time may use
    this object.

    Parameters
    ----------
    fds : sequence of int
        Descriptors of connected sockets that do not block; the caller keeps them. A link's number
        is its place in this sequence.
    """

    _loop = run_streams

    def __init__(self, fds: Sequence[int]) -> None:
        self._run = self._loop.ctypes  # compiling it takes 3 s, once per machine
        n_links = len(fds)
        self._links = np.zeros((n_links, Link.n_words), np.int64)
        self._poll_fds = np.zeros(n_links, np.int64)
        # NumPy does not write to it, so only used parts take memory.
        self._scratch = np.empty(_LINE_BYTES + n_links * _LINK_BYTES, np.uint8)
        self._state = State.new()
        self._plan = np.zeros((0, Plan.n_words), np.int64)
        self._rows = np.zeros((0, Row.n_words), np.int64)
        first = self._scratch.ctypes.data + 2 * _LINE_BYTES & -_LINE_BYTES
        self._links[:, Link.fd] = fds
        self._links[:, Link.scratch] = first + np.arange(n_links) * _LINK_BYTES
        self._state.links = self._links.ctypes.data
        self._state.n_links = n_links
        self._state.poll_fds = Words(self._poll_fds.ctypes.data)
        self._address = self._state.address

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
        """Run a schedule to its end; other Python threads and signal handlers run in the meantime.

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
            How rows that reduce combine data.
        deadline_ns : int
            As `time.monotonic_ns` counts.
        abort_address : int
            Address of a 64-bit word that ends the call when it is not 0; 0: there is none.
        slice_ns : int
            How often signal handlers may run, and by how much an abort or a signal may be noticed
            late.

        Returns
        -------
        Outcome

        Raises
        ------
        ValueError
            The rows are invalid.
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
        """Begin a schedule; nothing moves before `proceed`, `let` or `finish`.

        See `run` for the other parameters and the errors.

        Parameters
        ----------
        ready : int
            The number of ready pieces: rows with a higher gate wait until `let` raises it.
        """
        n_rows = len(rows)
        is_table = rows.dtype == np.int64 and rows.flags.c_contiguous
        if not is_table or rows.shape != (n_rows, Row.n_words):
            raise ValueError(
                f"a schedule is a C-contiguous table of int64 with {Row.n_words} columns, not "
                f"{rows.dtype} of shape {rows.shape}"
            )
        if n_rows > len(self._plan):
            self._plan = np.zeros((n_rows, Plan.n_words), np.int64)
        self._rows = rows  # the loop reads it
        self._state.words[: State.links] = (
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
        """Go on with the schedule for one slice; the outcome is `AGAIN` if it is not complete."""
        return self._outcome(self._proceed())

    def let(self, ready: int) -> Outcome:
        """Announce how many pieces are ready now, and move what can move without waiting."""
        self._state.ready = ready
        self._state.stops_idle = 1
        try:
            return self.proceed()
        finally:
            self._state.stops_idle = 0

    def finish(self, until: int = ALL) -> Outcome:
        """Go on to the end.

        Parameters
        ----------
        until : int
            If given, stop when all rows below this one have sent and received: the outcome is then
            `AGAIN`, unless those were all rows.
        """
        self._state.until = until
        while (status := self._proceed()) == _AGAIN:
            if min(self._state.first_send, self._state.first_receive) >= until:
                break
        return _DONE if status == 0 else self._outcome(status)

    def _proceed(self) -> int:
        return int(self._run(self._address))

    def _outcome(self, number: int) -> Outcome:
        status = StreamStatus(number)
        link, errno = self._state.link, self._state.errno
        if status == StreamStatus.INVALID:
            row = dict(zip(Row.fields, self._rows[link].tolist(), strict=True))
            raise ValueError(f"row {link} of the schedule, {row}: {_FAULTS[Fault(errno)]}")
        if status == StreamStatus.GONE:
            return Outcome(status, link, errno)
        if status == StreamStatus.MISMATCH:
            return Outcome(status, link, header=self._header_that_came(link))
        return Outcome(status)

    def _header_that_came(self, link: int) -> tuple[int, ...]:
        start = int(self._links[link, Link.scratch]) - HEADER_BYTES - self._scratch.ctypes.data
        came = self._scratch[start : start + HEADER_BYTES].view(np.int64)
        return tuple(came.tolist())[:HEADER_WORDS]


def deadline_after(seconds: float) -> int:
    """Return the deadline that is `seconds` from now."""
    return time.monotonic_ns() + int(seconds * 1e9)
