"""Built-ins that start a call: they queue it in `entries.pending`, posted ahead if possible."""

from __future__ import annotations

from gpucoll.arrays.numpy_struct import ARRAY_DESCRIPTION
from gpucoll.blocks import Words
from gpucoll.entries.collective_entry import fill
from gpucoll.entries.collectives import (
    capsule_pointer,
    find_call,
    is_usable,
    new_integer,
    new_reference,
)
from gpucoll.entries.pending import begin_running, end_running, entry_of, post_ahead
from gpucoll.entries.words import EntryTable
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import exchange64, load64
from gpucoll.transport.shared.flags import event_pending, ring
from gpucoll.transport.shared.words import PENDING_CALLS, Call, Pending, State, Status

_i64 = types.int64
_as_integer = types.ExternalFunction("PyLong_AsLongLong", _i64(_i64))


@inline
def _start(queue: Pending, number: int, call: Call, timeout_ns: int) -> int:
    """Queue a call, posting it if possible; return whether it was queued."""
    context, thread = queue.context, queue.thread
    entry = entry_of(queue, number)
    entry.call = call
    entry.timeout_ns = timeout_ns
    entry.status = Status.NOT_RUN
    has_begun = begin_running(queue, context) == State.IDLE
    is_posted = has_begun and post_ahead(queue, context, number, call)
    needs_thread = not is_posted and context.world_size > 1
    is_queued = not needs_thread or thread.is_running != 0
    if is_queued:
        context.pending += 1
        exchange64(queue.at.tail, number)
    if has_begun:
        end_running(queue, context, Status.OK)
    if is_queued and needs_thread:
        exchange64(queue.at.wanted, number)
        ring(thread.at.bell)
    return is_queued


@inline
def _next_number(queue: Pending) -> int:
    """Return the number for a call that is started now, or 0 if there is no room."""
    number = queue.tail + 1
    return number if number - queue.reaped <= PENDING_CALLS else 0


@inline
def _note_extents(call: Call) -> None:
    """Note the extents of a call's input and output in memory."""
    source, destination = call.source, call.destination
    call.reads = source
    call.reads_end = source + call.size_bytes
    call.writes = destination
    size_bytes = call.block_bytes * call.destination_parts
    call.writes_end = destination + size_bytes


@compiled
def start_entry(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of ``(x, out, op, root)``; `self` is a capsule of the collective's table.

    Starts the call and returns its number, or None if Python must check.
    """
    table = EntryTable(capsule_pointer(self, 0))
    queue = table.queue
    if n_arguments == 4 and queue:
        context, number = queue.context, _next_number(queue)
        is_open = context.state != State.NEEDS_PYTHON and context.holds == 0
        if number != 0 and is_open and not event_pending(context):
            x, out = arguments[0], arguments[1]
            found = Call(0)
            if is_usable(table, x, out):
                operation, root = arguments[2], arguments[3]
                found = find_call(table, load64(x + ARRAY_DESCRIPTION), operation, root)
            if found:
                call = entry_of(queue, number).own_call
                for place in range(Call.n_words):
                    Words(call.address)[place] = Words(found.address)[place]
                if fill(call, x, out):
                    _note_extents(call)
                    if _start(queue, number, call, queue.timeout_ns):
                        return new_integer(number)
    return new_reference(table.none)


@compiled
def start_block(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of (address of a call block, timeout in ns); `self` is a capsule of the queue.

    Returns the call's number, or 0 if there is no room, or no thread that would run it.
    """
    queue = Pending(capsule_pointer(self, 0))
    number = _next_number(queue)
    call, timeout_ns = Call(_as_integer(arguments[0])), _as_integer(arguments[1])
    if n_arguments != 2 or number == 0 or not _start(queue, number, call, timeout_ns):
        return new_integer(0)
    return new_integer(number)
