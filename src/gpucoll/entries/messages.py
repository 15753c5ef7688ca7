"""Built-ins that send and receive a message, or start one and wait for it later.

Like `gpucoll.entries.collectives` for collectives, they serve exact NumPy arrays whose dtype is in
the table, and plain ints. They leave everything else, including errors, to Python by returning
``None``.
"""

from __future__ import annotations

from gpucoll.arrays.numpy_struct import (
    ARRAY_DATA,
    ARRAY_DESCRIPTION,
    ARRAY_DIMENSIONS,
    ARRAY_FLAGS,
    ARRAY_N_DIMENSIONS,
    C_CONTIGUOUS,
    OBJECT_TYPE,
    WRITEABLE,
)
from gpucoll.blocks import Words
from gpucoll.entries.collectives import (
    UNKNOWN,
    USUAL,
    EntryTable,
    as_integer,
    call_object,
    capsule_pointer,
    clear_error,
    count_elements,
    drop_reference,
    find_call,
    is_idle,
    new_integer,
    new_reference,
    run,
    timeout_of,
)
from gpucoll.entries.pending import want_thread
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import call_post, load32_acquire, load64, load64_acquire
from gpucoll.transport.shared.flags import now_ns
from gpucoll.transport.shared.layout import MESSAGE_DIMENSIONS, MOST_DESCRIPTION_BYTES
from gpucoll.transport.shared.words import (
    THREAD_MIN_BYTES,
    Call,
    Context,
    Held,
    Kind,
    Mode,
    Progress,
    State,
    Status,
    Transfer,
)
from gpucoll.types import TAGS

_i64 = types.int64
NO_PEER = -2
_TAGS = int(TAGS)
_error_occurred = types.ExternalFunction("PyErr_Occurred", _i64())
new_bytes = types.ExternalFunction("PyByteArray_FromStringAndSize", _i64(_i64, _i64))


# --- running a blocking call ----------------------------------------------------------------------


@inline
def _grant(context: Context) -> bool:
    """Have Python grant the memory that a send needs; return whether it succeeded."""
    made = call_object(context.transfers.grant, 0, 0, 0)
    if made != 0:
        drop_reference(made)
    return made != 0


@inline
def run_message(context: Context, call: Call, size_bytes: int) -> int:
    """Run a call to its end; return its status.

    The memory that a send needs is granted on the way. No other thread can come in between: the
    context is BUSY until the rows are complete.
    """
    status = run(context, call, size_bytes)
    if status == Status.NO_ROOM:
        call.is_started = 1
        while status == Status.NO_ROOM:
            context.state = State.BUSY  # `run` holds the interpreter: no other thread came between
            if _grant(context):
                status = run(context, call, size_bytes)
            else:
                context.state = State.NEEDS_PYTHON
                status = Status.SIGNAL
        call.is_started = 0
    return status


# --- the arguments --------------------------------------------------------------------------------


@inline
def _fill_row(row: Transfer, call: Call, x: int, peer: int, tag: int, sends: int) -> None:
    """Describe a message of the array x in a row."""
    row.kind = Kind.SEND if sends else Kind.RECV
    row.peer = peer
    row.tag = tag
    row.memory = load64(x + ARRAY_DATA)
    row.size_bytes = count_elements(x) * call.item_bytes
    row.dtype = call.dtype
    row.state = 0
    row.mode = 0
    row.number = 0
    row.held = Held(0)
    row.timeout_ns = 0
    row.deadline_ns = 0
    if not sends:
        return
    row.description = call.description
    row.description_bytes = call.description_bytes
    n_dimensions = load32_acquire(x + ARRAY_N_DIMENSIONS)
    row.n_dimensions = n_dimensions
    dimensions = load64(x + ARRAY_DIMENSIONS)
    for place in range(min(n_dimensions, MESSAGE_DIMENSIONS)):
        row.dimensions[place] = load64(dimensions + 8 * place)


@inline
def peer_and_tag(
    table: EntryTable, peer_object: int, tag_object: int, least: int
) -> tuple[int, int]:
    """Return peer and tag; the peer is `NO_PEER` if one is below `least` (-1 allows ANY)."""
    int_type = table.int_type
    if (
        load64(peer_object + OBJECT_TYPE) != int_type
        or load64(tag_object + OBJECT_TYPE) != int_type
    ):
        return NO_PEER, 0
    peer, tag = as_integer(peer_object), as_integer(tag_object)
    if (peer == -1 or tag == -1) and _error_occurred() != 0:
        clear_error()  # beyond 64 bits: Python raises the error
        return NO_PEER, 0
    world_size = table.context.world_size
    if peer < least or peer >= world_size or tag < least or tag >= _TAGS:
        return NO_PEER, 0
    return peer, tag


@inline
def prepare_message(
    table: EntryTable, row: Transfer, x: int, peer_object: int, tag_object: int, sends: int
) -> Call:
    """Fill in the row of one message; return its call block, or 0 if Python must check."""
    if load64(x + OBJECT_TYPE) != table.array_type:
        return Call(0)
    none = table.none
    call = find_call(table, load64(x + ARRAY_DESCRIPTION), none, none)
    if not call:
        return Call(0)
    needed = C_CONTIGUOUS if sends else C_CONTIGUOUS | WRITEABLE
    if load32_acquire(x + ARRAY_FLAGS) & needed != needed:
        return Call(0)
    # A receive may have ANY.
    peer, tag = peer_and_tag(table, peer_object, tag_object, 0 if sends else -1)
    if peer == NO_PEER:
        return Call(0)
    _fill_row(row, call, x, peer, tag, sends)
    return call


@inline
def _prepare_messages(table: EntryTable, arguments: Words, n_arguments: int) -> Call:
    """Fill in one row, or two for a send_recv; return the call block, or 0."""
    row = table.context.message_rows
    x, peer = arguments[0], arguments[1]
    if n_arguments == 4:
        call = prepare_message(table, row, x, peer, arguments[2], table.sends != 0)
        if call:
            call.n_transfers = 1
        return call
    source, out, tag = arguments[2], arguments[3], arguments[4]
    if x == out or not prepare_message(table, row, out, source, tag, False):
        return Call(0)
    size_bytes, address = row.size_bytes, row.memory
    second = row[1]
    call = prepare_message(table, second, x, peer, tag, True)
    if not call:
        return Call(0)
    distance = second.memory - address
    if distance < size_bytes and -distance < second.size_bytes:
        return Call(0)  # the arrays overlap
    call.n_transfers = 2
    return call


@inline
def _largest_bytes(row: Transfer, count: int) -> int:
    second = row[1].size_bytes if count == 2 else 0
    return max(row.size_bytes, second)


@inline
def _set_timeouts(rows: Transfer, count: int, timeout_ns: int) -> None:
    for place in range(count):
        row = rows[place]
        row.timeout_ns = timeout_ns
        if timeout_ns != USUAL and row.kind == Kind.RECV:
            row.mode = Mode.WITHDRAWS


@compiled
def message_entry(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of ``(x, peer, tag, timeout_s)`` or ``(x, dest, source, out, tag, timeout_s)``.

    Sends x, receives into x, or does both at once. Returns the array that was filled, or x if it
    was sent; a copy of the rows if they are complete and one has failed; or None if nothing was
    started, or if the communicator is broken.
    """
    table = EntryTable(capsule_pointer(self, 0))
    context = table.context
    if (n_arguments == 4 or n_arguments == 6) and is_idle(context):
        call, timeout_ns = Call(0), timeout_of(table, arguments, n_arguments, n_arguments - 1)
        if timeout_ns != UNKNOWN:
            call = _prepare_messages(table, arguments, n_arguments)
        if call:
            row, count = context.message_rows, call.n_transfers
            _set_timeouts(row, count, timeout_ns)
            status = run_message(context, call, _largest_bytes(row, count))
            if status == Status.OK:
                return new_reference(arguments[0 if n_arguments == 4 else 3])
            if status == Status.SIGNAL:
                return 0
            if status == Status.MISFIT:
                return new_bytes(row, Transfer.n_bytes * count)
    return new_reference(table.none)


@compiled
def planned_message(self: int, _: int) -> int:
    """Built-in without arguments: runs the call block in its capsule; returns a `Status`."""
    call = Call(capsule_pointer(self, 0))
    context, row = call.context, call.transfers
    status: int = Status.NOT_RUN
    if is_idle(context):
        row.deadline_ns = 0
        status = run_message(context, call, call.largest_bytes)
    return 0 if status == Status.SIGNAL else new_integer(status)


# --- asynchronous messages ------------------------------------------------------------------------

# The row of a message is in a ``bytearray`` that is allocated here. While the row is pending, this
# module keeps it alive, together with the array that is sent or filled, whatever happens to the
# Work: an interrupt may come before another object keeps them.


_LARGE_BYTES = int(THREAD_MIN_BYTES)

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
        drop_reference(array)
        drop_reference(memory)


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
                drop_reference(memory)
                return new_reference(x)
            _let_go(row, memory)
        drop_reference(memory)
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
    drop_reference(memory)
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
        drop_reference(memory)
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
