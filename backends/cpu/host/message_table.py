"""The table of pending messages as Python sees it: begins them, waits for them, says what came."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucoll.backends.cpu.host import left_messages, message_step
from gpucoll.backends.cpu.host.entry_tables import MessageEntries
from gpucoll.backends.cpu.host.message_loop import message_loop
from gpucoll.backends.cpu.host.message_rows import Rows, address_of
from gpucoll.backends.cpu.host.message_waiter import Waiter
from gpucoll.backends.cpu.host.pending_transfers import PendingTransfers
from gpucoll.backends.protocol import MessageRequest
from gpucoll.entries import begun_messages, collectives, messages
from gpucoll.entries.pending import ask_thread
from gpucoll.errors import GpucollError, SharedMemoryError
from gpucoll.group.host.group import HostGroup
from gpucoll.group.host.progress import as_messages, thread
from gpucoll.group.host.segment_room import make_room
from gpucoll.group.protocol import Group
from gpucoll.kernels.cpu.builtins import METH_NOARGS, builtin, capsule
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import (
    MAILBOX_WORDS,
    TABLE_WORDS,
    THREAD_MIN_BYTES,
    Call,
    Context,
    Kind,
    State,
    Status,
    TransferTable,
)
from gpucoll.types import Collective
from gpucoll.wording import another_thread

_Words = npt.NDArray[np.int64]
_ROWS_OF_A_CALL = 2
_LONGEST_SLICE_NS = 20_000_000
_AT_ONCE = 1
_ROWS, _N_ROWS = int(Call.TRANSFERS), int(Call.N_TRANSFERS)
_IS_STARTED, _LEAVES = int(Call.IS_STARTED), int(Call.LEAVES)
_UNTIL_NS, _STATE, _PENDING = int(Call.UNTIL_NS), int(Context.STATE), int(Context.PENDING)
_OK, _MISFIT, _IDLE = int(Status.OK), int(Status.MISFIT), int(State.IDLE)
"""As the time until which to wait: only take everything a step further."""


def _function(code: Any, n_arguments: int) -> Callable[..., int]:
    """Return compiled code as a function that keeps the interpreter: it never waits."""
    words = [ctypes.c_int64] * n_arguments
    made: Callable[..., int] = ctypes.PYFUNCTYPE(ctypes.c_int64, *words)(code.address)
    return made


_post = _function(message_step.message_post, 3)
_drop = _function(message_step.message_drop, 2)
_end = _function(message_step.message_end, 1)
_put_back = _function(message_step.message_put_back, 2)
_release = _function(message_step.message_release, 1)


class MessageTable:
    """Sends, receives and probes of one rank: `gpucoll.backends.protocol.HostMessages`.

    Parameters
    ----------
    group : HostGroup
        The ranks of this host, around the segment that has the mailboxes.
    whole : Group, optional
        The group around that one, which is told of what ends a wait; default: the same.
    """

    def __init__(self, group: HostGroup, whole: Group | None = None) -> None:
        self._group = group
        self._whole: Group = group if whole is None else whole
        self._ends = group.members.layout.ends
        self.room_error: Exception | None = None
        """Why memory for a mailbox could not be taken, when that was last so."""
        self._words = np.frombuffer(bytearray(8 * TABLE_WORDS), np.int64)
        self._address = self._words.ctypes.data
        self._peers = np.frombuffer(bytearray(8 * MAILBOX_WORDS * self._ends), np.int64).reshape(
            self._ends, MAILBOX_WORDS
        )
        free = bytearray(8 * layout.ACKNOWLEDGEMENTS)
        self._free_words = np.frombuffer(free, np.int64)
        self._free_words[:] = range(layout.ACKNOWLEDGEMENTS, 0, -1)
        self._steps = self._new_context()
        self._set_up()
        self._rows = self._new_rows(_ROWS_OF_A_CALL)
        self._blocking = Waiter(self._words, self._new_context())
        self._starting = self._new_context()
        for context in (self._blocking.context, self._starting):
            context[Context.TRANSFERS] = self._address
            context[Context.MESSAGE_ROWS] = self._rows.address
        self._waiters: list[Waiter] = []
        self._row_tables: list[MessageEntries] = []
        self.under_way: set[PendingTransfers] = set()
        """Their rows are in the table: an interrupt may leave nobody else who keeps them."""
        self._entries = self._make_entries()
        self.send, self.receive, self.begin_send, self.begin_receive = (
            entries.call for entries in self._entries
        )
        entry = begun_messages
        blocking, starting = self._blocking.context, self._starting
        self.wait_begun, self.let_go_begun = self._row_entries(
            starting, entry.wait_entry, entry.let_go_entry
        )
        self.take, self._fetch, self.find = self._row_entries(
            blocking, entry.take_entry, entry.fetch_entry, entry.probe_entry
        )
        status = memoryview(self._blocking.context.data)
        self.last_status: Callable[[], int] = lambda: status[Context.STATUS]
        group.context[Context.MESSAGE_STEP] = message_step.message_step.address
        group.context[Context.TRANSFERS] = self._address

    def _new_context(self) -> _Words:
        context = self._group.context_beside()
        context[Context.WORLD_SIZE] = self._ends
        return context

    def _new_rows(self, count: int) -> Rows:
        return Rows(count)

    def _rows_of(self, row: bytearray) -> Rows:
        return Rows.of(row)

    def _set_up(self) -> None:
        words = self._words
        words[TransferTable.CONTEXT] = self._steps.ctypes.data
        words[TransferTable.CALLS] = self._group.context_address
        words[TransferTable.PEERS] = self._peers.ctypes.data
        words[TransferTable.FREE_WORDS] = self._free_words.ctypes.data
        words[TransferTable.N_FREE_WORDS] = len(self._free_words)
        words[TransferTable.LAST_SENDER] = self._ends - 1
        words[TransferTable.LONGEST_SLICE_NS] = _LONGEST_SLICE_NS
        words[TransferTable.POST] = message_step.message_post.address
        words[TransferTable.STEP] = message_step.message_step.address

    def _make_entries(self) -> list[MessageEntries]:
        """Return the entries that send and receive, blocking; and those that begin to."""
        group, blocking, starting = self._group, self._blocking.context, self._starting
        entry, start = messages.message_entry, begun_messages.start_entry
        return [
            MessageEntries(group, entry, blocking, sends=True),
            MessageEntries(group, entry, blocking, sends=False),
            MessageEntries(group, start, starting, sends=True),
            MessageEntries(group, start, starting, sends=False),
        ]

    def _row_entries(self, context: _Words, *codes: Any) -> list[Callable[..., Any]]:
        """Return entries that wait for one row each."""
        entries = MessageEntries(self._group, codes[0], context, sends=False)
        block = CallBlock(Collective.SEND, message_loop.address)
        entries.learn(None, None, None, lambda: block)
        self._row_tables.append(entries)
        return [entries.entry_of(code) for code in codes]

    # --- the compiled entries ---------------------------------------------------------------------

    def learn(self, kind: Kind, dtype: np.dtype[Any], name: str, description: bytes | None) -> None:
        """Make the compiled entries serve arrays of this dtype."""
        padded = (description or b"").ljust(-(-len(description or b"") // 8) * 8, b"\0")
        for entries in self._entries[int(kind != Kind.SEND) :: 2]:

            def make(context: _Words = entries.context) -> CallBlock:
                size = dtype.itemsize
                block = CallBlock(
                    Collective.SEND, message_loop.address, dtype=name, item_bytes=size
                )
                block.words[Call.TRANSFERS] = self._rows.address
                if description is not None:
                    block.words[Call.DESCRIPTION] = address_of(padded)
                    block.words[Call.DESCRIPTION_BYTES] = len(description)
                    block.keep = (padded,)
                return block

            entries.learn(dtype, None, None, make)

    def hold(self, is_held: bool) -> None:
        """Keep the compiled entries from running calls at once, or let them again."""
        for context in (self._blocking.context, self._starting):
            context[Context.PENDING] = is_held

    def within(self, entry: Callable[..., Any], timeout_s: float, *arguments: Any) -> Any:
        """Call a compiled entry with a deadline of its own."""
        context = self._blocking.context
        before = context[Context.TIMEOUT_NS]
        context[Context.TIMEOUT_NS] = _nanoseconds(timeout_s)
        try:
            return entry(*arguments)
        finally:
            context[Context.TIMEOUT_NS] = before

    def begun(self, row: bytearray) -> PendingTransfers:
        """Return a message that an entry has begun, for whoever does more than wait for it."""
        rows = self._rows_of(row)
        return PendingTransfers(self, rows, [rows.request()], None)

    def receive_taken(self, row: bytearray, code: int | None = None) -> npt.NDArray[Any] | None:
        """Receive what `take` has taken into a new array; None: see `finish_take`."""
        rows = self._rows_of(row)
        out = rows.new_array() if code is None else rows.new_bytes(code)
        if out is None:
            return None
        if self._fetch(row, out) is None:
            self._finish(row, rows, rows.request())
        return out

    def plain_array(self, row: bytearray) -> tuple[int, int, int, tuple[int, ...], int, int] | None:
        """Return source, tag, dtype's number, shape, size in bytes and place of what was found.

        None where it is no array of a dtype that has a number, or not found yet.
        """
        return self._rows_of(row).plain_array()

    def origin(self, row: bytearray) -> tuple[int, int, int]:
        """Return source, tag and size in bytes of what was received."""
        return self._rows_of(row).origin()

    def received(self, row: bytearray) -> MessageRequest:
        """Return what was received, as a request."""
        rows = self._rows_of(row)
        request = rows.request()
        rows.settle(0, request, None)
        return request

    def finish_take(self, row: bytearray) -> MessageRequest:
        """Return what was taken, or found, as a request; wait, if the entry has left that."""
        rows = self._rows_of(row)
        request = rows.request()
        self._finish(row, rows, request)
        return request

    def _finish(self, row: bytearray, rows: Rows, request: MessageRequest) -> None:
        """Wait for a row that a blocking entry has begun, and left to Python."""
        waiter, status = self._blocking, self.last_status()
        try:
            if status in (Status.NO_ROOM, Status.NOT_RUN):
                waiter.set_rows(rows, 1, is_started=True)
                waiter.words[Call.LEAVES] = 0
                self._run_blocking(waiter, rows, 1)
            elif status != _OK:
                self._whole.raise_for(status)
        finally:  # it is over, or the table is
            self.let_go_begun(row)
        rows.settle(0, request, self.room_error)

    # --- beginning, and waiting -------------------------------------------------------------------

    def start(
        self, requests: Sequence[MessageRequest], timeout_s: float | None
    ) -> PendingTransfers:
        """Begin requests, in this order and behind all that were begun before."""
        self._whole.check_open()
        rows = self._new_rows(len(requests))
        timeout_ns = _nanoseconds(self._group.timeout_s if timeout_s is None else timeout_s)
        kept = rows.fill(requests, timeout_ns, time.monotonic_ns() + timeout_ns)
        transfers = PendingTransfers(self, rows, list(requests), (kept, requests))
        self.under_way.add(transfers)
        if not self._post(rows, len(requests)):
            self._whole.raise_if_aborted()
        if any(map(_is_large, requests)) and not transfers.is_over():
            self._ask_thread()
        return transfers

    def _post(self, rows: Rows, count: int) -> int:
        """Begin rows; return 0 where the table is at its end."""
        return _post(self._address, rows.address, count)

    def _ask_thread(self) -> None:
        """Have the process's thread take messages on, where there can be one."""
        if not self._words[TransferTable.THREAD]:
            keep = self._words, self._peers, self._free_words, self.under_way
            self._group.at_close(partial(_stop_thread, self._address, keep))
            progress = thread()
            if not progress.add(as_messages(self._address)) or not progress.start():
                return
            self._words[TransferTable.THREAD] = progress.address
        ask_thread.ctypes(self._address)

    def wait(self, rows: Rows, count: int, timeout_s: float | None) -> bool:
        """Wait for rows that were begun; return whether they are over.

        With `timeout_s` 0 only a step is made. A signal ends this wait alone.
        """
        until_ns = 0
        if timeout_s is not None:
            until_ns = time.monotonic_ns() + _nanoseconds(timeout_s) if timeout_s else _AT_ONCE
        try:
            waiter = self._waiters.pop()
        except IndexError:
            waiter = Waiter(self._words, self._new_context())
        try:
            waiter.set_rows(rows, count, is_started=True, until_ns=until_ns)
            return self._run_started(waiter, rows, count)
        finally:
            self._waiters.append(waiter)

    def _run_started(self, waiter: Waiter, rows: Rows, count: int) -> bool:
        while True:
            if self._group.is_forked or self._group.is_closed:
                self._group.check_open()
            waiter.states[_STATE] = _IDLE
            status = waiter.run()
            if status == Status.NO_ROOM:
                self._grant()
            elif status == Status.NOT_YET:
                return False
            elif status in (_OK, _MISFIT) or rows.are_over(count):
                return True
            else:
                self._whole.raise_for(status)

    def _grant(self) -> None:
        """Let a send take the memory that it needs; where there is none, it has failed."""
        try:
            make_room(self._steps)
        except SharedMemoryError as error:
            self.room_error = error
            _drop(self._address, int(self._words[TransferTable.NEEDS_ROOM]))
        self._words[TransferTable.NEEDS_ROOM] = 0

    def run(self, requests: Sequence[MessageRequest], timeout_s: float | None) -> None:
        """Begin requests and wait until all are over; as a blocking call."""
        group, waiter = self._group, self._blocking
        rows = self._new_rows(len(requests))
        limit_s = group.timeout_s if timeout_s is None else timeout_s
        kept = rows.fill(requests, _nanoseconds(limit_s), 0)
        waiter.set_rows(rows, len(requests), is_started=False)
        self._run_blocking(waiter, rows, len(requests))
        for place, request in enumerate(requests):
            rows.settle(place, request, self.room_error)
        del kept

    def _run_blocking(self, waiter: Waiter, rows: Rows, count: int) -> None:
        """Wait, with the context of blocking calls; where this rank leaves, all learn it."""
        group, context = self._whole, waiter.states
        held, context[_PENDING] = context[_PENDING], 0
        try:
            while (status := waiter.run()) not in (_OK, _MISFIT):
                if status == Status.NO_ROOM:
                    waiter.words[Call.IS_STARTED] = 1
                    self._grant()
                elif status == Status.NOT_RUN:
                    group.check_open()
                    group.raise_if_aborted()
                    raise another_thread(group.rank, group.world_size)
                else:
                    group.raise_for(status)
        except GpucollError:
            raise
        except BaseException:  # Ctrl-C, no memory: between two steps nobody else sees it
            group.abort(Abort.INTERRUPTED)
            _end(self._address)
            raise
        finally:
            context[_PENDING] = held

    def resume(self, requests: Sequence[MessageRequest]) -> None:
        """Wait for the requests that a compiled entry has begun, and left to Python."""
        waiter = self._blocking
        waiter.set_rows(self._rows, len(requests), is_started=True)
        waiter.words[Call.LEAVES] = 0
        if self.last_status() == Status.NO_ROOM:
            self._run_blocking(waiter, self._rows, len(requests))
        for place, request in enumerate(requests):
            self._rows.settle(place, request, self.room_error)

    # --- probing ----------------------------------------------------------------------------------

    def probe(self, request: MessageRequest) -> bool:
        """Probe without waiting; return whether there is such a message, and fill it in."""
        rows = self._new_rows(1)
        rows.fill([request], 0, 0)
        if not self._post(rows, 1):
            self._whole.raise_if_aborted()
        self.wait(rows, 1, 0.0)
        if not rows.are_over(1) and _drop(self._address, rows.address):
            return False
        rows.settle(0, request, None)
        return True

    def let_go(self, request: MessageRequest) -> None:
        """Give a held message up that nobody will receive: it stands for whoever asks again."""
        if request.held:
            _put_back(self._address, request.held)
            request.held = 0

    def plan(self, request: MessageRequest) -> tuple[Callable[[], int], Callable[[], None]]:
        """Return what sends or receives the same memory again and again, and says a `Status`.

        And what takes back what that has left to Python.
        """
        rows = self._new_rows(1)
        kept = rows.fill([request], 0, 0)
        block = CallBlock(Collective.SEND, message_loop.address)
        words = block.words
        words[Call.CONTEXT] = self._blocking.context.ctypes.data
        words[Call.TRANSFERS], words[Call.N_TRANSFERS] = rows.address, 1
        words[Call.LARGEST_BYTES] = 0 if request.buffer is None else request.buffer.size_bytes
        holder = capsule(words.ctypes.data)
        run: Callable[[], int] = builtin(collectives.prepared_call.address, METH_NOARGS, holder)

        def take_back() -> None:
            if rows.state() and not rows.are_over(1):
                _drop(self._address, rows.address)
            assert kept is not None  # alive as long as this is
            assert block is not None

        return run, take_back

    # --- the end ----------------------------------------------------------------------------------

    def end(self) -> None:
        """Let go of everything: whatever is pending will never be over."""
        if not self._group.is_forked and self._words[TransferTable.IS_DEAD] != 2:
            _end(self._address)
            self._group.context[Context.TRANSFERS] = 0
            _release(self._address)
            self._words[TransferTable.IS_DEAD] = 2
        self.under_way.clear()

    def unreceived(self) -> list[tuple[int, int]]:
        """Return sender and tag of messages that came and that nobody has received."""
        return left_messages.unreceived(self._group.members, self._words, self._peers)

    def undelivered(self) -> list[tuple[int, int]]:
        """Return receiver and number of messages that lie with ranks which have closed."""
        return left_messages.undelivered(self._group.members, self._peers, self._has_closed)

    def _has_closed(self, rank: int) -> bool:
        return self._group.members.has_closed(rank)


def _is_large(request: MessageRequest) -> bool:
    return request.buffer is not None and request.buffer.size_bytes > THREAD_MIN_BYTES


def _stop_thread(table: int, keep: Any) -> None:
    """Have the thread look at a table no more; all that it looks at is kept until then."""
    thread().remove(as_messages(table))


def _nanoseconds(timeout_s: float) -> int:
    return int(min(timeout_s, 1e9) * 1e9)
