"""Built-ins that start a message and wait for one: the fast path of asynchronous messages.

The row of a message is in a ``bytearray`` that is allocated here. While the row is pending, this
module keeps it alive, together with the array that is sent or filled, whatever happens to the Work:
an interrupt may come before another object keeps them.
"""

from __future__ import annotations

from gpucoll.arrays.numpy_struct import ARRAY_DATA
from gpucoll.entries.collectives import (
    TABLE_CONTEXT,
    TABLE_NONE,
    TABLE_SENDS,
    TABLE_WAITS,
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
from gpucoll.entries.pending import M_THREAD, want_thread
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import call_post, get, load64, load64_acquire, put
from gpucoll.transport.shared.flags import now_ns
from gpucoll.transport.shared.layout import MOST_DESCRIPTION_BYTES
from gpucoll.transport.shared.words import (
    THREAD_MIN_BYTES,
    TRANSFER_WORDS,
    Call,
    Context,
    Kind,
    Mode,
    Progress,
    State,
    Status,
    Transfer,
    TransferTable,
)

_STATE = int(Context.STATE)
_TIMEOUT_NS, _TRANSFER_TABLE = int(Context.TIMEOUT_NS), int(Context.TRANSFERS)
_IDLE, _POST = int(State.IDLE), int(TransferTable.POST)
_OK, _SIGNAL, _MISFIT = int(Status.OK), int(Status.SIGNAL), int(Status.MISFIT)
_NOT_RUN, _EVENT = int(Status.NOT_RUN), int(Status.EVENT)
_ROWS, _N_ROWS = int(Call.TRANSFERS), int(Call.N_TRANSFERS)
_IS_STARTED, _LEAVES = int(Call.IS_STARTED), int(Call.LEAVES)
_KIND, _PEER, _TAG = int(Transfer.KIND), int(Transfer.PEER), int(Transfer.TAG)
_ADDRESS, _SIZE_BYTES = int(Transfer.ADDRESS), int(Transfer.SIZE_BYTES)
_DTYPE, _ROW_STATE = int(Transfer.DTYPE), int(Transfer.STATE)
_FOUND_PEER, _FOUND_TAG = int(Transfer.FOUND_PEER), int(Transfer.FOUND_TAG)
_FOUND_BYTES, _FOUND_DTYPE = int(Transfer.FOUND_BYTES), int(Transfer.FOUND_DTYPE)
_ROW_TIMEOUT_NS, _ROW_DEADLINE_NS = int(Transfer.TIMEOUT_NS), int(Transfer.DEADLINE_NS)
_MODE, _WITHDRAWS = int(Transfer.MODE), int(Mode.WITHDRAWS)
_KEPT, _DONE = int(Transfer.KEPT), int(Progress.DONE)
_LARGE_BYTES = int(THREAD_MIN_BYTES)
_TAKE, _RECV, _PROBE = int(Kind.TAKE), int(Kind.RECV), int(Kind.PROBE)
_SEND = int(Kind.SEND)
_DESCRIPTION = int(Transfer.DESCRIPTION)

_i64 = types.int64
_bytes_address = types.ExternalFunction("PyByteArray_AsString", _i64(_i64))


@inline
def _new_row(memory):
    """Return the address of an empty row in new memory."""
    row = _bytes_address(memory)
    for place in range(TRANSFER_WORDS):
        put(row, place, 0)
    return row


@inline
def _keep(row, memory, array):
    """Keep a row's memory and its array alive until `_let_go`."""
    new_reference(memory)
    put(row, _KEPT, new_reference(array))


@inline
def _let_go(row, memory):
    array = get(row, _KEPT)
    if array != 0:
        put(row, _KEPT, 0)
        release(array)
        release(memory)


@inline
def _post(context, row):
    """Start a message; return whether this succeeded."""
    transfers = get(context, _TRANSFER_TABLE)
    return call_post(get(transfers, _POST), transfers, row, 1) != 0


@inline
def _set_deadline(context, row, timeout_ns):
    """Set a message's deadline. No other thread uses the context."""
    if timeout_ns == USUAL:
        timeout_ns = get(context, _TIMEOUT_NS)
    elif get(row, _KIND) != _SEND:
        put(row, _MODE, _WITHDRAWS)
    put(row, _ROW_TIMEOUT_NS, timeout_ns)
    put(row, _ROW_DEADLINE_NS, now_ns(context) + timeout_ns)


@inline
def row_state(row):
    """Return a row's progress. If the row is complete, the data that it found is visible, too."""
    return load64_acquire(row + 8 * _ROW_STATE)


@compiled
def start_entry(self, arguments, n_arguments):
    """Built-in of ``(x, peer, tag)``: starts a message.

    Returns the memory of its row; x if the message was sent already; None if Python must check.
    """
    table = capsule_pointer(self, 0)
    context = get(table, TABLE_CONTEXT)
    if n_arguments == 3 and is_idle(context):
        memory = new_bytes(0, 8 * TRANSFER_WORDS)
        if memory == 0:
            return 0
        row, x = _new_row(memory), get(arguments, 0)
        peer, tag = get(arguments, 1), get(arguments, 2)
        call = prepare_message(table, row, x, peer, tag, get(table, TABLE_SENDS) != 0)
        transfers, is_large = get(context, _TRANSFER_TABLE), get(row, _SIZE_BYTES) > _LARGE_BYTES
        if call != 0 and not (is_large and get(transfers, M_THREAD) == 0):
            _keep(row, memory, x)
            _set_deadline(context, row, USUAL)
            if _post(context, row):
                state = row_state(row)
                if is_large and state < _DONE:
                    want_thread(transfers)
                if state != _DONE or get(table, TABLE_SENDS) == 0:
                    return memory
                _let_go(row, memory)
                release(memory)
                return new_reference(x)
            _let_go(row, memory)
        release(memory)
    return new_reference(get(table, TABLE_NONE))


@inline
def _wait(table, row, leaves):
    """Wait until a row is complete; return a status.

    With `leaves`, a signal ends only the wait; otherwise the communicator is given up.
    """
    state, context, call = row_state(row), get(table, TABLE_CONTEXT), get(table, TABLE_WAITS)
    if state >= _DONE:
        return _OK if state == _DONE else _MISFIT
    if get(context, _STATE) != _IDLE:
        return _NOT_RUN  # another thread waits in a call; or the communicator is broken
    put(call, _ROWS, row)
    put(call, _N_ROWS, 1)
    put(call, _IS_STARTED, 1)
    put(call, _LEAVES, leaves)
    if leaves == 0:
        return run_message(context, call, get(row, _SIZE_BYTES))
    return run(context, call, get(row, _SIZE_BYTES))


@inline
def _run_row(table, row, memory, array, timeout_ns):
    """Start a row and wait for it, as a blocking call; return a status.

    Whatever the status, nothing uses the row afterwards: the row is complete, or the table is dead.
    """
    context, status = get(table, TABLE_CONTEXT), _EVENT
    _keep(row, memory, array)
    _set_deadline(context, row, timeout_ns)
    if _post(context, row):
        status = _wait(table, row, 0)
    _let_go(row, memory)
    return status


@compiled
def wait_entry(self, arguments, n_arguments):
    """Built-in of ``(memory of a row,)``: waits until the message is complete.

    Returns a `Status`. After OK and MISFIT it is complete; after NOT_RUN Python must wait.
    """
    table, memory = capsule_pointer(self, 0), get(arguments, 0)
    row = _bytes_address(memory)
    status = _wait(table, row, 1)
    if status == _OK:
        _let_go(row, memory)
    return 0 if status == _SIGNAL else new_integer(status)


@compiled
def let_go_entry(self, arguments, n_arguments):
    """Built-in of ``(memory of a row,)``, which is complete, or which nothing will use any more."""
    memory = get(arguments, 0)
    _let_go(_bytes_address(memory), memory)
    return new_reference(get(capsule_pointer(self, 0), TABLE_NONE))


@inline
def _row_or_none(table, memory, status):
    """Return the memory of a complete row; None if it is not complete; 0 if a signal ended it."""
    if status == _OK or status == _MISFIT:
        return memory
    release(memory)
    return 0 if status == _SIGNAL else new_reference(get(table, TABLE_NONE))


@inline
def _find(self, arguments, n_arguments, kind, room_bytes):
    """Wait for a message with this source and tag; return the memory of a row, None, or 0."""
    table = capsule_pointer(self, 0)
    context, none = get(table, TABLE_CONTEXT), get(table, TABLE_NONE)
    if n_arguments != 3 or not is_idle(context):
        return new_reference(none)
    timeout_ns = timeout_of(table, arguments, n_arguments, 2)
    peer, tag = peer_and_tag(table, get(arguments, 0), get(arguments, 1), -1)
    if peer == NO_PEER or timeout_ns == UNKNOWN:
        return new_reference(none)
    memory = new_bytes(0, 8 * TRANSFER_WORDS + room_bytes)
    if memory == 0:
        return 0
    row = _new_row(memory)
    put(row, _KIND, kind)
    put(row, _PEER, peer)
    put(row, _TAG, tag)
    put(row, _DESCRIPTION, row + 8 * TRANSFER_WORDS if room_bytes else 0)
    return _row_or_none(table, memory, _run_row(table, row, memory, none, timeout_ns))


@compiled
def receive_entry(self, arguments, n_arguments):
    """Built-in of ``(x, source, tag, timeout_s)``: receives into x. Returns like `take_entry`.

    For a blocking receive whose caller needs more than x.
    """
    table, x = capsule_pointer(self, 0), get(arguments, 0)
    context, none = get(table, TABLE_CONTEXT), get(table, TABLE_NONE)
    if n_arguments != 4 or not is_idle(context):
        return new_reference(none)
    timeout_ns = timeout_of(table, arguments, n_arguments, 3)
    if timeout_ns == UNKNOWN:
        return new_reference(none)
    memory = new_bytes(0, 8 * TRANSFER_WORDS)
    if memory == 0:
        return 0
    row = _new_row(memory)
    if prepare_message(table, row, x, get(arguments, 1), get(arguments, 2), 0) == 0:
        release(memory)
        return new_reference(none)
    return _row_or_none(table, memory, _run_row(table, row, memory, x, timeout_ns))


@compiled
def take_entry(self, arguments, n_arguments):
    """Built-in of ``(source, tag, timeout_s)``: takes a message of any kind.

    Returns the memory of its row, which is complete; None if nothing was started, or if the
    communicator is broken.
    """
    return _find(self, arguments, n_arguments, _TAKE, 0)


@compiled
def probe_entry(self, arguments, n_arguments):
    """Built-in of ``(source, tag, timeout_s)``: finds a message without receiving it.

    Returns like `take_entry`.
    """
    return _find(self, arguments, n_arguments, _PROBE, MOST_DESCRIPTION_BYTES)


@compiled
def fetch_entry(self, arguments, n_arguments):
    """Built-in of ``(memory of a row, array)``: receives a taken message into a new array.

    Returns the array; None if Python must wait for the row, which keeps both alive. It starts
    whatever other threads do, because the message has left the mailbox and no other call can get
    it.
    """
    table, memory, array = capsule_pointer(self, 0), get(arguments, 0), get(arguments, 1)
    context, none = get(table, TABLE_CONTEXT), get(table, TABLE_NONE)
    row = _bytes_address(memory)
    put(row, _KIND, _RECV)
    put(row, _PEER, get(row, _FOUND_PEER))
    put(row, _TAG, get(row, _FOUND_TAG))
    put(row, _ADDRESS, load64(array + ARRAY_DATA))
    put(row, _SIZE_BYTES, get(row, _FOUND_BYTES))
    put(row, _DTYPE, get(row, _FOUND_DTYPE))
    put(row, _MODE, 0)
    put(row, _ROW_TIMEOUT_NS, 0)  # the call's deadline was for the message to come
    put(row, _ROW_DEADLINE_NS, 0)
    put(row, _ROW_STATE, 0)
    _keep(row, memory, array)
    if not _post(context, row) or row_state(row) != _DONE:
        return new_reference(none)
    _let_go(row, memory)
    return new_reference(array)
