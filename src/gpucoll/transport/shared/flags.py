"""Signals between processes, for compiled loops: set a word, or wait for one, with a deadline.

A wait spins, then yields, then sleeps on a futex in slices. After each slice it checks for Python
signals (Ctrl-C), lost peers and its deadline. All of this is compiled, because a callback into
Python could lose a signal that arrives just as it is entered. A signal between ranks is one
exchange with a full fence and, only if a rank sleeps on the word, one system call.
"""

from __future__ import annotations

import numpy as np

from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import (
    MACHINE,
    add32,
    call_step,
    call_wait,
    compare_exchange64,
    exchange32,
    exchange64,
    fence_acquire,
    fence_full,
    get,
    load32_acquire,
    load32_ordered,
    load64,
    load64_acquire,
    pause,
    put,
    signed32,
    store64,
)
from gpucoll.transport.shared.layout import (
    CPUS,
    EVENT_ABORT,
    EVENT_WORD,
    HEADER_WAITERS,
    HEADER_WORD,
    LINE_BYTES,
    STATUS_CLOSED,
    STATUS_CLOSED_SEQUENCE,
    Abort,
)
from gpucoll.transport.shared.words import Context, Status, TransferTable

_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}
if MACHINE not in _FUTEX_NUMBERS:
    raise ImportError(f"gpucoll's CPU backend does not know futex's number on {MACHINE}")

SYS_FUTEX = _FUTEX_NUMBERS[MACHINE]
_READV_NUMBERS = {"x86_64": 310, "aarch64": 270, "riscv64": 270, "ppc64le": 351}
SYS_PROCESS_VM_READV = _READV_NUMBERS[MACHINE]
FUTEX_WAIT = 0
FUTEX_WAKE = 1
EVERYBODY = 2**31 - 1
CLOCK_MONOTONIC = 1
LEAST_SLICE_NS = 50_000
"""The shortest slice: the last sleep before a deadline ends at the deadline, but is not shorter."""
TIME_SLICE_NS = 500_000
"""A yield that takes longer than this has given away a whole time slice."""
SLEEPY_WAITS = 1000
"""The number of waits that sleep at once after such a yield.

A lost slice of 3 ms then costs each of them 3 us.
"""
MESSAGE_SLICE_NS = 200_000
"""How long a collective sleeps at a time while messages are pending: they ring another bell."""
NANOSECONDS = 1_000_000_000
FIRST_SPINS = 64
"""How often a wait spins before it lets other Python threads run: about 3 us."""
SHARING_SPINS, SHARING_YIELDS = 20, 20
"""How often a rank spins and yields if it shares its CPU with another rank."""
SHARING_LASTS = 16
"""How many waits in a row must find no other rank on this CPU before a rank spins fully again.

A single such wait proves nothing: one of two ranks on a CPU may wait twice in a row.
"""
SHARING_SLEEPS = 64
"""One in this many waits of such a rank sleeps at once: the kernel wakes it on an idle CPU."""

# Plain ints: Numba freezes them into the code, where enumeration members would cost typing time.
_SPINS, _YIELDS, _SLICE_NS = int(Context.SPINS), int(Context.YIELDS), int(Context.SLICE_NS)
_SLEEPY = int(Context.SLEEPY)
_CPUS, _FULL_SPINS = int(Context.CPUS), int(Context.FULL_SPINS)
_SHARING, _SHARING_WAITS = int(Context.SHARING), int(Context.SHARING_WAITS)
_IO_VECTORS = int(Context.IO_VECTORS)
_FUTEX_TIMEOUT, _CLOCK = int(Context.FUTEX_TIMEOUT), int(Context.CLOCK)
_EVENT_LINE, _EVENT_SEEN = int(Context.EVENT_LINE), int(Context.EVENT_SEEN)
_WAITED_RANK, _LOST_RANK = int(Context.WAITED_RANK), int(Context.LOST_RANK)
_RANK, _WORLD_SIZE, _SEQUENCE = (
    int(Context.RANK),
    int(Context.WORLD_SIZE),
    int(Context.SEQUENCE),
)
_STATUS_LINES, _POLL_FDS = int(Context.STATUS_LINES), int(Context.POLL_FDS)
_START_NS, _TIMEOUT_NS = int(Context.START_NS), int(Context.TIMEOUT_NS)
_RAISED, _WAIT_LONG = int(Context.RAISED), int(Context.WAIT_LONG)
_TRANSFERS, _MESSAGE_STEP = int(Context.TRANSFERS), int(Context.MESSAGE_STEP)
_PENDING_MESSAGES, _MOVES = int(TransferTable.PENDING), int(TransferTable.MOVES)
INTERPRETER, HELD = int(Context.INTERPRETER), 1
_OK, _EVENT, _MISMATCH = int(Status.OK), int(Status.EVENT), int(Status.MISMATCH)
_DEADLINE, _LOST, _SIGNAL = int(Status.DEADLINE), int(Status.LOST), int(Status.SIGNAL)
_ABORT_DEADLINE, _ABORT_LOST = int(Abort.DEADLINE), int(Abort.LOST)
_ABORT_INTERRUPTED = int(Abort.INTERRUPTED)

_i64 = types.int64
_syscall = types.ExternalFunction("syscall", _i64(_i64, _i64, _i64, _i64, _i64, _i64, _i64))
_sched_getcpu = types.ExternalFunction("sched_getcpu", types.int32())
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_poll = types.ExternalFunction("poll", types.int32(_i64, _i64, types.int32))
_save_thread = types.ExternalFunction("PyEval_SaveThread", _i64())
_take_gil = types.ExternalFunction("PyGILState_Ensure", types.int32())
_give_gil = types.ExternalFunction("PyGILState_Release", types.void(types.int32))
_check_signals = types.ExternalFunction("PyErr_CheckSignals", types.int32())
_fetch_error = types.ExternalFunction("PyErr_Fetch", types.void(_i64, _i64, _i64))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, _i64))


@inline
def copy_from_process(context, pid, destination, source, size_bytes):
    """Copy from an address in another process; return the bytes copied, negative on errors."""
    vectors = context + 8 * _IO_VECTORS
    put(vectors, 0, destination)
    put(vectors, 1, size_bytes)
    put(vectors, 2, source)
    put(vectors, 3, size_bytes)
    return _syscall(SYS_PROCESS_VM_READV, pid, vectors, 1, vectors + 16, 1, 0)


@inline
def now_ns(context):
    """Return the monotonic clock, in nanoseconds."""
    _clock_gettime(np.int32(CLOCK_MONOTONIC), context + 8 * _CLOCK)
    return get(context, _CLOCK) * NANOSECONDS + get(context, _CLOCK + 1)


@inline
def behind(value, target):
    """Return whether the 32-bit counter `value` is behind `target`, by their difference."""
    return np.int32(np.int64(value) - np.int64(target)) < 0


@inline
def signal(address, value):
    """Set a {value, waiters} word and wake all that sleep on it."""
    exchange32(address, value)
    if load32_ordered(address + 4) > 0:
        _syscall(SYS_FUTEX, address, FUTEX_WAKE, EVERYBODY, 0, 0, 0)


@inline
def signal_header(slot, word):
    """Set a slot's {sequence, digest} word and wake all that sleep on it."""
    exchange64(slot + HEADER_WORD, word)
    if load32_ordered(slot + HEADER_WAITERS) > 0:
        _syscall(SYS_FUTEX, slot + HEADER_WORD, FUTEX_WAKE, EVERYBODY, 0, 0, 0)


@inline
def event_pending(context):
    """Return whether the communicator was aborted, or has an event that this rank must answer."""
    line = get(context, _EVENT_LINE)
    return load64(line + EVENT_ABORT) != 0 or load64(line + EVENT_WORD) != get(context, _EVENT_SEEN)


@inline
def is_aborted(context):
    """Return whether the communicator was given up."""
    return load64(get(context, _EVENT_LINE) + EVENT_ABORT) != 0


@inline
def is_aborted_since(context):
    """Return whether the communicator was given up, also while this rank copied a peer's memory.

    The flag is loaded after all copied data. A peer that has given up may have reused its memory
    during the copy; then this load sees the flag.
    """
    fence_acquire()
    return is_aborted(context)


@inline
def event_pending_since(context):
    """Return whether there was an abort or event, also while this rank copied a peer's memory."""
    fence_acquire()
    return event_pending(context)


@inline
def start_clock(context):
    """Start the clock of this call's deadline, unless it is running; return the time."""
    time_ns = now_ns(context)
    if get(context, _START_NS) == 0:
        put(context, _START_NS, time_ns)
    return time_ns


@inline
def release_interpreter(context):
    """Release the interpreter to other Python threads, if this call still holds it."""
    if get(context, INTERPRETER) == HELD:
        put(context, INTERPRETER, _save_thread())


@inline
def yield_once():
    """Yield the CPU to another process."""
    _sched_yield()


@inline
def ring(bell):
    """Wake all that sleep on a bell; first store what they are to see, with a full fence."""
    if load32_ordered(bell + 4) > 0:
        add32(bell, 1)
        _syscall(SYS_FUTEX, bell, FUTEX_WAKE, EVERYBODY, 0, 0, 0)


@inline
def _step_messages(context):
    """Advance pending messages by a step; return the longest sleep allowed, in nanoseconds.

    Other ranks may wait for this rank's part of a message before they enter this collective.
    """
    table = get(context, _TRANSFERS)
    if table == 0 or load64_acquire(table + 8 * _PENDING_MESSAGES) == 0:
        return get(context, _SLICE_NS)
    moves = get(table, _MOVES)
    if call_step(get(context, _MESSAGE_STEP), table) == 0:
        return get(context, _SLICE_NS)
    longest_ns = MESSAGE_SLICE_NS if get(table, _MOVES) == moves else MESSAGE_SLICE_NS // 10
    return min(get(context, _SLICE_NS), longest_ns)


@inline
def _sleep_slice(context, address, waiters, value, slice_ns):
    """Sleep until the word at `address` changes, for at most `slice_ns`."""
    slice_ns = min(slice_ns, _step_messages(context))
    put(context, _FUTEX_TIMEOUT, slice_ns // NANOSECONDS)
    put(context, _FUTEX_TIMEOUT + 1, slice_ns % NANOSECONDS)
    add32(waiters, 1)
    seen = load32_ordered(address)
    if behind(seen, value):
        timeout = context + 8 * _FUTEX_TIMEOUT
        _syscall(SYS_FUTEX, address, FUTEX_WAIT, np.int64(seen), timeout, 0, 0)
    add32(waiters, -1)


@inline
def sleep_until_rung(context, bell, seen):
    """Sleep until the bell's count differs from `seen`, for at most one slice."""
    slice_ns = get(context, _SLICE_NS)
    put(context, _FUTEX_TIMEOUT, slice_ns // NANOSECONDS)
    put(context, _FUTEX_TIMEOUT + 1, slice_ns % NANOSECONDS)
    timeout = context + 8 * _FUTEX_TIMEOUT
    _syscall(SYS_FUTEX, bell, FUTEX_WAIT, np.int64(seen), timeout, 0, 0)


@inline
def begin_to_sleep(bell):
    """Announce a sleeper; return the bell's count. The caller then checks everything again."""
    add32(bell + 4, 1)
    return load32_ordered(bell)


@inline
def end_sleep(bell):
    """Withdraw the announcement."""
    add32(bell + 4, -1)


@inline
def python_raised(context):
    """Let Python's signal handlers run; keep the exception, and return whether there is one."""
    gil = _take_gil()
    raised = _check_signals() != 0
    if raised:
        kept = context + 8 * _RAISED
        _fetch_error(kept, kept + 8, kept + 16)
    _give_gil(gil)
    return raised


@inline
def dead_rank(context):
    """Return a rank whose process ended without closing the communicator, or -1."""
    world_size, fds = get(context, _WORLD_SIZE), get(context, _POLL_FDS)
    _poll(fds, world_size, np.int32(0))
    for rank in range(world_size):
        if get(fds, rank) >> 48 != 0:  # pollfd is {int32 fd, int16 events, int16 revents}
            line = get(context, _STATUS_LINES) + rank * LINE_BYTES
            if load64_acquire(line + STATUS_CLOSED) == 0:
                return rank
    return -1


@inline
def _lost_rank(context):
    """Return a rank for which this call may wait in vain, or -1.

    A rank whose process ended without closing is lost. A rank that has closed is lost only to calls
    after its last one.
    """
    world_size, fds = get(context, _WORLD_SIZE), get(context, _POLL_FDS)
    _poll(fds, world_size, np.int32(0))
    for rank in range(world_size):
        line = get(context, _STATUS_LINES) + rank * LINE_BYTES
        if load64_acquire(line + STATUS_CLOSED) != 0:
            if behind(load64(line + STATUS_CLOSED_SEQUENCE), get(context, _SEQUENCE)):
                return rank
        elif get(fds, rank) >> 48 != 0:  # pollfd is {int32 fd, int16 events, int16 revents}
            return rank
    return -1


@inline
def give_up(context, code, rank):
    """Break the communicator for every rank, unless a rank already has."""
    word = code | (rank << 8) | (get(context, _SEQUENCE) << 32)
    compare_exchange64(get(context, _EVENT_LINE) + EVENT_ABORT, 0, word)
    fence_full()  # after this the rank may reuse its arrays: see `is_aborted_since`


@inline
def look_for_end(context, deadline_code):
    """Check for a lost rank and the deadline; return a status."""
    lost = _lost_rank(context)
    if lost >= 0:
        put(context, _LOST_RANK, lost)
        give_up(context, _ABORT_LOST, lost)
        return _LOST
    if start_clock(context) - get(context, _START_NS) > get(context, _TIMEOUT_NS):
        give_up(context, deadline_code, get(context, _RANK))
        return _DEADLINE
    return _OK


@inline
def look_around(context, deadline_code):
    """Check whether to go on waiting: signals, lost peers, the deadline; return a status."""
    if python_raised(context):
        give_up(context, _ABORT_INTERRUPTED, get(context, _RANK))
        return _SIGNAL
    return look_for_end(context, deadline_code)


@inline
def _shares_cpu(context):
    """Return whether another rank has waited on this CPU after this one; note that this one waits.

    There is one word for each CPU: {its number, the last rank that waited long on it}. Two ranks
    that take turns on a CPU find each other there every time; a rank that has moved away is found
    once. The word is not written if it does not change.
    """
    cpu = signed32(_sched_getcpu())
    place = get(context, _CPUS) + 8 * (cpu & (CPUS - 1))
    mine = (cpu << 32) | (get(context, _RANK) + 1)
    seen = load64(place)
    if seen == mine:
        return False
    store64(place, mine)
    return seen >> 32 == cpu and seen != 0


@inline
def _look_for_sharers(context):
    """Spin less from now on if another rank is on this CPU: it cannot run while this one spins."""
    sharing = get(context, _SHARING)
    if _shares_cpu(context):
        put(context, _SPINS, min(SHARING_SPINS, get(context, _FULL_SPINS)))
        put(context, _SHARING, SHARING_LASTS)
    elif sharing > 0:
        put(context, _SHARING, sharing - 1)
        if sharing == 1:
            put(context, _SPINS, get(context, _FULL_SPINS))
            put(context, _SHARING_WAITS, 0)


@inline
def _yield_until(context, address, value):
    """Yield for a while; return whether the word has reached `value`.

    A yield to another rank takes a microsecond, or the time of a chunk. A yield that takes a time
    slice went to a process outside this job: two such processes on two cores make an all_reduce of
    four ranks 50 times slower than sleeping does. So the next waits sleep at once.
    """
    sleepy = get(context, _SLEEPY)
    if sleepy > 0:
        put(context, _SLEEPY, sleepy - 1)
        return False
    yields = get(context, _YIELDS)
    if get(context, _SHARING) > 0:
        yields = min(yields, SHARING_YIELDS)
        waits = get(context, _SHARING_WAITS)
        put(context, _SHARING_WAITS, waits + 1)
        if waits % SHARING_SLEEPS == 0:
            return False
    before_ns = start_clock(context)
    for _ in range(yields):
        _sched_yield()
        if not behind(load32_acquire(address), value):
            return True
        after_ns = now_ns(context)
        if after_ns - before_ns > TIME_SLICE_NS:
            put(context, _SLEEPY, SLEEPY_WAITS)
            return False
        before_ns = after_ns
    return False


@inline
def _event_unless_reached(address, value):
    """Return EVENT, unless the awaited value came before the event; return a status.

    A mismatch is announced when all ranks have posted the call. A rank that has posted that call
    ahead still ends the earlier calls, which the others have ended. The event must not make one of
    them fail.
    """
    fence_acquire()
    return _EVENT if behind(load32_acquire(address), value) else _OK


@compiled
def wait_long(context, address, waiters, value, rank):
    """Go on spinning, yield, then sleep in slices, with checks after each slice.

    It is a C function of its own, so that it is compiled once, not into every place that waits.
    """
    release_interpreter(context)
    if get(context, _FULL_SPINS) > FIRST_SPINS:
        _look_for_sharers(context)
    for _ in range(get(context, _SPINS) - FIRST_SPINS):
        pause()
        if not behind(load32_acquire(address), value):
            return _OK
    if _yield_until(context, address, value):
        return _OK
    put(context, _WAITED_RANK, rank)
    time_ns = start_clock(context)
    look_ns = time_ns + get(context, _SLICE_NS)
    end_ns = get(context, _START_NS) + get(context, _TIMEOUT_NS)
    while True:
        slice_ns = max(min(get(context, _SLICE_NS), end_ns - time_ns), LEAST_SLICE_NS)
        _sleep_slice(context, address, waiters, value, slice_ns)
        if not behind(load32_acquire(address), value):
            return _OK
        if event_pending(context):
            return _event_unless_reached(address, value)
        time_ns = now_ns(context)
        if time_ns >= look_ns or time_ns > end_ns:
            status = look_around(context, _ABORT_DEADLINE)
            if status != _OK:
                return status
            look_ns = now_ns(context) + get(context, _SLICE_NS)


@inline
def wait_counter(context, address, waiters, value, rank):
    """Wait until the 32-bit counter at `address` has reached `value`; return a status."""
    if not behind(load32_acquire(address), value):
        return _OK
    for _ in range(min(get(context, _SPINS), FIRST_SPINS)):
        pause()
        if not behind(load32_acquire(address), value):
            return _OK
    return call_wait(get(context, _WAIT_LONG), context, address, waiters, np.int64(value), rank)


@inline
def wait(context, address, value, rank):
    """Wait until the {value, waiters} word of `rank` has reached `value`; return a status."""
    return wait_counter(context, address, address + 4, value, rank)


@inline
def wait_header(context, slot, word, rank):
    """Wait until `rank` has posted this sequence in `slot`; MISMATCH if its digest differs.

    A rank that is a whole ring ahead compared this rank's digest before it reused the slot.
    """
    seen = load64_acquire(slot + HEADER_WORD)
    if seen == word:
        return _OK
    status = wait_counter(context, slot + HEADER_WORD, slot + HEADER_WAITERS, np.int32(word), rank)
    if status != _OK:
        return status
    seen = load64_acquire(slot + HEADER_WORD)
    if seen != word and np.int32(seen) == np.int32(word):
        return _MISMATCH
    return _OK


@compiled
def event_compare_exchange(address, expected, desired):
    """Store `desired` if the word is `expected`, with a full fence; return the old value."""
    before = compare_exchange64(address, expected, desired)
    fence_full()
    return before


@compiled
def event_store(address, value):
    """Store with a full fence; return the old value. For Python."""
    return exchange64(address, value)


@compiled
def wait_long_alone(context, address, waiters, value, rank):
    """Wait like `wait_long`, in a thread that is not Python's and runs next to one that computes.

    Unlike `wait_long`, it sleeps at once. It does not check for Python signals, because such a
    thread never takes the interpreter. It ends when another thread gives the communicator up.
    """
    put(context, _WAITED_RANK, rank)
    start_clock(context)
    while True:
        _sleep_slice(context, address, waiters, value, get(context, _SLICE_NS))
        if not behind(load32_acquire(address), value):
            return _OK
        if event_pending(context):
            return _event_unless_reached(address, value)
        status = look_for_end(context, _ABORT_DEADLINE)
        if status != _OK:
            return status
