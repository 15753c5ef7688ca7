"""Built-ins that start a call: they queue it in `entries.pending`, posted ahead if possible."""

from __future__ import annotations

from gpucoll.arrays.numpy_struct import ARRAY_DESCRIPTION
from gpucoll.entries.collective_entry import fill
from gpucoll.entries.collectives import (
    TABLE_NONE,
    TABLE_QUEUE,
    capsule_pointer,
    find_call,
    is_usable,
    new_integer,
    new_reference,
)
from gpucoll.entries.pending import (
    E_CALL,
    E_STATUS,
    E_TIMEOUT_NS,
    E_WORDS,
    IDLE,
    NEEDS_PYTHON,
    Q_CONTEXT,
    Q_REAPED,
    Q_TAIL,
    Q_THREAD,
    Q_TIMEOUT_NS,
    Q_WANTED,
    STATE,
    T_BELL,
    T_IS_RUNNING,
    begin_running,
    end_running,
    entry_of,
    post_ahead,
)
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import (
    exchange64,
    get,
    load64,
    put,
)
from gpucoll.transport.shared.flags import event_pending, ring
from gpucoll.transport.shared.steps import (
    DESTINATION,
    NOT_RUN,
    OK,
    SIZE_BYTES,
    SOURCE,
    WORLD_SIZE,
)
from gpucoll.transport.shared.words import (
    CALL_WORDS,
    PENDING_CALLS,
    Call,
    Context,
)

_PENDING = int(Context.PENDING)
_HOLDS = int(Context.HOLDS)
_READS, _READS_END = int(Call.READS), int(Call.READS_END)
_WRITES, _WRITES_END = int(Call.WRITES), int(Call.WRITES_END)
_BLOCK_BYTES, _DESTINATION_PARTS = int(Call.BLOCK_BYTES), int(Call.DESTINATION_PARTS)
_i64 = types.int64
_as_integer = types.ExternalFunction("PyLong_AsLongLong", _i64(_i64))


@inline
def _start(queue, number, call, timeout_ns):
    """Queue a call, posting it if possible; return whether it was queued."""
    context, thread = get(queue, Q_CONTEXT), get(queue, Q_THREAD)
    entry = entry_of(queue, number)
    put(entry, E_CALL, call)
    put(entry, E_TIMEOUT_NS, timeout_ns)
    put(entry, E_STATUS, NOT_RUN)
    has_begun = begin_running(queue, context) == IDLE
    is_posted = has_begun and post_ahead(queue, context, number, call)
    needs_thread = not is_posted and get(context, WORLD_SIZE) > 1
    is_queued = not needs_thread or get(thread, T_IS_RUNNING) != 0
    if is_queued:
        put(context, _PENDING, get(context, _PENDING) + 1)
        exchange64(queue + 8 * Q_TAIL, number)
    if has_begun:
        end_running(queue, context, OK)
    if is_queued and needs_thread:
        exchange64(queue + 8 * Q_WANTED, number)
        ring(thread + 8 * T_BELL)
    return is_queued


@inline
def _next_number(queue):
    """Return the number for a call that is started now, or 0 if there is no room."""
    number = get(queue, Q_TAIL) + 1
    return number if number - get(queue, Q_REAPED) <= PENDING_CALLS else 0


@inline
def _note_extents(call):
    """Note the extents of a call's input and output in memory."""
    source, destination = get(call, SOURCE), get(call, DESTINATION)
    put(call, _READS, source)
    put(call, _READS_END, source + get(call, SIZE_BYTES))
    put(call, _WRITES, destination)
    size_bytes = get(call, _BLOCK_BYTES) * get(call, _DESTINATION_PARTS)
    put(call, _WRITES_END, destination + size_bytes)


@compiled
def start_entry(self, arguments, n_arguments):
    """Built-in of ``(x, out, op, root)``; `self` is a capsule of the collective's table.

    Starts the call and returns its number, or None if Python must check.
    """
    table = capsule_pointer(self, 0)
    queue = get(table, TABLE_QUEUE)
    if n_arguments == 4 and queue != 0:
        context, number = get(queue, Q_CONTEXT), _next_number(queue)
        is_open = get(context, STATE) != NEEDS_PYTHON and get(context, _HOLDS) == 0
        if number != 0 and is_open and not event_pending(context):
            x, out = get(arguments, 0), get(arguments, 1)
            found = 0
            if is_usable(table, x, out):
                operation, root = get(arguments, 2), get(arguments, 3)
                found = find_call(table, load64(x + ARRAY_DESCRIPTION), operation, root)
            if found != 0:
                call = entry_of(queue, number) + 8 * E_WORDS
                for place in range(CALL_WORDS):
                    put(call, place, get(found, place))
                if fill(call, x, out) != 0:
                    _note_extents(call)
                    if _start(queue, number, call, get(queue, Q_TIMEOUT_NS)):
                        return new_integer(number)
    return new_reference(get(table, TABLE_NONE))


@compiled
def start_block(self, arguments, n_arguments):
    """Built-in of (address of a call block, timeout in ns); `self` is a capsule of the queue.

    Returns the call's number, or 0 if there is no room, or no thread that would run it.
    """
    queue = capsule_pointer(self, 0)
    number = _next_number(queue)
    call, timeout_ns = _as_integer(get(arguments, 0)), _as_integer(get(arguments, 1))
    if n_arguments != 2 or number == 0 or not _start(queue, number, call, timeout_ns):
        return new_integer(0)
    return new_integer(number)
