"""Point-to-point as Python sees it: tables of operations, and the messages that came too early."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.cpu.host.entry_tables import EntryTable
from gpucoll.backends.cpu.host.message_loop import message_loop
from gpucoll.backends.cpu.host.transfers import KEPT_ASIDE, LAST_SENDER
from gpucoll.backends.protocol import MessageRequest
from gpucoll.entries import messages
from gpucoll.errors import GpucollError
from gpucoll.group.host.group import HostGroup
from gpucoll.transport.shared import layout, ordering
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import Abort, Envelope, SentNumber
from gpucoll.transport.shared.words import (
    TRANSFER_WORDS,
    Call,
    Context,
    Kind,
    Progress,
    Status,
    Transfer,
)
from gpucoll.types import ANY_SOURCE, ANY_TAG, Collective, dtype_code

_WORDS, _SHAPE_WORDS = TRANSFER_WORDS, 1 + layout.MESSAGE_DIMENSIONS


@dataclass(frozen=True)
class _Held:
    """A message that was taken aside: its envelope, as a row of operations, and its data."""

    row: npt.NDArray[np.int64]
    data: npt.NDArray[np.uint8]

    @property
    def buffer(self) -> Buffer:
        """The data as a buffer; its owner is this."""
        return Buffer(self.data.ctypes.data, self.data.shape, "uint8", 1, self)


class MessageTable:
    """Sends, receives and probes of one rank.

    Attributes
    ----------
    send, receive : callable
        The compiled entries ``(x, peer, tag)`` -> x, or None where Python has to look.
    """

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._held: list[_Held] = []
        self._table = _rows([])
        """What is running, or ran last."""
        self._sending = EntryTable(group, messages.message_entry, sends=True)
        self._receiving = EntryTable(group, messages.message_entry)
        self._block = CallBlock(Collective.SEND, message_loop.address)
        self._run_block = group.prepare(self._block, queued=True)
        self.send = self._sending.call
        self.receive = self._receiving.call

    def learn(self, kind: Kind, dtype: np.dtype[Any], name: str) -> None:
        """Make the compiled entry serve arrays of this dtype."""

        def make() -> CallBlock:
            size = dtype.itemsize
            block = CallBlock(Collective.SEND, message_loop.address, dtype=name, item_bytes=size)
            rows = self._group.context.ctypes.data + 8 * Context.MESSAGE_ROWS
            block.words[Call.TRANSFERS] = rows
            return block

        table = self._sending if kind == Kind.SEND else self._receiving
        table.learn(dtype, None, None, make)

    # --- running ----------------------------------------------------------------------------------

    def run(
        self,
        requests: Sequence[MessageRequest],
        on_done: Callable[[MessageRequest], None],
        more: Callable[[], Sequence[MessageRequest]] | None,
        due: Callable[[], tuple[int, float | None]],
    ) -> None:
        """Do all of them at once; return when the last is done: `HostMessages.run`."""
        self._run_rows(list(requests), _rows(requests), on_done, more, due)

    @property
    def timeout_s(self) -> float:
        """The default deadline, in seconds."""
        return self._group.timeout_s

    def resume(self, requests: Sequence[MessageRequest]) -> None:
        """Go on with requests that the compiled entry has begun, and left to Python."""
        start = Context.MESSAGE_ROWS
        rows = self._group.context[start : start + _WORDS * len(requests)]
        table = rows.reshape(len(requests), _WORDS).copy()
        begun_ns = int(self._group.context[Context.START_NS]) or time.monotonic_ns()
        self._run_rows(list(requests), table, lambda _: None, None, lambda: (begun_ns, None))

    def _run_rows(
        self,
        pending: list[MessageRequest],
        table: npt.NDArray[np.int64],
        on_done: Callable[[MessageRequest], None],
        more: Callable[[], Sequence[MessageRequest]] | None,
        due: Callable[[], tuple[int, float | None]],
    ) -> None:
        """Run operations until all are done; where this rank leaves in the middle, all learn it."""
        try:
            self._run_until_done(pending, table, on_done, more, due)
        except GpucollError:
            raise
        except BaseException:  # Ctrl-C, no memory: between two steps nobody else sees it
            self._group.abort(Abort.INTERRUPTED)
            raise

    def _run_until_done(
        self,
        pending: list[MessageRequest],
        table: npt.NDArray[np.int64],
        on_done: Callable[[MessageRequest], None],
        more: Callable[[], Sequence[MessageRequest]] | None,
        due: Callable[[], tuple[int, float | None]],
    ) -> None:
        takes_more = more is not None
        while True:
            table = self._report(pending, table, on_done)
            if self._serve_held(pending, table):
                table = self._report(pending, table, on_done)
            if not pending:
                return
            status = self._run_table(table, due, takes_more)
            if status == Status.ASIDE:
                takes_more = True  # so that it is held here once it came, whatever ends the call
                held = self._aside(int(self._group.context[Context.UNMATCHED]))
                pending.append(MessageRequest(Kind.RECV, -1, -1, held.buffer))
                table = np.concatenate([table, held.row[None]])
            elif status == Status.MORE:
                self._group.context[Context.MORE] = 0
                added = list(more()) if more is not None else []
                pending += added
                table = np.concatenate([table, _rows(added)])

    def _run_table(
        self,
        table: npt.NDArray[np.int64],
        due: Callable[[], tuple[int, float | None]],
        takes_more: bool,
    ) -> int:
        self._table = table
        self._group.context[Context.START_NS], timeout_s = due()
        words = self._block.words
        words[Call.TRANSFERS] = table.ctypes.data
        words[Call.N_TRANSFERS] = len(table)
        words[Call.TAKES_MORE] = takes_more
        goes_on = (Status.ASIDE, Status.MORE)
        return self._group.run_prepared(self._run_block, timeout_s, goes_on)

    def _report(
        self,
        pending: list[MessageRequest],
        table: npt.NDArray[np.int64],
        on_done: Callable[[MessageRequest], None],
    ) -> npt.NDArray[np.int64]:
        """Report and drop what is done; return the rows of the rest."""
        is_done = table[:, Transfer.STATE] >= Progress.DONE
        if not is_done.any():
            return table
        done = [pending[place] for place in np.flatnonzero(is_done)]
        pending[:] = [pending[place] for place in np.flatnonzero(~is_done)]
        for request, row in zip(done, table[is_done], strict=True):
            _fill_in(request, row)
            if (held := _owner(request)) is not None:
                self._hold([*self._held, held])
            else:
                on_done(request)
        return table[~is_done]

    # --- messages that came too early -------------------------------------------------------------

    def _aside(self, sender: int) -> _Held:
        """Return where the next message of a rank goes, which nobody asks for yet."""
        envelope = self._group.members.peek(self._group.rank, sender)
        assert envelope is not None  # this thread alone takes messages, and has just seen it
        data = np.empty(int(envelope[Envelope.SIZE_BYTES]), np.uint8)
        row = _row_of(sender, envelope)
        row[Transfer.ADDRESS] = data.ctypes.data
        row[Transfer.POST] = KEPT_ASIDE
        return _Held(row, data)

    def _hold(self, held: list[_Held]) -> None:
        """Keep these messages; another thread may be looking at the list."""
        self._held = held
        self._group.context[Context.UNEXPECTED] = len(held)

    def _serve_held(self, pending: Sequence[MessageRequest], table: npt.NDArray[np.int64]) -> bool:
        """Give kept messages to those who ask for them, the oldest first; return whether any."""
        has_served = False
        for request, row in zip(pending, table, strict=True) if self._held else ():
            if row[Transfer.KIND] == Kind.SEND or row[Transfer.STATE] != Progress.WAITING:
                continue
            if _owner(request) is not None:
                continue  # takes the next message aside, behind those that are kept
            held = next((held for held in self._held if _asks_for(row, held.row)), None)
            if held is None:
                continue
            has_served = True
            for field in (Transfer.FOUND_PEER, Transfer.FOUND_TAG):
                row[field] = held.row[field]
            size_and_dtype = [Transfer.SIZE_BYTES, Transfer.DTYPE]
            fits = (row[size_and_dtype] == held.row[size_and_dtype]).all()
            row[size_and_dtype] = held.row[size_and_dtype]
            row[Transfer.DIMENSIONS :] = held.row[Transfer.DIMENSIONS :]
            if row[Transfer.KIND] == Kind.PROBE:
                row[Transfer.STATE] = Progress.DONE
            elif not fits:
                row[Transfer.STATE] = Progress.MISFIT
            else:
                ctypes.memmove(int(row[Transfer.ADDRESS]), held.data.ctypes.data, held.data.nbytes)
                row[Transfer.STATE] = Progress.DONE
                self._hold([other for other in self._held if other is not held])
        return has_served

    def look(self, request: MessageRequest) -> bool:
        """Probe without waiting; return whether there is such a message, and fill it in.

        Other messages may be under way in the communicator's thread.
        """
        asking = _rows([request])[0]
        size, last = self._group.world_size, int(self._group.context[LAST_SENDER])
        everyone = ((last + 1 + step) % size for step in range(size))
        peers = everyone if request.peer == ANY_SOURCE else (request.peer,)
        waiting = (row for peer in peers if (row := self._next_from(peer)) is not None)
        for row in (*(held.row for held in self._held), *waiting):
            if _asks_for(asking, row):
                _fill_in(request, row)
                return True
        return False

    def _next_from(self, peer: int) -> npt.NDArray[np.int64] | None:
        """Return the next message of a rank; None where there is none, or is being taken."""
        members, me = self._group.members, self._group.rank
        number = members.taken(me, peer)
        if (envelope := members.peek(me, peer)) is None:
            return None
        row, table = _row_of(peer, envelope), self._table
        is_taken = (table[:, Transfer.STATE] == Progress.UNDER_WAY) & (
            table[:, Transfer.FOUND_PEER] == peer
        )
        if (is_taken & (table[:, Transfer.KIND] == Kind.RECV)).any():
            return None
        # Read after all of that: a message that is still there was not taken meanwhile.
        return row if members.taken(me, peer) == number else None

    def unreceived(self) -> list[tuple[int, int]]:
        """Return sender and tag of messages that came and that nobody has received."""
        members, me = self._group.members, self._group.rank
        found = [
            (int(held.row[Transfer.FOUND_PEER]), int(held.row[Transfer.FOUND_TAG]))
            for held in self._held
        ]
        for peer in range(self._group.world_size):
            if (envelope := members.peek(me, peer)) is not None:
                found.append((peer, int(envelope[Envelope.TAG])))
        return found

    def undelivered(self) -> list[tuple[int, int]]:
        """Return receiver and tag of messages that lie with ranks which have closed."""
        members, me = self._group.members, self._group.rank
        return [
            (peer, int(envelope[Envelope.TAG]))
            for peer in range(self._group.world_size)
            if peer != me
            and members.has_closed(peer)
            and (envelope := members.peek(peer, me)) is not None
        ]

    def ring_own_bell(self) -> None:
        """Make a running table come back for more."""
        # The other thread says that it sleeps, and looks at this: so a full fence before the bell.
        ordering.store(self._group.context.ctypes.data + 8 * Context.MORE, 1)
        self._group.ring_bell(self._group.rank)


def _owner(request: MessageRequest) -> _Held | None:
    """Return the message that a request takes aside; None for a user's request."""
    owner = None if request.buffer is None else request.buffer.owner
    return owner if isinstance(owner, _Held) else None


def _row_of(sender: int, envelope: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return a message as a row of operations: the receive that it fits."""
    row = np.zeros(_WORDS, np.int64)
    row[Transfer.KIND] = Kind.RECV
    row[Transfer.PEER] = row[Transfer.FOUND_PEER] = sender
    row[Transfer.TAG] = row[Transfer.FOUND_TAG] = envelope[Envelope.TAG]
    row[Transfer.SIZE_BYTES] = envelope[Envelope.SIZE_BYTES]
    row[Transfer.DTYPE] = envelope[Envelope.DTYPE]
    row[Transfer.DIMENSIONS :][:_SHAPE_WORDS] = envelope[Envelope.DIMENSIONS :][:_SHAPE_WORDS]
    return row


def _asks_for(asking: npt.NDArray[np.int64], message: npt.NDArray[np.int64]) -> bool:
    """Return whether a receive or probe asks for a message."""
    return asking[Transfer.PEER] in (ANY_SOURCE, message[Transfer.FOUND_PEER]) and asking[
        Transfer.TAG
    ] in (ANY_TAG, message[Transfer.FOUND_TAG])


def _rows(requests: Sequence[MessageRequest]) -> npt.NDArray[np.int64]:
    """Return requests as a table of operations."""
    table = np.zeros((len(requests), _WORDS), np.int64)
    for row, request in zip(table, requests, strict=True):
        row[Transfer.KIND] = request.kind
        row[Transfer.PEER] = request.peer
        row[Transfer.TAG] = request.tag
        if (buffer := request.buffer) is not None:
            row[Transfer.ADDRESS] = buffer.address
            row[Transfer.SIZE_BYTES] = buffer.size_bytes
            row[Transfer.DTYPE] = dtype_code(buffer.dtype)
            row[Transfer.DIMENSIONS] = len(buffer.shape)
            shown = buffer.shape[: layout.MESSAGE_DIMENSIONS]
            row[Transfer.DIMENSION : Transfer.DIMENSION + len(shown)] = shown
            if request.number is not None:
                is_numpy = issubclass(request.number, np.generic)
                row[Transfer.DIMENSIONS] = SentNumber.NUMPY if is_numpy else SentNumber.PYTHON
    return table


def _fill_in(request: MessageRequest, row: npt.NDArray[np.int64]) -> None:
    """Write what was found into a request."""
    request.is_misfit = bool(row[Transfer.STATE] == Progress.MISFIT)
    if request.kind == Kind.SEND:
        return
    request.found_peer = int(row[Transfer.FOUND_PEER])
    request.found_tag = int(row[Transfer.FOUND_TAG])
    request.found_bytes = int(row[Transfer.SIZE_BYTES])
    request.found_dtype = int(row[Transfer.DTYPE])
    n_dimensions = int(row[Transfer.DIMENSIONS])
    if n_dimensions < 0:
        request.found_shape, request.found_number = (), SentNumber(n_dimensions)
        return
    shown = row[Transfer.DIMENSION :][: min(n_dimensions, layout.MESSAGE_DIMENSIONS)]
    is_whole = n_dimensions <= layout.MESSAGE_DIMENSIONS
    request.found_shape = tuple(int(length) for length in shown) if is_whole else None
