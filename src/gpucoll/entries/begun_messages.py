"""Built-ins that start a message and wait for one: the fast path of asynchronous messages.

The row of a message is in a ``bytearray`` that is allocated here. While the row is pending, this
module keeps it alive, together with the array that is sent or filled, whatever happens to the Work:
an interrupt may come before another object keeps them.
"""

from __future__ import annotations

from gpucoll.arrays.numpy_struct import ARRAY_DATA
from gpucoll.blocks import Words
from gpucoll.entries.collectives import (
    capsule_pointer,
    is_idle,
    new_integer,
    new_reference,
    run,
    timeout_of,
)
from gpucoll.entries.deadlines import UNKNOWN, USUAL
from gpucoll.entries.messages import (
    NO_PEER,
    new_bytes,
    peer_and_tag,
    prepare_message,
    release,
    run_message,
)
from gpucoll.entries.pending import want_thread
from gpucoll.entries.words import EntryTable
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import call_post, load64, load64_acquire
from gpucoll.transport.shared.flags import now_ns
from gpucoll.transport.shared.layout import MOST_DESCRIPTION_BYTES
from gpucoll.transport.shared.words import (
    THREAD_MIN_BYTES,
    Context,
    Kind,
    Mode,
    Progress,
    State,
    Status,
    Transfer,
)

_LARGE_BYTES = int(THREAD_MIN_BYTES)

_i64 = types.int64
_bytes_address = types.ExternalFunction("PyByteArray_AsString", _i64(_i64))


@inline
def _new_row(memory: int) -> Transfer:
    """Return an empty row in new memory."""
    row = Transfer(_bytes_address(memory))
    for place in range(Transfer.n_words):
        Words(row.address)[place] = 0
    return row


@inline
def _keep(row: Transfer, memory: int, array: int) -> None:
    """Keep a row's memory and its array alive until `_let_go`."""
    new_reference(memory)
    row.kept = new_reference(array)


@inline
def _let_go(row: Transfer, memory: int) -> None:
    array = row.kept
    if array != 0:
        row.kept = 0
        release(array)
        release(memory)


@inline
def _post(context: Context, row: Transfer) -> bool:
    """Start a message; return whether this succeeded."""
    transfers = context.transfers
    return call_post(transfers.post, transfers, row, 1) != 0


@inline
def _set_deadline(context: Context, row: Transfer, timeout_ns: int) -> None:
    """Set a message's deadline. No other thread uses the context."""
    if timeout_ns == USUAL:
        timeout_ns = context.timeout_ns
    elif row.kind != Kind.SEND:
        row.mode = Mode.WITHDRAWS
    row.timeout_ns = timeout_ns
    row.deadline_ns = now_ns(context) + timeout_ns


@inline
def row_state(row: Transfer) -> int:
    """Return a row's progress. If the row is complete, the data that it found is visible, too."""
    return load64_acquire(row.at.state)


@compiled
def start_entry(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of ``(x, peer, tag)``: starts a message.

    Returns the memory of its row; x if the message was sent already; None if Python must check.
    """
    table = EntryTable(capsule_pointer(self, 0))
    context = table.context
    if n_arguments == 3 and is_idle(context):
        memory = new_bytes(0, Transfer.n_bytes)
        if memory == 0:
            return 0
        row, x = _new_row(memory), arguments[0]
        peer, tag = arguments[1], arguments[2]
        call = prepare_message(table, row, x, peer, tag, table.sends != 0)
        transfers, is_large = context.transfers, row.size_bytes > _LARGE_BYTES
        if call and not (is_large and not transfers.thread):
            _keep(row, memory, x)
            _set_deadline(context, row, USUAL)
            if _post(context, row):
                state = row_state(row)
                if is_large and state < Progress.DONE:
                    want_thread(transfers)
                if state != Progress.DONE or table.sends == 0:
                    return memory
                _let_go(row, memory)
                release(memory)
                return new_reference(x)
            _let_go(row, memory)
        release(memory)
    return new_reference(table.none)


@inline
def _wait(table: EntryTable, row: Transfer, leaves: int) -> int:
    """Wait until a row is complete; return a status.

    With `leaves`, a signal ends only the wait; otherwise the communicator is given up.
    """
    state, context, call = row_state(row), table.context, table.waits
    if state >= Progress.DONE:
        return Status.OK if state == Progress.DONE else Status.MISFIT
    if context.state != State.IDLE:
        return Status.NOT_RUN  # another thread waits in a call; or the communicator is broken
    call.transfers = row
    call.n_transfers = 1
    call.is_started = 1
    call.leaves = leaves
    if leaves == 0:
        return run_message(context, call, row.size_bytes)
    return run(context, call, row.size_bytes)


@inline
def _run_row(table: EntryTable, row: Transfer, memory: int, array: int, timeout_ns: int) -> int:
    """Start a row and wait for it, as a blocking call; return a status.

    Whatever the status, nothing uses the row afterwards: the row is complete, or the table is dead.
    """
    context = table.context
    status: int = Status.EVENT
    _keep(row, memory, array)
    _set_deadline(context, row, timeout_ns)
    if _post(context, row):
        status = _wait(table, row, 0)
    _let_go(row, memory)
    return status


@compiled
def wait_entry(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of ``(memory of a row,)``: waits until the message is complete.

    Returns a `Status`. After OK and MISFIT it is complete; after NOT_RUN Python must wait.
    """
    table, memory = EntryTable(capsule_pointer(self, 0)), arguments[0]
    row = Transfer(_bytes_address(memory))
    status = _wait(table, row, 1)
    if status == Status.OK:
        _let_go(row, memory)
    return 0 if status == Status.SIGNAL else new_integer(status)


@compiled
def let_go_entry(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of ``(memory of a row,)``, which is complete, or which nothing will use any more."""
    memory = arguments[0]
    _let_go(Transfer(_bytes_address(memory)), memory)
    return new_reference(EntryTable(capsule_pointer(self, 0)).none)


@inline
def _row_or_none(table: EntryTable, memory: int, status: int) -> int:
    """Return the memory of a complete row; None if it is not complete; 0 if a signal ended it."""
    if status == Status.OK or status == Status.MISFIT:
        return memory
    release(memory)
    return 0 if status == Status.SIGNAL else new_reference(table.none)


@inline
def _find(self: int, arguments: Words, n_arguments: int, kind: int, room_bytes: int) -> int:
    """Wait for a message with this source and tag; return the memory of a row, None, or 0."""
    table = EntryTable(capsule_pointer(self, 0))
    context, none = table.context, table.none
    if n_arguments != 3 or not is_idle(context):
        return new_reference(none)
    timeout_ns = timeout_of(table, arguments, n_arguments, 2)
    peer, tag = peer_and_tag(table, arguments[0], arguments[1], -1)
    if peer == NO_PEER or timeout_ns == UNKNOWN:
        return new_reference(none)
    memory = new_bytes(0, Transfer.n_bytes + room_bytes)
    if memory == 0:
        return 0
    row = _new_row(memory)
    row.kind = kind
    row.peer = peer
    row.tag = tag
    row.description = Words(row.address + Transfer.n_bytes) if room_bytes else Words(0)
    return _row_or_none(table, memory, _run_row(table, row, memory, none, timeout_ns))


@compiled
def receive_entry(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of ``(x, source, tag, timeout_s)``: receives into x. Returns like `take_entry`.

    For a blocking receive whose caller needs more than x.
    """
    table, x = EntryTable(capsule_pointer(self, 0)), arguments[0]
    context, none = table.context, table.none
    if n_arguments != 4 or not is_idle(context):
        return new_reference(none)
    timeout_ns = timeout_of(table, arguments, n_arguments, 3)
    if timeout_ns == UNKNOWN:
        return new_reference(none)
    memory = new_bytes(0, Transfer.n_bytes)
    if memory == 0:
        return 0
    row = _new_row(memory)
    if not prepare_message(table, row, x, arguments[1], arguments[2], 0):
        release(memory)
        return new_reference(none)
    return _row_or_none(table, memory, _run_row(table, row, memory, x, timeout_ns))


@compiled
def take_entry(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of ``(source, tag, timeout_s)``: takes a message of any kind.

    Returns the memory of its row, which is complete; None if nothing was started, or if the
    communicator is broken.
    """
    return _find(self, arguments, n_arguments, Kind.TAKE, 0)


@compiled
def probe_entry(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of ``(source, tag, timeout_s)``: finds a message without receiving it.

    Returns like `take_entry`.
    """
    return _find(self, arguments, n_arguments, Kind.PROBE, MOST_DESCRIPTION_BYTES)


@compiled
def fetch_entry(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of ``(memory of a row, array)``: receives a taken message into a new array.

    Returns the array; None if Python must wait for the row, which keeps both alive. It starts
    whatever other threads do, because the message has left the mailbox and no other call can get
    it.
    """
    table, memory, array = EntryTable(capsule_pointer(self, 0)), arguments[0], arguments[1]
    context, none = table.context, table.none
    row = Transfer(_bytes_address(memory))
    row.kind = Kind.RECV
    row.peer = row.found_peer
    row.tag = row.found_tag
    row.memory = load64(array + ARRAY_DATA)
    row.size_bytes = row.found_bytes
    row.dtype = row.found_dtype
    row.mode = 0
    row.timeout_ns = 0  # the call's deadline was for the message to come
    row.deadline_ns = 0
    row.state = 0
    _keep(row, memory, array)
    if not _post(context, row) or row_state(row) != Progress.DONE:
        return new_reference(none)
    _let_go(row, memory)
    return new_reference(array)
