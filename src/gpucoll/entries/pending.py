"""The queue of started calls. A waiting thread, or the process's thread, runs them in order.

A call that fits is posted when it is started, without waiting (`Call.POST`), and the thread that
waits for it finishes it: other ranks do not wait for a rank that computes meanwhile. The process's
thread, which never takes the interpreter, is told about all other calls. If it has not begun one, a
thread that waits for the call runs it itself.

The thread that runs calls has changed the context's state from IDLE to BUSY. Threads without the
interpreter do so by a compare-exchange. Compiled entries, which hold it, first look at
`Context.PENDING`, which is not zero while a call is queued. Numbers are assigned with the
interpreter held.
"""

from __future__ import annotations

import numpy as np

from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import (
    call_loop,
    call_step,
    compare_exchange64,
    exchange64,
    get,
    load64_acquire,
    load64_ordered,
    put,
    store64_release,
)
from gpucoll.transport.shared.flags import (
    FUTEX_WAIT,
    SYS_FUTEX,
    begin_to_sleep,
    end_sleep,
    ring,
)
from gpucoll.transport.shared.layout import (
    AHEAD,
)
from gpucoll.transport.shared.steps import (
    OK,
    SEQUENCE,
    START_NS,
)
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

STATE, _PENDING = int(Context.STATE), int(Context.PENDING)
_TIMEOUT_NS, _SLICE_NS = int(Context.TIMEOUT_NS), int(Context.SLICE_NS)
_WAIT_LONG = int(Context.WAIT_LONG)
IDLE, BUSY, NEEDS_PYTHON = int(State.IDLE), int(State.BUSY), int(State.NEEDS_PYTHON)
_DEADLINE, _NO_ROOM = int(Status.DEADLINE), int(Status.NO_ROOM)
_LOOP, _POST, _FINISH = int(Call.LOOP), int(Call.POST), int(Call.FINISH)
_READS, _READS_END = int(Call.READS), int(Call.READS_END)
_WRITES, _WRITES_END = int(Call.WRITES), int(Call.WRITES_END)
Q_CONTEXT, Q_THREAD = int(Pending.CONTEXT), int(Pending.THREAD)
Q_WAIT_LONG, Q_WAIT_ALONE = int(Pending.WAIT_LONG), int(Pending.WAIT_LONG_ALONE)
Q_TIMEOUT_NS, Q_TAIL, Q_REAPED = int(Pending.TIMEOUT_NS), int(Pending.TAIL), int(Pending.REAPED)
Q_WANTED, Q_DONE, Q_BELL = int(Pending.WANTED), int(Pending.DONE), int(Pending.BELL)
Q_POSTED, Q_IS_RUNNING = int(Pending.POSTED), int(Pending.IS_RUNNING)
Q_ENTRIES = int(Pending.ENTRIES)
E_CALL, E_TIMEOUT_NS, E_STATUS = int(Started.CALL), int(Started.TIMEOUT_NS), int(Started.STATUS)
E_SEQUENCE, E_FUTEX = int(Started.SEQUENCE), int(Started.FUTEX_TIMEOUT)
E_WORDS = int(Started.WORDS)
T_BELL, T_STOP, T_CURRENT = int(Thread.BELL), int(Thread.STOP), int(Thread.CURRENT)
T_IS_RUNNING, T_FUTEX = int(Thread.IS_RUNNING), int(Thread.FUTEX_TIMEOUT)
T_COUNT, T_QUEUES = int(Thread.COUNT), int(Thread.QUEUES)
_LONGEST_SLICE_NS, _SHORTEST_SLICE_NS = 20_000_000, 100_000
NOTHING, RAN, IS_BUSY = 0, 1, 2
_M_PENDING, _M_MOVES, _M_STEP = (
    int(TransferTable.PENDING),
    int(TransferTable.MOVES),
    int(TransferTable.STEP),
)
M_THREAD, _M_IS_WANTED = int(TransferTable.THREAD), int(TransferTable.IS_WANTED)
_M_WAITERS, _M_IS_DEAD = int(TransferTable.WAITERS), int(TransferTable.IS_DEAD)
_M_LOOKS_LEFT = int(TransferTable.LOOKS_LEFT)
_NOT_WANTED, _NEW, _SEEN = 0, 1, 2
"""States of a table of messages. A new message is left alone, as most callers wait at once."""
_LOOKS_AFTER = 100
"""Number of looks at a table after its last message, because waking the thread costs each time."""
_SHORTEST_SLEEP_NS, _LONGEST_SLEEP_NS = 1_000_000, 5_000_000
_i64 = types.int64
_syscall = types.ExternalFunction("syscall", _i64(_i64, _i64, _i64, _i64, _i64, _i64, _i64))


# --- running queued calls, by the thread that has made the context BUSY ---------------------------


@inline
def entry_of(queue, number):
    """Return the address of a call's entry."""
    place = Q_ENTRIES + (number & (PENDING_CALLS - 1)) * STARTED_WORDS
    return queue + 8 * place


@inline
def _writes_over(queue, call, done, posted):
    """Return whether an earlier call that has not ended writes where this one reads."""
    for number in range(done + 1, posted + 1):
        other = get(entry_of(queue, number), E_CALL)
        if get(other, _WRITES) < get(call, _READS_END) and get(call, _READS) < get(
            other, _WRITES_END
        ):
            return True
    return False


@inline
def post_ahead(queue, context, number, call):
    """Post a call before earlier ones have ended, without waiting; return whether it was posted."""
    posted, done = get(queue, Q_POSTED), load64_acquire(queue + 8 * Q_DONE)
    post = get(call, _POST)
    if posted != number - 1 or posted - done >= AHEAD or post == 0:
        return False
    if _writes_over(queue, call, done, posted) or call_loop(post, context, call) != OK:
        return False
    put(entry_of(queue, number), E_SEQUENCE, get(context, SEQUENCE))
    put(queue, Q_POSTED, number)
    return True


@inline
def _set_deadline(context, timeout_ns):
    put(context, _TIMEOUT_NS, timeout_ns)
    put(context, _SLICE_NS, max(min(_LONGEST_SLICE_NS, timeout_ns), _SHORTEST_SLICE_NS))


@inline
def _run_one(queue, context, number):
    """Run a call, or finish it if it was posted; return its status."""
    entry = entry_of(queue, number)
    call = get(entry, E_CALL)
    _set_deadline(context, get(entry, E_TIMEOUT_NS))
    if number > get(queue, Q_POSTED):
        put(queue, Q_POSTED, number)
        return call_loop(get(call, _LOOP), context, call)
    last = get(context, SEQUENCE)
    put(context, SEQUENCE, get(entry, E_SEQUENCE))
    put(context, START_NS, 0)
    status = call_loop(get(call, _FINISH), context, call)
    put(context, SEQUENCE, last)
    return status


@inline
def run_pending(queue, context, until):
    """Run calls in order up to a number, or to the first that fails; return the last status.

    The caller reports a failure by `end_running`, after it has restored everything.
    """
    status, done = OK, load64_acquire(queue + 8 * Q_DONE)
    while status == OK and done < until:
        posted, tail = get(queue, Q_POSTED), load64_acquire(queue + 8 * Q_TAIL)
        while posted < tail and post_ahead(
            queue, context, posted + 1, get(entry_of(queue, posted + 1), E_CALL)
        ):
            posted += 1
        done += 1
        status = _run_one(queue, context, done)
        put(entry_of(queue, done), E_STATUS, status)
        if status == OK:
            exchange64(queue + 8 * Q_DONE, done)
            ring(queue + 8 * Q_BELL)
    if status != _DEADLINE:  # the error needs the deadline that passed
        _set_deadline(context, get(queue, Q_TIMEOUT_NS))
    return status


@inline
def begin_running(queue, context):
    """Become the thread that runs calls; return the previous state: IDLE means success."""
    state = compare_exchange64(context + 8 * STATE, IDLE, BUSY)
    if state == IDLE:
        put(queue, Q_IS_RUNNING, 1)
    return state


@inline
def _become_idle(queue, context):
    """Let other threads run calls. IS_RUNNING is cleared first: from then on it is theirs."""
    store64_release(queue + 8 * Q_IS_RUNNING, 0)
    exchange64(context + 8 * STATE, IDLE)


@inline
def end_running(queue, context, status):
    """Let other threads run calls, and wake those that wait for this."""
    done = load64_acquire(queue + 8 * Q_DONE)
    if status == _NO_ROOM:  # the call has not begun: its waiter makes room, or gives up
        put(queue, Q_POSTED, done)
        exchange64(queue + 8 * Q_WANTED, done)
        _become_idle(queue, context)
    elif status != OK:
        put(queue, Q_POSTED, done + 1)  # the ranks agree on new numbers, so the rest is reposted
        exchange64(context + 8 * STATE, NEEDS_PYTHON)
        exchange64(queue + 8 * Q_DONE, done + 1)
        store64_release(queue + 8 * Q_IS_RUNNING, 0)  # Python waits for this, and then begins
    else:
        _become_idle(queue, context)
    ring(queue + 8 * Q_BELL)
    if status == OK and done < load64_acquire(queue + 8 * Q_WANTED):
        ring(get(queue, Q_THREAD) + 8 * T_BELL)


@inline
def sleep_on(bell, seen, timeout):
    """Sleep until the bell is rung, at most for the timespec at `timeout`; 0 means no limit."""
    _syscall(SYS_FUTEX, bell, FUTEX_WAIT, np.int64(seen), timeout, 0, 0)


# --- the thread -----------------------------------------------------------------------------------


@inline
def _has_work(queue):
    """Return the thread's work in a queue: NOTHING, RAN (it may run calls) or IS_BUSY."""
    if load64_acquire(queue + 8 * Q_DONE) >= load64_acquire(queue + 8 * Q_WANTED):
        return NOTHING
    state = load64_acquire(get(queue, Q_CONTEXT) + 8 * STATE)
    if state == IDLE:
        return RAN
    return IS_BUSY if state == BUSY else NOTHING


@inline
def _serve(queue):
    """Run all calls of a queue, in the thread."""
    context = get(queue, Q_CONTEXT)
    if _has_work(queue) != RAN or begin_running(queue, context) != IDLE:
        return
    put(context, _WAIT_LONG, get(queue, Q_WAIT_ALONE))
    status = OK
    while status == OK and load64_acquire(queue + 8 * Q_DONE) < load64_acquire(
        queue + 8 * Q_WANTED
    ):
        status = run_pending(queue, context, load64_acquire(queue + 8 * Q_TAIL))
    put(context, _WAIT_LONG, get(queue, Q_WAIT_LONG))
    end_running(queue, context, status)


@inline
def want_thread(table):
    """Have the thread progress the pending messages of a table that it knows."""
    thread = get(table, M_THREAD)
    if thread != 0 and exchange64(table + 8 * _M_IS_WANTED, _NEW) == _NOT_WANTED:
        ring(thread + 8 * T_BELL)


@inline
def _is_wanted(table):
    """Return whether messages of a table are pending and the thread was asked for them."""
    is_over = get(table, _M_IS_DEAD) != 0
    if is_over or load64_acquire(table + 8 * _M_IS_WANTED) == _NOT_WANTED:
        return False
    looks_left = get(table, _M_LOOKS_LEFT) - 1
    if load64_acquire(table + 8 * _M_PENDING) != 0:
        looks_left = _LOOKS_AFTER
    put(table, _M_LOOKS_LEFT, looks_left)
    if looks_left > 0:
        return True
    exchange64(table + 8 * _M_IS_WANTED, _NOT_WANTED)
    if load64_ordered(table + 8 * _M_PENDING) == 0:
        return False
    exchange64(table + 8 * _M_IS_WANTED, _NEW)  # a message has just started
    return True


@inline
def _step_messages(table, serves):
    """Progress a table's messages, unless another thread does; return like `_has_work`."""
    if not _is_wanted(table):
        return NOTHING
    if not serves or load64_acquire(table + 8 * _M_WAITERS) != 0:
        return IS_BUSY
    if exchange64(table + 8 * _M_IS_WANTED, _SEEN) == _NEW:
        return IS_BUSY
    moves = load64_acquire(table + 8 * _M_MOVES)
    call_step(get(table, _M_STEP), table)
    return IS_BUSY if load64_acquire(table + 8 * _M_MOVES) == moves else RAN


@inline
def _look_at(item, serves):
    """Serve a queue or a table of messages, or look for its work."""
    if item & 1:
        return _step_messages(item - 1, serves)
    found = _has_work(item)
    if serves and found == RAN:
        _serve(item)
    return found


@inline
def _look_at_all(thread, serves):
    """Serve every queue and table, or only look; return the work of the one with the most."""
    most = NOTHING
    for place in range(load64_acquire(thread + 8 * T_COUNT)):
        address = thread + 8 * (T_QUEUES + place)
        queue = load64_acquire(address)
        if queue == 0:
            continue
        exchange64(thread + 8 * T_CURRENT, queue)
        if load64_ordered(address) == queue:  # otherwise it is being removed
            found = _look_at(queue, serves)
            if found == RAN or most == NOTHING:
                most = found
        exchange64(thread + 8 * T_CURRENT, 0)
    return most


@compiled
def serve_started(thread):
    """Run started calls until told to stop: the function for `pthread_create`. No interpreter."""
    bell, timeout = thread + 8 * T_BELL, thread + 8 * T_FUTEX
    while load64_acquire(thread + 8 * T_STOP) == 0:
        if _look_at_all(thread, True) == RAN:
            put(thread, T_FUTEX + 1, _SHORTEST_SLEEP_NS)
            continue
        seen = begin_to_sleep(bell)
        found = _look_at_all(thread, False)
        if found != RAN and load64_ordered(thread + 8 * T_STOP) == 0:
            sleep_on(bell, seen, timeout if found == IS_BUSY else 0)
            longer_ns = 2 * get(thread, T_FUTEX + 1) if found == IS_BUSY else _SHORTEST_SLEEP_NS
            put(thread, T_FUTEX + 1, min(longer_ns, _LONGEST_SLEEP_NS))
        end_sleep(bell)
    exchange64(thread + 8 * T_IS_RUNNING, 0)
    return 0


@compiled
def ask_thread(table: int) -> None:
    """Have the thread progress the pending messages of a table. For Python."""
    want_thread(table)


@compiled
def wake_thread(thread: int) -> None:
    """Wake the thread, if it sleeps. For Python."""
    ring(thread + 8 * T_BELL)
