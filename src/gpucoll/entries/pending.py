"""The queue of started calls. A waiting thread, or the process's thread, runs them in order.

A call that fits is posted when it is started, without waiting (`Call.post`), and the thread that
waits for it finishes it: other ranks do not wait for a rank that computes meanwhile. The process's
thread, which never takes the interpreter, is told about all other calls. If it has not begun one, a
thread that waits for the call runs it itself.

The thread that runs calls has changed the context's state from IDLE to BUSY. Threads without the
interpreter do so by a compare-exchange. Compiled entries, which hold it, first look at
`Context.pending`, which is not zero while a call is queued. Numbers are assigned with the
interpreter held.
"""

from __future__ import annotations

import numpy as np

from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import (
    call_loop,
    call_step,
    compare_exchange64,
    exchange64,
    load64_acquire,
    load64_ordered,
    store64_release,
)
from gpucoll.transport.shared.flags import FUTEX_WAIT, SYS_FUTEX, begin_to_sleep, end_sleep, ring
from gpucoll.transport.shared.layout import AHEAD
from gpucoll.transport.shared.libc import syscall
from gpucoll.transport.shared.words import (
    PENDING_CALLS,
    STARTED_WORDS,
    Call,
    Context,
    Pending,
    Started,
    State,
    Status,
    Thread,
    TransferTable,
)

LONGEST_SLICE_NS, SHORTEST_SLICE_NS = 20_000_000, 100_000
NOTHING, RAN, IS_BUSY = 0, 1, 2
_NOT_WANTED, _NEW, _SEEN = 0, 1, 2
"""States of a table of messages. A new message is left alone, as most callers wait at once."""
_LOOKS_AFTER = 100
"""Number of looks at a table after its last message, because waking the thread costs each time."""
_SHORTEST_SLEEP_NS, _LONGEST_SLEEP_NS = 1_000_000, 5_000_000


# --- running queued calls, by the thread that has made the context BUSY ---------------------------


@inline
def entry_of(queue: Pending, number: int) -> Started:
    """Return a call's entry."""
    place = Pending.entries + (number & (PENDING_CALLS - 1)) * STARTED_WORDS
    return Started(queue.address + 8 * place)


@inline
def _writes_over(queue: Pending, call: Call, done: int, posted: int) -> bool:
    """Return whether an earlier call that has not ended writes where this one reads."""
    for number in range(done + 1, posted + 1):
        other = entry_of(queue, number).call
        if other.writes < call.reads_end and call.reads < other.writes_end:
            return True
    return False


@inline
def post_ahead(queue: Pending, context: Context, number: int, call: Call) -> bool:
    """Post a call before earlier ones have ended, without waiting; return whether it was posted."""
    posted, done = queue.posted, load64_acquire(queue.at.done)
    post = call.post
    if posted != number - 1 or posted - done >= AHEAD or post == 0:
        return False
    if _writes_over(queue, call, done, posted) or call_loop(post, context, call) != Status.OK:
        return False
    entry_of(queue, number).sequence = context.sequence
    queue.posted = number
    return True


@inline
def _set_deadline(context: Context, timeout_ns: int) -> None:
    context.timeout_ns = timeout_ns
    context.slice_ns = max(min(LONGEST_SLICE_NS, timeout_ns), SHORTEST_SLICE_NS)


@inline
def _run_one(queue: Pending, context: Context, number: int) -> int:
    """Run a call, or finish it if it was posted; return its status."""
    entry = entry_of(queue, number)
    call = entry.call
    _set_deadline(context, entry.timeout_ns)
    if number > queue.posted:
        queue.posted = number
        return call_loop(call.loop, context, call)
    last = context.sequence
    context.sequence = entry.sequence
    context.start_ns = 0
    status = call_loop(call.finish, context, call)
    context.sequence = last
    return status


@inline
def run_pending(queue: Pending, context: Context, until: int) -> int:
    """Run calls in order up to a number, or to the first that fails; return the last status.

    The caller reports a failure by `end_running`, after it has restored everything.
    """
    status: int = Status.OK
    done = load64_acquire(queue.at.done)
    while status == Status.OK and done < until:
        posted, tail = queue.posted, load64_acquire(queue.at.tail)
        while posted < tail and post_ahead(
            queue, context, posted + 1, entry_of(queue, posted + 1).call
        ):
            posted += 1
        done += 1
        status = _run_one(queue, context, done)
        entry_of(queue, done).status = status
        if status == Status.OK:
            exchange64(queue.at.done, done)
            ring(queue.at.bell)
    if status != Status.DEADLINE:  # the error needs the deadline that passed
        _set_deadline(context, queue.timeout_ns)
    return status


@inline
def begin_running(queue: Pending, context: Context) -> int:
    """Become the thread that runs calls; return the previous state: IDLE means success."""
    state = compare_exchange64(context.at.state, State.IDLE, State.BUSY)
    if state == State.IDLE:
        queue.is_running = 1
    return state


@inline
def _become_idle(queue: Pending, context: Context) -> None:
    """Let other threads run calls. `is_running` is cleared first: from then on it is theirs."""
    store64_release(queue.at.is_running, 0)
    exchange64(context.at.state, State.IDLE)


@inline
def end_running(queue: Pending, context: Context, status: int) -> None:
    """Let other threads run calls, and wake those that wait for this."""
    done = load64_acquire(queue.at.done)
    if status == Status.NO_ROOM:  # the call has not begun: its waiter makes room, or gives up
        queue.posted = done
        exchange64(queue.at.wanted, done)
        _become_idle(queue, context)
    elif status != Status.OK:
        queue.posted = done + 1  # the ranks agree on new numbers, so the rest is reposted
        exchange64(context.at.state, State.NEEDS_PYTHON)
        exchange64(queue.at.done, done + 1)
        store64_release(queue.at.is_running, 0)  # Python waits for this, and then begins
    else:
        _become_idle(queue, context)
    ring(queue.at.bell)
    if status == Status.OK and done < load64_acquire(queue.at.wanted):
        ring(queue.thread.at.bell)


@inline
def sleep_on(bell: int, seen: int, timeout: int) -> None:
    """Sleep until the bell is rung, at most for the timespec at `timeout`; 0 means no limit."""
    syscall(SYS_FUTEX, bell, FUTEX_WAIT, np.int64(seen), timeout, 0, 0)


# --- the thread -----------------------------------------------------------------------------------


@inline
def _has_work(queue: Pending) -> int:
    """Return the thread's work in a queue: NOTHING, RAN (it may run calls) or IS_BUSY."""
    if load64_acquire(queue.at.done) >= load64_acquire(queue.at.wanted):
        return NOTHING
    state = load64_acquire(queue.context.at.state)
    if state == State.IDLE:
        return RAN
    return IS_BUSY if state == State.BUSY else NOTHING


@inline
def _serve(queue: Pending) -> None:
    """Run all calls of a queue, in the thread."""
    context = queue.context
    if _has_work(queue) != RAN or begin_running(queue, context) != State.IDLE:
        return
    context.wait_long = queue.wait_long_alone
    status: int = Status.OK
    while status == Status.OK and load64_acquire(queue.at.done) < load64_acquire(queue.at.wanted):
        status = run_pending(queue, context, load64_acquire(queue.at.tail))
    context.wait_long = queue.wait_long
    end_running(queue, context, status)


@inline
def want_thread(table: TransferTable) -> None:
    """Have the thread progress the pending messages of a table that it knows."""
    thread = table.thread
    if thread and exchange64(table.at.is_wanted, _NEW) == _NOT_WANTED:
        ring(thread.at.bell)


@inline
def _is_wanted(table: TransferTable) -> bool:
    """Return whether messages of a table are pending and the thread was asked for them."""
    is_over = table.is_dead != 0
    if is_over or load64_acquire(table.at.is_wanted) == _NOT_WANTED:
        return False
    looks_left = table.looks_left - 1
    if load64_acquire(table.at.pending) != 0:
        looks_left = _LOOKS_AFTER
    table.looks_left = looks_left
    if looks_left > 0:
        return True
    exchange64(table.at.is_wanted, _NOT_WANTED)
    if load64_ordered(table.at.pending) == 0:
        return False
    exchange64(table.at.is_wanted, _NEW)  # a message has just started
    return True


@inline
def _step_messages(table: TransferTable, serves: int) -> int:
    """Progress a table's messages, unless another thread does; return like `_has_work`."""
    if not _is_wanted(table):
        return NOTHING
    if not serves or load64_acquire(table.at.waiters) != 0:
        return IS_BUSY
    if exchange64(table.at.is_wanted, _SEEN) == _NEW:
        return IS_BUSY
    moves = load64_acquire(table.at.moves)
    call_step(table.step, table)
    return IS_BUSY if load64_acquire(table.at.moves) == moves else RAN


@inline
def _look_at(item: int, serves: int) -> int:
    """Serve a queue or a table of messages, or look for its work."""
    if item & 1:
        return _step_messages(TransferTable(item - 1), serves)
    found = _has_work(Pending(item))
    if serves and found == RAN:
        _serve(Pending(item))
    return found


@inline
def _look_at_all(thread: Thread, serves: int) -> int:
    """Serve every queue and table, or only look; return the work of the one with the most."""
    most = NOTHING
    for place in range(load64_acquire(thread.at.count)):
        address = thread.at.queues + 8 * place
        item = load64_acquire(address)
        if item == 0:
            continue
        exchange64(thread.at.current, item)
        if load64_ordered(address) == item:  # otherwise it is being removed
            found = _look_at(item, serves)
            if found == RAN or most == NOTHING:
                most = found
        exchange64(thread.at.current, 0)
    return most


@compiled
def serve_started(thread: Thread) -> int:
    """Run started calls until told to stop: the function for `pthread_create`. No interpreter."""
    bell, timeout = thread.at.bell, thread.at.futex_timeout
    while load64_acquire(thread.at.stop) == 0:
        if _look_at_all(thread, True) == RAN:
            thread.futex_timeout[1] = _SHORTEST_SLEEP_NS
            continue
        seen = begin_to_sleep(bell)
        found = _look_at_all(thread, False)
        if found != RAN and load64_ordered(thread.at.stop) == 0:
            sleep_on(bell, seen, timeout if found == IS_BUSY else 0)
            longer_ns = 2 * thread.futex_timeout[1] if found == IS_BUSY else _SHORTEST_SLEEP_NS
            thread.futex_timeout[1] = min(longer_ns, _LONGEST_SLEEP_NS)
        end_sleep(bell)
    exchange64(thread.at.is_running, 0)
    return 0


@compiled
def ask_thread(table: TransferTable) -> None:
    """Have the thread progress the pending messages of a table. For Python."""
    want_thread(table)


@compiled
def wake_thread(thread: Thread) -> None:
    """Wake the thread, if it sleeps. For Python."""
    ring(thread.at.bell)
