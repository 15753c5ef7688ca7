"""The table of pending messages as Python sees it: begins them, waits for them, says what came."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from gpucoll.backends.cpu.host import left_messages, message_step
from gpucoll.backends.cpu.host.entry_tables import MessageEntries
from gpucoll.backends.cpu.host.message_loop import message_loop
from gpucoll.backends.cpu.host.message_rows import Rows, address_of, plain_array
from gpucoll.backends.cpu.host.message_waiter import Waiter
from gpucoll.backends.cpu.host.pending_transfers import PendingTransfers
from gpucoll.backends.protocol import MessageRequest
from gpucoll.entries import begun_messages, messages
from gpucoll.entries.pending import ask_thread
from gpucoll.errors import GpucollError, SharedMemoryError
from gpucoll.group.host.group import HostGroup
from gpucoll.group.host.progress import as_messages, thread
from gpucoll.group.host.segment_room import make_room
from gpucoll.group.protocol import Group
from gpucoll.kernels.cpu.builtins import METH_NOARGS, builtin, capsule
from gpucoll.transport.shared import layout, ordering
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import (
    MAILBOX_WORDS,
    TABLE_WORDS,
    THREAD_MIN_BYTES,
    TRANSFER_WORDS,
    Call,
    Context,
    Kind,
    Progress,
    State,
    Status,
    TransferTable,
)
from gpucoll.types import Collective
from gpucoll.wording import another_thread

_Words = npt.NDArray[np.int64]
_ROWS_OF_A_CALL, _ROW_BYTES = 2, 8 * TRANSFER_WORDS
_LONGEST_SLICE_NS = 20_000_000
_RECEIVES = 1  # which of the entries receives at once
_AT_ONCE = 1
"""As the time until which to wait: only take everything a step further."""
_OK, _MISFIT = int(Status.OK), int(Status.MISFIT)
_IDLE, _TAKEN = int(State.IDLE), int(State.TAKEN)


def _function(code: Any, n_arguments: int) -> Callable[..., int]:
    """Return compiled code as a function that keeps the interpreter: it never waits."""
    words = [ctypes.c_int64] * n_arguments
    made: Callable[..., int] = ctypes.PYFUNCTYPE(ctypes.c_int64, *words)(code.address)
    return made


_post = _function(message_step.message_post, 3)
_drop = _function(message_step.message_drop, 2)
_refuse = _function(message_step.message_refuse, 1)
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
        self._blocking, self._starting = self._new_context(), self._new_context()
        """Of the entries: those whose calls block, and those that begin or wait for one message."""
        for context in (self._blocking, self._starting):
            context[Context.TRANSFERS] = self._address
        self._blocking[Context.MESSAGE_ROWS] = self._rows.address
        self._turn = self._blocking.ctypes.data + 8 * Context.STATE
        self._entering = threading.Lock()
        self._room = threading.RLock()
        """Held while memory is granted; a signal's handler may come to need some, too."""
        self._granting = self._grant_to_entry
        self._words[TransferTable.GRANT] = id(self._granting)
        self._waiters: list[Waiter] = []
        self._row_tables: list[MessageEntries] = []
        self.under_way: set[PendingTransfers] = set()
        """Their rows are in the table: an interrupt may leave nobody else who keeps them."""
        self._entries = self._make_entries()
        self.send, self.receive, self.begin_send, self.begin_receive = (
            entries.call for entries in self._entries
        )
        entry = begun_messages
        self.wait_begun, self.let_go_begun = self._row_entries(
            self._starting, entry.wait_entry, entry.let_go_entry
        )
        self.take, self._fetch, self.find = self._row_entries(
            self._blocking, entry.take_entry, entry.fetch_entry, entry.probe_entry
        )
        self._entries[_RECEIVES].wait_by(CallBlock(Collective.SEND, message_loop.address))
        self.receive_row = self._entries[_RECEIVES].entry_of(entry.receive_entry)
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
        group, blocking, starting = self._group, self._blocking, self._starting
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
        entries.wait_by(CallBlock(Collective.SEND, message_loop.address))
        self._row_tables.append(entries)
        return [entries.entry_of(code) for code in codes]

    # --- the compiled entries ---------------------------------------------------------------------

    def learn(self, kind: Kind, dtype: np.dtype[Any], name: str, description: bytes | None) -> None:
        """Make the compiled entries serve arrays of this dtype."""
        padded = _padded(description or b"")
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
                return block

            entries.learn(dtype, None, None, make)

    def hold(self, is_held: bool) -> None:
        """Keep the compiled entries from running calls at once, or let them again."""
        for context in (self._blocking, self._starting):
            context[Context.PENDING] = is_held

    def begun(self, row: bytearray) -> PendingTransfers:
        """Return a message that an entry has begun, for whoever does more than wait for it."""
        rows = self._rows_of(row)
        return PendingTransfers(self, rows, [rows.request()], None)

    def receive_taken(self, row: bytearray, code: int | None = None) -> npt.NDArray[Any] | None:
        """Receive what `take` has taken into a new array; None: see `ended`."""
        rows = self._rows_of(row)
        out = rows.new_array() if code is None else rows.new_bytes(code)
        if out is None:
            return None
        if self._fetch(row, out) is None:
            try:
                self._wait_blocking(rows, 1, is_started=True)
            finally:  # it is over, or the table is
                self.let_go_begun(row)
        return out

    def plain_array(self, row: bytearray) -> tuple[int, int, int, tuple[int, ...], int, int] | None:
        """Return source, tag, dtype's number, shape, size in bytes and place of what was found.

        None where it is no array of a dtype that has a number, or not found yet.
        """
        return plain_array(row)

    def origin(self, row: bytearray) -> tuple[int, int, int]:
        """Return source, tag and size in bytes of what was received."""
        return self._rows_of(row).origin()

    def ended(self, row: bytearray) -> MessageRequest:
        """Return a row that is over as a request, with what it has found or how it has failed."""
        rows = self._rows_of(row)
        request = rows.request()
        rows.settle(0, request, self.room_error)
        return request

    def ended_together(self, rows: bytearray) -> list[MessageRequest]:
        """Return the rows of one call of an entry in the same way."""
        return [self.ended(rows[at : at + _ROW_BYTES]) for at in range(0, len(rows), _ROW_BYTES)]

    # --- beginning, and waiting -------------------------------------------------------------------

    def start(
        self, requests: Sequence[MessageRequest], timeout_s: float | None
    ) -> PendingTransfers:
        """Begin requests, in this order and behind all that were begun before."""
        self._whole.check_open()
        rows = self._new_rows(len(requests))
        timeout_ns = _nanoseconds(self._group.timeout_s if timeout_s is None else timeout_s)
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
        waiter = self._take_waiter()
        try:
            waiter.set_rows(rows, count, is_started=True, leaves=True, until_ns=until_ns)
            return self._run(waiter, rows, count)
        finally:
            self._waiters.append(waiter)

    def _take_waiter(self) -> Waiter:
        """Return a waiter that no other thread uses until it is put back."""
        try:
            return self._waiters.pop()
        except IndexError:
            return Waiter(self._words, self._new_context())

    def _run(self, waiter: Waiter, rows: Rows, count: int) -> bool:
        """Wait until rows are over; return False where the waiter's own time is, before that."""
        while True:
            if self._group.is_forked or self._group.is_closed:
                self._group.check_open()
            status = waiter.run()
            if status == Status.NO_ROOM:
                waiter.words[Call.IS_STARTED] = 1
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
        """Let a send take the memory that it needs; where there is none, it has failed."""
        with self._room:
            if not self._words[TransferTable.NEEDS_ROOM]:
                return  # another thread has done it meanwhile
            try:
                make_room(self._steps)
            except SharedMemoryError as error:
                self.room_error = error
                _refuse(self._address)
            self._words[TransferTable.NEEDS_ROOM] = 0

    def _grant_to_entry(self) -> None:
        """Do so within a blocking entry."""
        with self._ending():
            self._grant()

    # --- blocking calls ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Make a blocking call, of which there is one at a time: here, or in an entry.

        Raises
        ------
        StateError
            Another thread is in one; or the communicator cannot be used.
        """
        # Not acquire and try: an interrupt in between would leave it locked for ever.
        if self._entering.locked():
            self._raise_refused()
        with self._entering:
            # Where an interrupt came before the end of a call, its turn is still TAKEN.
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
        """Begin requests and wait until all are over; as a blocking call, or a part of one."""
        rows = self._new_rows(len(requests))
        limit_s = self._group.timeout_s if timeout_s is None else timeout_s
        kept = rows.fill(requests, _nanoseconds(limit_s), 0, withdraws=timeout_s is not None)
        self._wait_blocking(rows, len(requests), is_started=False)
        for place, request in enumerate(requests):
            rows.settle(place, request, self.room_error)
        del kept

    def _wait_blocking(self, rows: Rows, count: int, *, is_started: bool) -> None:
        """Wait for rows as a blocking call: where this rank leaves, all learn it."""
        waiter = self._take_waiter()
        try:
            with self._ending():
                waiter.set_rows(rows, count, is_started=is_started, leaves=False)
                self._run(waiter, rows, count)
        finally:
            self._waiters.append(waiter)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Give the communicator up where a blocking call is left by an exception."""
        try:
            yield
        except GpucollError:
            raise
        except BaseException:  # Ctrl-C, no memory: between two steps nobody else sees it
            self._whole.abort(Abort.INTERRUPTED)
            _end(self._address)
            raise

    # --- probing ----------------------------------------------------------------------------------

    def probe(self, request: MessageRequest) -> bool:
        """Probe without waiting; return whether there is such a message, and fill it in."""
        rows = self._new_rows(1)
        rows.fill([request], 0, 0)
        transfers = PendingTransfers(self, rows, [request], None)
        self.under_way.add(transfers)  # an interrupt may come before the row is out of the table
        if not self._post(rows, 1) or not (self.wait(rows, 1, 0.0) or self._take_back(rows)):
            self._raise_refused()
        transfers.settle()
        return rows.state() == Progress.DONE

    def _take_back(self, rows: Rows) -> bool:
        """Take a probe back, unless it is over; return False where the table is over instead."""
        return self.withdraw(rows) or rows.are_over(1)

    def withdraw(self, rows: Rows) -> bool:
        """Take back a receive that no message has come for, or a send of which nothing is posted.

        Returns False where it is neither: it is over, or another rank may see it; or the table is.
        """
        return bool(_drop(self._address, rows.address))

    def let_go(self, request: MessageRequest) -> None:
        """Give a held message up that nobody will receive: it stands for whoever asks again."""
        if request.held:
            _put_back(self._address, request.held)
            request.held = 0

    def plan(self, request: MessageRequest) -> tuple[Callable[[], int], object]:
        """Return what sends or receives the same memory again and again, and says a `Status`.

        And what has to be kept with it.
        """
        rows = self._new_rows(1)
        kept = rows.fill([request], 0, 0)
        block = CallBlock(Collective.SEND, message_loop.address)
        words = block.words
        words[Call.CONTEXT] = self._blocking.ctypes.data
        words[Call.TRANSFERS], words[Call.N_TRANSFERS] = rows.address, 1
        words[Call.LARGEST_BYTES] = 0 if request.buffer is None else request.buffer.size_bytes
        holder = capsule(words.ctypes.data)
        run: Callable[[], int] = builtin(messages.planned_message.address, METH_NOARGS, holder)
        return run, (rows, kept, block)

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
    thread().remove(as_messages(table), keep)


@cache
def _padded(description: bytes) -> bytes:
    """Return whole words of a description, for ever: rows that are pending say where they lie."""
    return description.ljust(-(-len(description) // 8) * 8, b"\0")


def _nanoseconds(timeout_s: float) -> int:
    return int(min(timeout_s, 1e9) * 1e9)
