"""Sends and receives as built-ins of CPython: the fast path of small messages between two ranks.

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
    capsule_pointer,
    count_elements,
    find_call,
    is_idle,
    new_integer,
    new_reference,
    run,
    timeout_of,
)
from gpucoll.entries.deadlines import UNKNOWN, USUAL
from gpucoll.entries.words import EntryTable
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import load32_acquire, load64
from gpucoll.transport.shared.layout import MESSAGE_DIMENSIONS
from gpucoll.transport.shared.words import Call, Context, Held, Kind, Mode, State, Status, Transfer
from gpucoll.types import TAGS

_i64 = types.int64
NO_PEER = -2
_TAGS = int(TAGS)
as_integer = types.ExternalFunction("PyLong_AsLongLong", _i64(_i64))
_error_occurred = types.ExternalFunction("PyErr_Occurred", _i64())
_clear_error = types.ExternalFunction("PyErr_Clear", types.void())
_call = types.ExternalFunction("PyObject_VectorcallDict", _i64(_i64, _i64, _i64, _i64))
new_bytes = types.ExternalFunction("PyByteArray_FromStringAndSize", _i64(_i64, _i64))
release = types.ExternalFunction("Py_DecRef", types.void(_i64))


# --- running a blocking call ----------------------------------------------------------------------


@inline
def _grant(context: Context) -> bool:
    """Have Python grant the memory that a send needs; return whether it succeeded."""
    made = _call(context.transfers.grant, 0, 0, 0)
    if made != 0:
        release(made)
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
        _clear_error()  # beyond 64 bits: Python raises the error
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
