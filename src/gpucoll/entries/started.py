"""Built-ins that start calls, wait for them, query them, and note their end: `entries.pending`."""

from __future__ import annotations

from gpucoll.arrays.numpy_struct import ARRAY_DESCRIPTION
from gpucoll.blocks import Words
from gpucoll.entries.collective_entry import fill
from gpucoll.entries.collectives import (
    EntryTable,
    as_integer,
    capsule_pointer,
    find_call,
    is_usable,
    new_integer,
    new_reference,
    restore_error,
    restore_thread,
)
from gpucoll.entries.pending import (
    LONGEST_SLICE_NS,
    begin_running,
    end_running,
    entry_of,
    post_ahead,
    run_pending,
    sleep_on,
)
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import (
    exchange64,
    load32_acquire,
    load64,
    load64_acquire,
    load64_ordered,
    pause,
)
from gpucoll.transport.shared.flags import (
    HELD,
    NANOSECONDS,
    begin_to_sleep,
    behind,
    check_signals,
    end_sleep,
    event_pending,
    release_interpreter,
    ring,
    save_thread,
)
from gpucoll.transport.shared.layout import HEADER_WORD
from gpucoll.transport.shared.steps import HEADER_SOURCE, NOT_SHARED, slot_of
from gpucoll.transport.shared.words import (
    PENDING_CALLS,
    Call,
    Context,
    Pending,
    Started,
    State,
    Status,
)

# --- starting -------------------------------------------------------------------------------------


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
    call, timeout_ns = Call(as_integer(arguments[0])), as_integer(arguments[1])
    if n_arguments != 2 or number == 0 or not _start(queue, number, call, timeout_ns):
        return new_integer(0)
    return new_integer(number)


# --- waiting --------------------------------------------------------------------------------------


_WAIT_SPINS = 200
"""Number of looks whether the thread is done, before a waiter sleeps: about 10 us."""
_LONG_BYTES = 8 << 10


@inline
def _reap(queue: Pending, context: Context, number: int) -> bool:
    """Free the entry of a call that has ended; False if it is not the next, or is free already."""
    if queue.reaped != number - 1:
        return False
    queue.reaped = number
    context.pending -= 1
    return True


@inline
def _stop_here(queue: Pending, context: Context, status: int) -> None:
    """Stop running calls in this thread, which takes the interpreter if calls released it."""
    thread = context.interpreter
    context.interpreter = 0
    if thread != HELD:
        restore_thread(thread)
    end_running(queue, context, status)
    if status == Status.SIGNAL:
        restore_error(context.raised[0], context.raised[1], context.raised[2])


@inline
def _run_here(queue: Pending, context: Context, until: int) -> int:
    """Run calls in this thread, which has the interpreter; return the last status."""
    context.interpreter = HELD
    call = entry_of(queue, until).call
    if max(call.size_bytes, call.largest_bytes) > _LONG_BYTES:
        release_interpreter(context)
    status = run_pending(queue, context, until)
    _stop_here(queue, context, status)
    return status


@inline
def _sleep_until(queue: Pending, context: Context, number: int, timeout: int) -> None:
    """Sleep once, without the interpreter, until a call has ended or no thread runs calls."""
    bell = queue.at.bell
    for _ in range(_WAIT_SPINS):
        if load64_acquire(queue.at.done) >= number:
            return
        pause()
    thread = save_thread()
    seen = begin_to_sleep(bell)
    is_running = load64_ordered(context.at.state) == State.BUSY
    if load64_ordered(queue.at.done) < number and is_running:
        sleep_on(bell, seen, timeout)
    end_sleep(bell)
    restore_thread(thread)


@inline
def _set_timeout(entry: Started, timeout_ns: int) -> int:
    """Fill in the timespec for a thread that waits for a call; return its address."""
    entry.futex_timeout[0] = timeout_ns // NANOSECONDS
    entry.futex_timeout[1] = timeout_ns % NANOSECONDS
    return entry.at.futex_timeout


@compiled
def wait_started(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of (number); `self` is a capsule of the queue: run calls until that one has ended.

    Returns 0 if the call succeeded and this has reaped it; otherwise Python must check.
    """
    queue = Pending(capsule_pointer(self, 0))
    context, number = queue.context, as_integer(arguments[0])
    while load64_acquire(queue.at.done) < number:
        state = begin_running(queue, context)
        if state == State.IDLE:
            status = _run_here(queue, context, number)
            if status == Status.SIGNAL:
                return 0
            if status == Status.NO_ROOM:
                return new_integer(1)
        elif state == State.NEEDS_PYTHON:
            return new_integer(1)
        else:
            timeout = _set_timeout(entry_of(queue, number), LONGEST_SLICE_NS)
            _sleep_until(queue, context, number, timeout)
            if check_signals() != 0:
                return 0
    ended_well = entry_of(queue, number).status == Status.OK
    return new_integer(0 if ended_well and _reap(queue, context, number) else 1)


@inline
def _has_arrived(context: Context, sequence: int) -> bool:
    """Return whether all ranks have posted a call with arrays that are not shared."""
    for rank in range(context.world_size):
        slot = slot_of(context, sequence, rank)
        if behind(load32_acquire(slot + HEADER_WORD), sequence):
            return False
        if load64(slot + HEADER_SOURCE) != NOT_SHARED:
            return False
    return True


@inline
def _finish_arrived(queue: Pending, context: Context, number: int) -> int:
    """Finish calls up to this one that need no waiting for other ranks; return a status."""
    status: int = Status.OK
    done = load64_acquire(queue.at.done)
    while status == Status.OK and done < number:
        is_alone = context.world_size == 1
        if not is_alone and (
            done + 1 > queue.posted or not _has_arrived(context, entry_of(queue, done + 1).sequence)
        ):
            return status
        done += 1
        status = run_pending(queue, context, done)
    return status


@compiled
def poll_started(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of (number, whether the thread should run it); return whether that call has ended.

    Never waits for other ranks. Unless the thread is told of the calls, they are only finished if
    all ranks have arrived.
    """
    queue = Pending(capsule_pointer(self, 0))
    context, number = queue.context, as_integer(arguments[0])
    if load64_acquire(queue.at.done) < number and begin_running(queue, context) == State.IDLE:
        context.interpreter = HELD
        status = _finish_arrived(queue, context, number)
        _stop_here(queue, context, status)
        if status == Status.SIGNAL:
            return 0
    if load64_acquire(queue.at.done) >= number:
        return new_integer(1)
    if as_integer(arguments[1]) != 0 and queue.wanted < number:
        exchange64(queue.at.wanted, number)
        ring(queue.thread.at.bell)
    return new_integer(0)


@compiled
def sleep_started(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of (number, ns): sleep until that call has ended, at most for the given time.

    Runs nothing. Returns whether it has ended.
    """
    queue = Pending(capsule_pointer(self, 0))
    context, number = queue.context, as_integer(arguments[0])
    bell = queue.at.bell
    timeout = _set_timeout(entry_of(queue, number), as_integer(arguments[1]))
    thread = save_thread()
    seen = begin_to_sleep(bell)
    state = load64_ordered(context.at.state)
    if load64_ordered(queue.at.done) < number and state != State.NEEDS_PYTHON:
        sleep_on(bell, seen, timeout)
    end_sleep(bell)
    restore_thread(thread)
    return new_integer(load64_acquire(queue.at.done) >= number)


@compiled
def reap_started(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of (number), for a call that has ended: free its entry for reuse.

    Returns whether the caller must note how the call ended.
    """
    queue = Pending(capsule_pointer(self, 0))
    number = as_integer(arguments[0])
    return new_integer(_reap(queue, queue.context, number))


@compiled
def skip_started(self: int, arguments: Words, n_arguments: int) -> int:
    """Built-in of (number), for the next call, which has not begun: skip it.

    Returns whether this succeeded: it fails while another thread runs calls.
    """
    queue = Pending(capsule_pointer(self, 0))
    context, number = queue.context, as_integer(arguments[0])
    if begin_running(queue, context) != State.IDLE:
        return new_integer(0)
    if load64_acquire(queue.at.done) == number - 1:
        entry_of(queue, number).status = Status.NO_ROOM
        queue.posted = number
        exchange64(queue.at.done, number)
    end_running(queue, context, Status.OK)
    return new_integer(1)


@compiled
def hold_started(context: Context, n_reasons: int) -> int:
    """Make compiled entries leave all calls to Python while there are reasons. For Python."""
    context.pending += n_reasons - context.holds
    context.holds = n_reasons
    return 0
