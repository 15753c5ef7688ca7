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
from gpucoll.entries.collectives import (
    TABLE_ARRAY_TYPE,
    TABLE_CONTEXT,
    TABLE_INT_TYPE,
    TABLE_NONE,
    TABLE_SENDS,
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
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import get, load32_acquire, load64, put
from gpucoll.transport.shared.layout import MESSAGE_DIMENSIONS
from gpucoll.transport.shared.steps import DTYPE, LARGEST_BYTES, WORLD_SIZE
from gpucoll.transport.shared.words import (
    TRANSFER_WORDS,
    Call,
    Context,
    Kind,
    Mode,
    State,
    Status,
    Transfer,
    TransferTable,
)
from gpucoll.types import TAGS

_STATE, _BUSY, _NEEDS_PYTHON = int(Context.STATE), int(State.BUSY), int(State.NEEDS_PYTHON)
_OK, _SIGNAL, _NOT_RUN = int(Status.OK), int(Status.SIGNAL), int(Status.NOT_RUN)
_MISFIT, _NO_ROOM = int(Status.MISFIT), int(Status.NO_ROOM)
_i64 = types.int64
_MESSAGE_ROWS, _TRANSFER_TABLE = int(Context.MESSAGE_ROWS), int(Context.TRANSFERS)
_CONTEXT, _ITEM_BYTES = int(Call.CONTEXT), int(Call.ITEM_BYTES)
_TRANSFERS, _N_TRANSFERS = int(Call.TRANSFERS), int(Call.N_TRANSFERS)
_IS_STARTED, _GRANT = int(Call.IS_STARTED), int(TransferTable.GRANT)
_DESCRIPTION, _DESCRIPTION_BYTES = int(Call.DESCRIPTION), int(Call.DESCRIPTION_BYTES)
_T_KIND, _T_PEER, _T_TAG = int(Transfer.KIND), int(Transfer.PEER), int(Transfer.TAG)
_T_ADDRESS, _T_SIZE_BYTES = int(Transfer.ADDRESS), int(Transfer.SIZE_BYTES)
_T_DTYPE, _T_STATE = int(Transfer.DTYPE), int(Transfer.STATE)
_T_DIMENSIONS, _T_DIMENSION = int(Transfer.DIMENSIONS), int(Transfer.DIMENSION)
_T_MODE, _T_NUMBER, _T_HELD = int(Transfer.MODE), int(Transfer.NUMBER), int(Transfer.HELD)
_T_DESCRIPTION = int(Transfer.DESCRIPTION)
_T_DESCRIPTION_BYTES = int(Transfer.DESCRIPTION_BYTES)
_T_TIMEOUT_NS, _T_DEADLINE_NS = int(Transfer.TIMEOUT_NS), int(Transfer.DEADLINE_NS)
_SEND, _RECV = int(Kind.SEND), int(Kind.RECV)
_WITHDRAWS = int(Mode.WITHDRAWS)
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
def _grant(context):
    """Have Python grant the memory that a send needs; return whether it succeeded."""
    made = _call(get(get(context, _TRANSFER_TABLE), _GRANT), 0, 0, 0)
    if made != 0:
        release(made)
    return made != 0


@inline
def run_message(context, call, size_bytes):
    """Run a call to its end; return its status.

    The memory that a send needs is granted on the way. No other thread can come in between: the
    context is BUSY until the rows are complete.
    """
    status = run(context, call, size_bytes)
    if status == _NO_ROOM:
        put(call, _IS_STARTED, 1)
        while status == _NO_ROOM:
            put(context, _STATE, _BUSY)  # `run` holds the interpreter: no other thread came between
            if _grant(context):
                status = run(context, call, size_bytes)
            else:
                put(context, _STATE, _NEEDS_PYTHON)
                status = _SIGNAL
        put(call, _IS_STARTED, 0)
    return status


# --- the arguments --------------------------------------------------------------------------------


@inline
def _fill_row(row, call, x, peer, tag, sends):
    """Describe a message of the array x in a row."""
    put(row, _T_KIND, _SEND if sends else _RECV)
    put(row, _T_PEER, peer)
    put(row, _T_TAG, tag)
    put(row, _T_ADDRESS, load64(x + ARRAY_DATA))
    put(row, _T_SIZE_BYTES, count_elements(x) * get(call, _ITEM_BYTES))
    put(row, _T_DTYPE, get(call, DTYPE))
    put(row, _T_STATE, 0)
    put(row, _T_MODE, 0)
    put(row, _T_NUMBER, 0)
    put(row, _T_HELD, 0)
    put(row, _T_TIMEOUT_NS, 0)
    put(row, _T_DEADLINE_NS, 0)
    if not sends:
        return
    put(row, _T_DESCRIPTION, get(call, _DESCRIPTION))
    put(row, _T_DESCRIPTION_BYTES, get(call, _DESCRIPTION_BYTES))
    n_dimensions = load32_acquire(x + ARRAY_N_DIMENSIONS)
    put(row, _T_DIMENSIONS, n_dimensions)
    dimensions = load64(x + ARRAY_DIMENSIONS)
    for place in range(min(n_dimensions, MESSAGE_DIMENSIONS)):
        put(row, _T_DIMENSION + place, load64(dimensions + 8 * place))


@inline
def peer_and_tag(table, peer_object, tag_object, least):
    """Return peer and tag; the peer is `NO_PEER` if one is below `least` (-1 allows ANY)."""
    int_type = get(table, TABLE_INT_TYPE)
    if (
        load64(peer_object + OBJECT_TYPE) != int_type
        or load64(tag_object + OBJECT_TYPE) != int_type
    ):
        return NO_PEER, 0
    peer, tag = as_integer(peer_object), as_integer(tag_object)
    if (peer == -1 or tag == -1) and _error_occurred() != 0:
        _clear_error()  # beyond 64 bits: Python raises the error
        return NO_PEER, 0
    world_size = get(get(table, TABLE_CONTEXT), WORLD_SIZE)
    if peer < least or peer >= world_size or tag < least or tag >= _TAGS:
        return NO_PEER, 0
    return peer, tag


@inline
def prepare_message(table, row, x, peer_object, tag_object, sends):
    """Fill in the row of one message; return its call block, or 0 if Python must check."""
    if load64(x + OBJECT_TYPE) != get(table, TABLE_ARRAY_TYPE):
        return 0
    none = get(table, TABLE_NONE)
    call = find_call(table, load64(x + ARRAY_DESCRIPTION), none, none)
    if call == 0:
        return 0
    needed = C_CONTIGUOUS if sends else C_CONTIGUOUS | WRITEABLE
    if load32_acquire(x + ARRAY_FLAGS) & needed != needed:
        return 0
    # A receive may have ANY.
    peer, tag = peer_and_tag(table, peer_object, tag_object, 0 if sends else -1)
    if peer == NO_PEER:
        return 0
    _fill_row(row, call, x, peer, tag, sends)
    return call


@inline
def _prepare_messages(table, arguments, n_arguments):
    """Fill in one row, or two for a send_recv; return the call block, or 0."""
    row = get(get(table, TABLE_CONTEXT), _MESSAGE_ROWS)
    x, peer = get(arguments, 0), get(arguments, 1)
    if n_arguments == 4:
        call = prepare_message(table, row, x, peer, get(arguments, 2), get(table, TABLE_SENDS) != 0)
        if call != 0:
            put(call, _N_TRANSFERS, 1)
        return call
    source, out, tag = get(arguments, 2), get(arguments, 3), get(arguments, 4)
    if x == out or prepare_message(table, row, out, source, tag, False) == 0:
        return 0
    size_bytes, address = get(row, _T_SIZE_BYTES), get(row, _T_ADDRESS)
    second = row + 8 * TRANSFER_WORDS
    call = prepare_message(table, second, x, peer, tag, True)
    if call == 0:
        return 0
    distance = get(second, _T_ADDRESS) - address
    if distance < size_bytes and -distance < get(second, _T_SIZE_BYTES):
        return 0  # the arrays overlap
    put(call, _N_TRANSFERS, 2)
    return call


@inline
def _largest_bytes(row, count):
    second = get(row, TRANSFER_WORDS + _T_SIZE_BYTES) if count == 2 else 0
    return max(get(row, _T_SIZE_BYTES), second)


@inline
def _set_timeouts(row, count, timeout_ns):
    for place in range(count):
        first = place * TRANSFER_WORDS
        put(row, first + _T_TIMEOUT_NS, timeout_ns)
        if timeout_ns != USUAL and get(row, first + _T_KIND) == _RECV:
            put(row, first + _T_MODE, _WITHDRAWS)


@compiled
def message_entry(self, arguments, n_arguments):
    """Built-in of ``(x, peer, tag, timeout_s)`` or ``(x, dest, source, out, tag, timeout_s)``.

    Sends x, receives into x, or does both at once. Returns the array that was filled, or x if it
    was sent; a copy of the rows if they are complete and one has failed; or None if nothing was
    started, or if the communicator is broken.
    """
    table = capsule_pointer(self, 0)
    context = get(table, TABLE_CONTEXT)
    if (n_arguments == 4 or n_arguments == 6) and is_idle(context):
        call, timeout_ns = 0, timeout_of(table, arguments, n_arguments, n_arguments - 1)
        if timeout_ns != UNKNOWN:
            call = _prepare_messages(table, arguments, n_arguments)
        if call != 0:
            row, count = get(context, _MESSAGE_ROWS), get(call, _N_TRANSFERS)
            _set_timeouts(row, count, timeout_ns)
            status = run_message(context, call, _largest_bytes(row, count))
            if status == _OK:
                return new_reference(get(arguments, 0 if n_arguments == 4 else 3))
            if status == _SIGNAL:
                return 0
            if status == _MISFIT:
                return new_bytes(row, 8 * TRANSFER_WORDS * count)
    return new_reference(get(table, TABLE_NONE))


@compiled
def planned_message(self, _):
    """Built-in without arguments: runs the call block in its capsule; returns a `Status`."""
    call = capsule_pointer(self, 0)
    context, row = get(call, _CONTEXT), get(call, _TRANSFERS)
    status = _NOT_RUN
    if is_idle(context):
        put(row, _T_DEADLINE_NS, 0)
        status = run_message(context, call, get(call, LARGEST_BYTES))
    return 0 if status == _SIGNAL else new_integer(status)
