"""The table of pending messages for Python: starts them, waits for them, reports their outcome."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from gpucoll.backends.cpu.host import message_rows, message_step
from gpucoll.backends.cpu.host.entry_tables import MessageEntries
from gpucoll.backends.cpu.host.message_loop import message_loop
from gpucoll.backends.cpu.host.message_rows import (
    PendingTransfers,
    Rows,
    Waiter,
    address_of,
    new_array,
    plain_array,
)
from gpucoll.backends.protocol import MessageRequest
from gpucoll.collectives import Collective
from gpucoll.entries import messages
from gpucoll.entries.pending import ask_thread
from gpucoll.errors import GpucollError, SharedMemoryError
from gpucoll.group.host.group import HostGroup
from gpucoll.group.host.progress import as_messages, nanoseconds, thread
from gpucoll.group.host.segment_room import make_room
from gpucoll.group.protocol import Group
from gpucoll.kernels.cpu.builtins import METH_NOARGS, builtin, capsule
from gpucoll.transport.shared import layout, ordering
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import (
    THREAD_MIN_BYTES,
    Call,
    Context,
    Kind,
    Mailbox,
    Progress,
    State,
    Status,
    Transfer,
    TransferTable,
)
from gpucoll.wording import another_thread

_Words = npt.NDArray[np.int64]
_ROWS_OF_A_CALL, _ROW_BYTES = 2, Transfer.n_bytes
_LONGEST_SLICE_NS = 20_000_000
_RECEIVES = 1  # index of the entry that receives, blocking
_AT_ONCE = 1
"""In place of the end of a wait: only advance everything by a step."""
_OK, _MISFIT = int(Status.OK), int(Status.MISFIT)
_IDLE, _TAKEN = int(State.IDLE), int(State.TAKEN)


_post = ordering.function(message_step.message_post, 3)
_drop = ordering.function(message_step.message_drop, 2)
_refuse = ordering.function(message_step.message_refuse, 1)
_end = ordering.function(message_step.message_end, 1)
_put_back = ordering.function(message_step.message_put_back, 2)
_release = ordering.function(message_step.message_release, 1)


class MessageTable:
    """Sends, receives and probes of one rank: `gpucoll.backends.protocol.HostMessages`.

    Parameters
    ----------
    group : HostGroup
        The ranks of this host, with the segment that holds the mailboxes.
    whole : Group, optional
        The group of all ranks around that one, which learns what ends a wait; default: the same
        group.
    """

    def __init__(self, group: HostGroup, whole: Group | None = None) -> None:
        self._group = group
        self._whole: Group = group if whole is None else whole
        self._ends = group.members.layout.ends
        self.room_error: Exception | None = None
        """Why there was no memory for a mailbox, the last time that it was lacking."""
        self._words = np.frombuffer(bytearray(TransferTable.n_bytes), np.int64)
        self._address = self._words.ctypes.data
        self._peers = np.frombuffer(bytearray(Mailbox.n_bytes * self._ends), np.int64).reshape(
            self._ends, Mailbox.n_words
        )
        free = bytearray(8 * layout.ACKNOWLEDGEMENTS)
        self._free_words = np.frombuffer(free, np.int64)
        self._free_words[:] = range(layout.ACKNOWLEDGEMENTS, 0, -1)
        self._steps = self._new_context()
        self._set_up()
        self._rows = self._new_rows(_ROWS_OF_A_CALL)
        self._blocking, self._starting = self._new_context(), self._new_context()
        """Contexts of the entries that block, and of those that start or wait for one message."""
        for context in (self._blocking, self._starting):
            context[Context.transfers] = self._address
        self._blocking[Context.message_rows] = self._rows.address
        self._turn = self._blocking.ctypes.data + 8 * Context.state
        self._entering = threading.Lock()
        self._room = threading.RLock()
        """Held while memory is granted; a signal handler may need some, too."""
        self._granting = self._grant_to_entry
        self._words[TransferTable.grant] = id(self._granting)
        self._waiters: list[Waiter] = []
        self._row_tables: list[MessageEntries] = []
        self.under_way: set[PendingTransfers] = set()
        """Transfers whose rows are in the table. After an interrupt nothing else may keep them."""
        self._entries = self._make_entries()
        self.send, self.receive, self.begin_send, self.begin_receive = (
            entries.call for entries in self._entries
        )
        self.wait_begun, self.let_go_begun = self._row_entries(
            self._starting, messages.wait_entry, messages.let_go_entry
        )
        self.take, self._fetch, self.find = self._row_entries(
            self._blocking, messages.take_entry, messages.fetch_entry, messages.probe_entry
        )
        self._entries[_RECEIVES].wait_by(CallBlock(Collective.SEND, message_loop.address))
        self.receive_row = self._entries[_RECEIVES].entry_of(messages.receive_entry)
        group.context[Context.message_step] = message_step.message_step.address
        group.context[Context.transfers] = self._address

    def _new_context(self) -> _Words:
        context = self._group.context_beside()
        context[Context.world_size] = self._ends
        return context

    def _new_rows(self, count: int) -> Rows:
        return Rows(count)

    def _rows_of(self, row: bytearray) -> Rows:
        return Rows.of(row)

    def _set_up(self) -> None:
        words = self._words
        words[TransferTable.context] = self._steps.ctypes.data
        words[TransferTable.calls] = self._group.context_address
        words[TransferTable.peers] = self._peers.ctypes.data
        words[TransferTable.free_words] = self._free_words.ctypes.data
        words[TransferTable.n_free_words] = len(self._free_words)
        words[TransferTable.last_sender] = self._ends - 1
        words[TransferTable.longest_slice_ns] = _LONGEST_SLICE_NS
        words[TransferTable.post] = message_step.message_post.address
        words[TransferTable.step] = message_step.message_step.address

    def _make_entries(self) -> list[MessageEntries]:
        """Return the entries that send and receive, blocking; then those that only start."""
        group, blocking, starting = self._group, self._blocking, self._starting
        entry, start = messages.message_entry, messages.start_entry
        return [
            MessageEntries(group, entry, blocking, sends=True),
            MessageEntries(group, entry, blocking, sends=False),
            MessageEntries(group, start, starting, sends=True),
            MessageEntries(group, start, starting, sends=False),
        ]

    def _row_entries(self, context: _Words, *codes: Any) -> list[Callable[..., Any]]:
        """Return entries that each wait for one row."""
        entries = MessageEntries(self._group, codes[0], context, sends=False)
        entries.wait_by(CallBlock(Collective.SEND, message_loop.address))
        self._row_tables.append(entries)
        return [entries.entry_of(code) for code in codes]

    # --- the compiled entries ---------------------------------------------------------------------

    def learn(self, kind: Kind, dtype: np.dtype[Any], name: str, description: bytes | None) -> None:
        """Make the compiled entries serve arrays of this dtype."""
        padded = _padded(description or b"")

        def make() -> CallBlock:
            size = dtype.itemsize
            block = CallBlock(Collective.SEND, message_loop.address, dtype=name, item_bytes=size)
            block.words[Call.transfers] = self._rows.address
            if description is not None:
                block.words[Call.description] = address_of(padded)
                block.words[Call.description_bytes] = len(description)
            return block

        for entries in self._entries[int(kind != Kind.SEND) :: 2]:
            entries.learn(dtype, None, None, make)

    def hold(self, is_held: bool) -> None:
        """Stop the compiled entries from running calls immediately, or allow it again."""
        for context in (self._blocking, self._starting):
            context[Context.pending] = is_held

    def begun(self, row: bytearray) -> PendingTransfers:
        """Return a message that an entry has started, for uses other than waiting for it."""
        rows = self._rows_of(row)
        return PendingTransfers(self, rows, [rows.request()], None)

    def receive_taken(self, row: bytearray, code: int | None = None) -> npt.NDArray[Any] | None:
        """Receive the message that `take` reserved into a new array; None: see `ended`."""
        out = new_array(row) if code is None else self._rows_of(row).new_bytes(code)
        if out is None:
            return None
        if self._fetch(row, out) is None:
            try:
                self._wait_blocking(self._rows_of(row), 1, is_started=True)
            finally:  # the message is over, or the table is
                self.let_go_begun(row)
        return out

    def plain_array(self, row: bytearray) -> tuple[int, int, int, tuple[int, ...], int, int] | None:
        """Return source, tag, dtype's number, shape, size in bytes and place of the found message.

        Returns None if nothing was found yet, or the message is no array of a dtype with a number.
        """
        return plain_array(row)

    def origin(self, row: bytearray) -> tuple[int, int, int]:
        """Return source, tag and size in bytes of the received message."""
        return self._rows_of(row).origin()

    def ended(self, row: bytearray) -> MessageRequest:
        """Return a row that is over as a request, with the message that it found or its error."""
        rows = self._rows_of(row)
        request = rows.request()
        rows.settle(0, request, self.room_error)
        return request

    def ended_together(self, rows: bytearray) -> list[MessageRequest]:
        """Return the rows of one call of an entry, all over, as such requests."""
        return [self.ended(rows[at : at + _ROW_BYTES]) for at in range(0, len(rows), _ROW_BYTES)]

    # --- starting and waiting ---------------------------------------------------------------------

    def start(
        self, requests: Sequence[MessageRequest], timeout_s: float | None
    ) -> PendingTransfers:
        """Start requests, in this order, after all that were started before."""
        self._whole.check_open()
        rows = self._new_rows(len(requests))
        timeout_ns = nanoseconds(self._group.timeout_s if timeout_s is None else timeout_s)
        until_ns = time.monotonic_ns() + timeout_ns
        kept = rows.fill(requests, timeout_ns, until_ns, withdraws=timeout_s is not None)
        transfers = PendingTransfers(self, rows, list(requests), (kept, requests))
        self.under_way.add(transfers)
        if not self._post(rows, len(requests)):
            self._whole.raise_if_aborted()
        if any(map(_is_large, requests)) and not transfers.is_over():
            self._ask_thread()
        return transfers

    def _post(self, rows: Rows, count: int) -> int:
        """Start rows; return 0 if the table is at its end."""
        return _post(self._address, rows.address, count)

    def _ask_thread(self) -> None:
        """Have the process's background thread advance messages, if there can be one."""
        if not self._words[TransferTable.thread]:
            keep = self._words, self._peers, self._free_words, self.under_way
            self._group.at_close(partial(_stop_thread, self._address, keep))
            progress = thread()
            if not progress.add(as_messages(self._address)) or not progress.start():
                return
            self._words[TransferTable.thread] = progress.address
        ask_thread.ctypes(self._address)

    def wait(self, rows: Rows, count: int, timeout_s: float | None) -> bool:
        """Wait for rows that were started; return whether they are over.

        With `timeout_s` 0 only one step is made. A signal ends only this wait.
        """
        until_ns = 0
        if timeout_s is not None:
            until_ns = time.monotonic_ns() + nanoseconds(timeout_s) if timeout_s else _AT_ONCE
        waiter = self._take_waiter()
        try:
            waiter.set_rows(rows, count, is_started=True, leaves=True, until_ns=until_ns)
            return self._run(waiter, rows, count)
        finally:
            self._waiters.append(waiter)

    def _take_waiter(self) -> Waiter:
        """Return a waiter that no other thread uses until it is returned."""
        try:
            return self._waiters.pop()
        except IndexError:
            return Waiter(self._words, self._new_context())

    def _run(self, waiter: Waiter, rows: Rows, count: int) -> bool:
        """Wait until rows are over; return False if the waiter's own time ends first."""
        while True:
            if self._group.is_forked or self._group.is_closed:
                self._group.check_open()
            status = waiter.run()
            if status == Status.NO_ROOM:
                waiter.words[Call.is_started] = 1
                self._grant()
            elif status == Status.NOT_YET:
                return False
            elif status in (_OK, _MISFIT) or rows.are_over(count):
                return True
            elif status == Status.NOT_RUN:
                self._raise_refused()
            else:
                self._whole.raise_for(status)

    def _grant(self) -> None:
        """Get the memory that a send needs; if there is none, the send fails."""
        with self._room:
            if not self._words[TransferTable.needs_room]:
                return  # another thread has done it
            try:
                make_room(self._steps)
            except SharedMemoryError as error:
                self.room_error = error
                _refuse(self._address)
            self._words[TransferTable.needs_room] = 0

    def _grant_to_entry(self) -> None:
        """Get the memory that a send needs, within a blocking entry."""
        with self._ending():
            self._grant()

    # --- blocking calls ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Make a blocking call, here or in an entry; only one runs at a time.

        Raises
        ------
        StateError
            Another thread is in a blocking call, or the communicator cannot be used.
        """
        # Not acquire and try: an interrupt in between would leave it locked for ever.
        if self._entering.locked():
            self._raise_refused()
        with self._entering:
            # If an interrupt came before the end of a call, its turn is still TAKEN.
            if ordering.compare_exchange(self._turn, _IDLE, _TAKEN) not in (_IDLE, _TAKEN):
                self._raise_refused()
            try:
                yield
            finally:
                ordering.compare_exchange(self._turn, _TAKEN, _IDLE)

    def _raise_refused(self) -> NoReturn:
        whole = self._whole
        whole.check_open()
        whole.raise_if_aborted()
        raise another_thread(whole.rank, whole.world_size)

    def run(self, requests: Sequence[MessageRequest], timeout_s: float | None) -> None:
        """Start requests and wait until all are over, as a blocking call or a part of one."""
        rows = self._new_rows(len(requests))
        limit_s = self._group.timeout_s if timeout_s is None else timeout_s
        kept = rows.fill(requests, nanoseconds(limit_s), 0, withdraws=timeout_s is not None)
        self._wait_blocking(rows, len(requests), is_started=False)
        for place, request in enumerate(requests):
            rows.settle(place, request, self.room_error)
        del kept

    def _wait_blocking(self, rows: Rows, count: int, *, is_started: bool) -> None:
        """Wait for rows as a blocking call: if this rank leaves the wait, all ranks learn of it."""
        waiter = self._take_waiter()
        try:
            with self._ending():
                waiter.set_rows(rows, count, is_started=is_started, leaves=False)
                self._run(waiter, rows, count)
        finally:
            self._waiters.append(waiter)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Give the communicator up if an exception leaves a blocking call."""
        try:
            yield
        except GpucollError:
            raise
        except BaseException:  # Ctrl-C, no memory: no other thread sees it between two steps
            self._whole.abort(Abort.INTERRUPTED)
            _end(self._address)
            raise

    # --- probing ----------------------------------------------------------------------------------

    def probe(self, request: MessageRequest) -> bool:
        """Probe without waiting; fill in the request and return whether a message matches."""
        rows = self._new_rows(1)
        rows.fill([request], 0, 0)
        transfers = PendingTransfers(self, rows, [request], None)
        self.under_way.add(transfers)  # an interrupt may come before the row is out of the table
        if not self._post(rows, 1) or not (self.wait(rows, 1, 0.0) or self._take_back(rows)):
            self._raise_refused()
        transfers.settle()
        return rows.state() == Progress.DONE

    def _take_back(self, rows: Rows) -> bool:
        """Withdraw a probe unless it is over; return False if the table is over instead."""
        return self.withdraw(rows) or rows.are_over(1)

    def withdraw(self, rows: Rows) -> bool:
        """Withdraw a receive that no message has matched, or a send that posted nothing.

        Returns False if the message or the table is over, or if another rank may see the message.
        """
        return bool(_drop(self._address, rows.address))

    def let_go(self, request: MessageRequest) -> None:
        """Release a held message that this request will not receive: others can receive it."""
        if request.held:
            _put_back(self._address, request.held)
            request.held = 0

    def plan(self, request: MessageRequest) -> tuple[Callable[[], int], object]:
        """Return a function that sends or receives the same memory at every call.

        The function returns a `Status`. The second value is an object that must be kept with it.
        """
        rows = self._new_rows(1)
        kept = rows.fill([request], 0, 0)
        block = CallBlock(Collective.SEND, message_loop.address)
        words = block.words
        words[Call.context] = self._blocking.ctypes.data
        words[Call.transfers], words[Call.n_transfers] = rows.address, 1
        words[Call.largest_bytes] = 0 if request.buffer is None else request.buffer.size_bytes
        holder = capsule(words.ctypes.data)
        run: Callable[[], int] = builtin(messages.planned_message.address, METH_NOARGS, holder)
        return run, (rows, kept, block)

    # --- the end ----------------------------------------------------------------------------------

    def end(self) -> None:
        """Release everything; pending messages will never be over."""
        if not self._group.is_forked and self._words[TransferTable.is_dead] != 2:
            _end(self._address)
            self._group.context[Context.transfers] = 0
            _release(self._address)
            self._words[TransferTable.is_dead] = 2
        self.under_way.clear()

    def unreceived(self) -> list[tuple[int, int]]:
        """Return sender and tag of the messages that arrived and were not received."""
        return message_rows.unreceived(self._group.members, self._words, self._peers)

    def undelivered(self) -> list[tuple[int, int]]:
        """Return receiver and number of the messages that wait at ranks which have closed."""
        return message_rows.undelivered(self._group.members, self._peers, self._has_closed)

    def _has_closed(self, rank: int) -> bool:
        return self._group.members.has_closed(rank)


def _is_large(request: MessageRequest) -> bool:
    return request.buffer is not None and request.buffer.size_bytes > THREAD_MIN_BYTES


def _stop_thread(table: int, keep: Any) -> None:
    """Remove a table from the thread; everything that the thread reads is kept until then."""
    thread().remove(as_messages(table), keep)


@cache
def _padded(description: bytes) -> bytes:
    """Return a description padded to whole words, kept for ever: pending rows have its address."""
    return description.ljust(-(-len(description) // 8) * 8, b"\0")
