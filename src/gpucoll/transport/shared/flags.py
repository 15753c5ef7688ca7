"""Signals between processes, for compiled loops: set a word, or wait for one, with a deadline.

A wait spins, then yields, then sleeps on a futex in slices. After each slice it checks for Python
signals (Ctrl-C), lost peers and its deadline. All of this is compiled, because a callback into
Python could lose a signal that arrives just as it is entered. A signal between ranks is one
exchange with a full fence and, only if a rank sleeps on the word, one system call.
"""

from __future__ import annotations

import numpy as np

from gpucoll.blocks import Words
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
    load32_acquire,
    load32_ordered,
    load64,
    load64_acquire,
    pause,
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
    STATUS_SINCE,
    Abort,
)
from gpucoll.transport.shared.libc import CLOCK_MONOTONIC, clock_gettime, poll, sched_yield, syscall
from gpucoll.transport.shared.words import Context, Status

_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}
if MACHINE not in _FUTEX_NUMBERS:
    raise ImportError(f"gpucoll's CPU backend does not know futex's number on {MACHINE}")

SYS_FUTEX = _FUTEX_NUMBERS[MACHINE]
_GETPID_NUMBERS = {"x86_64": 39, "aarch64": 172, "riscv64": 172, "ppc64le": 20}
_GETTID_NUMBERS = {"x86_64": 186, "aarch64": 178, "riscv64": 178, "ppc64le": 207}
_SYS_GETPID, _SYS_GETTID = _GETPID_NUMBERS[MACHINE], _GETTID_NUMBERS[MACHINE]
_READV_NUMBERS = {"x86_64": 310, "aarch64": 270, "riscv64": 270, "ppc64le": 351}
SYS_PROCESS_VM_READV = _READV_NUMBERS[MACHINE]
FUTEX_WAIT = 0
FUTEX_WAKE = 1
EVERYBODY = 2**31 - 1
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

HELD = 1
"""In `Context.interpreter`: the call holds it."""
NOT_HELD = 2
"""In `Context.interpreter`: the call came from a thread that may not be Python's."""

_i64 = types.int64
_sched_getcpu = types.ExternalFunction("sched_getcpu", types.int32())
save_thread = types.ExternalFunction("PyEval_SaveThread", _i64())
take_gil = types.ExternalFunction("PyGILState_Ensure", types.int32())
give_gil = types.ExternalFunction("PyGILState_Release", types.void(types.int32))
check_signals = types.ExternalFunction("PyErr_CheckSignals", types.int32())
_fetch_error = types.ExternalFunction("PyErr_Fetch", types.void(_i64, _i64, _i64))


@inline
def copy_from_process(
    context: Context, pid: int, destination: int, source: int, size_bytes: int
) -> int:
    """Copy from an address in another process; return the bytes copied, negative on errors."""
    vectors = Words(context.at.io_vectors)
    vectors[0] = destination
    vectors[1] = size_bytes
    vectors[2] = source
    vectors[3] = size_bytes
    return syscall(SYS_PROCESS_VM_READV, pid, vectors, 1, vectors.address + 16, 1, 0)


@inline
def clock_ns(scratch: Words) -> int:
    """Return the monotonic clock, in nanoseconds; it uses two words of memory."""
    clock_gettime(np.int32(CLOCK_MONOTONIC), scratch.address)
    return scratch[0] * NANOSECONDS + scratch[1]


@inline
def now_ns(context: Context) -> int:
    """Return the monotonic clock, in nanoseconds."""
    return clock_ns(context.clock)


@inline
def behind(value: int, target: int) -> bool:
    """Return whether the 32-bit counter `value` is behind `target`, by their difference."""
    return bool(np.int32(np.int64(value) - np.int64(target)) < 0)


@inline
def signal(address: int, value: int) -> None:
    """Set a {value, waiters} word and wake all that sleep on it."""
    exchange32(address, value)
    if load32_ordered(address + 4) > 0:
        syscall(SYS_FUTEX, address, FUTEX_WAKE, EVERYBODY, 0, 0, 0)


@inline
def signal_header(slot: int, word: int) -> None:
    """Set a slot's {sequence, digest} word and wake all that sleep on it."""
    exchange64(slot + HEADER_WORD, word)
    if load32_ordered(slot + HEADER_WAITERS) > 0:
        syscall(SYS_FUTEX, slot + HEADER_WORD, FUTEX_WAKE, EVERYBODY, 0, 0, 0)


@inline
def event_pending(context: Context) -> bool:
    """Return whether the communicator was aborted, or has an event that this rank must answer."""
    line = context.event_line
    return load64(line + EVENT_ABORT) != 0 or load64(line + EVENT_WORD) != context.event_seen


@inline
def is_aborted(context: Context) -> bool:
    """Return whether the communicator was given up."""
    return load64(context.event_line + EVENT_ABORT) != 0


@inline
def is_aborted_since(context: Context) -> bool:
    """Return whether the communicator was given up, also while this rank copied a peer's memory.

    The flag is loaded after all copied data. A peer that has given up may have reused its memory
    during the copy; then this load sees the flag.
    """
    fence_acquire()
    return is_aborted(context)


@inline
def event_pending_since(context: Context) -> bool:
    """Return whether there was an abort or event, also while this rank copied a peer's memory."""
    fence_acquire()
    return event_pending(context)


@inline
def start_clock(context: Context) -> int:
    """Start the clock of this call's deadline, unless it is running; return the time."""
    time_ns = now_ns(context)
    if context.start_ns == 0:
        context.start_ns = time_ns
    return time_ns


@inline
def release_interpreter(context: Context) -> None:
    """Release the interpreter to other Python threads, if this call still holds it."""
    if context.interpreter == HELD:
        context.interpreter = save_thread()


@inline
def yield_once() -> None:
    """Yield the CPU to another process."""
    sched_yield()


@inline
def ring(bell: int) -> None:
    """Wake all that sleep on a bell; first store what they are to see, with a full fence."""
    if load32_ordered(bell + 4) > 0:
        add32(bell, 1)
        syscall(SYS_FUTEX, bell, FUTEX_WAKE, EVERYBODY, 0, 0, 0)


@inline
def _step_messages(context: Context) -> int:
    """Advance pending messages by a step; return the longest sleep allowed, in nanoseconds.

    Other ranks may wait for this rank's part of a message before they enter this collective.
    """
    table = context.transfers
    if not table or load64_acquire(table.at.pending) == 0:
        return context.slice_ns
    moves = table.moves
    if call_step(context.message_step, table) == 0:
        return context.slice_ns
    longest_ns = MESSAGE_SLICE_NS if table.moves == moves else MESSAGE_SLICE_NS // 10
    return min(context.slice_ns, longest_ns)


@inline
def _sleep_slice(context: Context, address: int, waiters: int, value: int, slice_ns: int) -> None:
    """Sleep until the word at `address` changes, for at most `slice_ns`."""
    slice_ns = min(slice_ns, _step_messages(context))
    context.futex_timeout[0] = slice_ns // NANOSECONDS
    context.futex_timeout[1] = slice_ns % NANOSECONDS
    add32(waiters, 1)
    seen = load32_ordered(address)
    if behind(seen, value):
        timeout = context.at.futex_timeout
        syscall(SYS_FUTEX, address, FUTEX_WAIT, np.int64(seen), timeout, 0, 0)
    add32(waiters, -1)


@inline
def sleep_until_rung(context: Context, bell: int, seen: int) -> None:
    """Sleep until the bell's count differs from `seen`, for at most one slice."""
    slice_ns = context.slice_ns
    context.futex_timeout[0] = slice_ns // NANOSECONDS
    context.futex_timeout[1] = slice_ns % NANOSECONDS
    timeout = context.at.futex_timeout
    syscall(SYS_FUTEX, bell, FUTEX_WAIT, np.int64(seen), timeout, 0, 0)


@inline
def begin_to_sleep(bell: int) -> int:
    """Announce a sleeper; return the bell's count. The caller then checks everything again."""
    add32(bell + 4, 1)
    return load32_ordered(bell)


@inline
def end_sleep(bell: int) -> None:
    """Withdraw the announcement."""
    add32(bell + 4, -1)


@inline
def _is_main_thread() -> bool:
    """Return whether this is the process's first thread."""
    return syscall(_SYS_GETPID, 0, 0, 0, 0, 0, 0) == syscall(_SYS_GETTID, 0, 0, 0, 0, 0, 0)


@inline
def python_raised(context: Context) -> int:
    """Let Python's signal handlers run; keep the exception, and return whether there is one.

    A framework's own thread does not take the interpreter for it: only the main thread runs
    handlers, and a thread that asks for the interpreter of a process that ends never returns.
    """
    if context.interpreter == NOT_HELD and not _is_main_thread():
        return False
    gil = take_gil()
    raised = check_signals() != 0
    if raised:
        kept = context.at.raised
        _fetch_error(kept, kept + 8, kept + 16)
    give_gil(gil)
    return raised


@inline
def dead_rank(context: Context) -> int:
    """Return a rank whose process ended without closing the communicator, or -1."""
    world_size, fds = context.world_size, Words(context.poll_fds)
    poll(fds, world_size, np.int32(0))
    for rank in range(world_size):
        if fds[rank] >> 48 != 0:  # pollfd is {int32 fd, int16 events, int16 revents}
            line = context.status_lines + rank * LINE_BYTES
            if load64_acquire(line + STATUS_CLOSED) == 0:
                return rank
    return -1


@inline
def _lost_rank(context: Context) -> int:
    """Return a rank for which this call may wait in vain, or -1.

    A rank whose process ended without closing is lost. A rank that has closed is lost only to calls
    after its last one.
    """
    world_size, fds = context.world_size, Words(context.poll_fds)
    poll(fds, world_size, np.int32(0))
    for rank in range(world_size):
        line = context.status_lines + rank * LINE_BYTES
        if load64_acquire(line + STATUS_CLOSED) != 0:
            if behind(load64(line + STATUS_CLOSED_SEQUENCE), context.sequence):
                return rank
        elif fds[rank] >> 48 != 0:  # pollfd is {int32 fd, int16 events, int16 revents}
            return rank
    return -1


@inline
def give_up(context: Context, code: int, rank: int) -> None:
    """Break the communicator for every rank, unless a rank already has."""
    word = code | (rank << 8) | (context.sequence << 32)
    compare_exchange64(context.event_line + EVENT_ABORT, 0, word)
    fence_full()  # after this the rank may reuse its arrays: see `is_aborted_since`


@inline
def look_for_end(context: Context, deadline_code: int) -> int:
    """Check for a lost rank and the deadline; return a status.

    Also notes since when this rank waits, for those that look at the job from outside.
    """
    line = context.status_lines + context.rank * LINE_BYTES + STATUS_SINCE
    store64(line, context.start_ns)
    store64(line + 8, context.sequence)
    lost = _lost_rank(context)
    if lost >= 0:
        give_up(context, Abort.LOST, lost)
        return Status.LOST
    if start_clock(context) - context.start_ns > context.timeout_ns:
        give_up(context, deadline_code, context.rank)
        return Status.DEADLINE
    return Status.OK


@inline
def look_around(context: Context, deadline_code: int) -> int:
    """Check whether to go on waiting: signals, lost peers, the deadline; return a status."""
    if python_raised(context):
        give_up(context, Abort.INTERRUPTED, context.rank)
        return Status.SIGNAL
    return look_for_end(context, deadline_code)


@inline
def _shares_cpu(context: Context) -> bool:
    """Return whether another rank has waited on this CPU after this one; note that this one waits.

    There is one word for each CPU: {its number, the last rank that waited long on it}. Two ranks
    that take turns on a CPU find each other there every time; a rank that has moved away is found
    once. The word is not written if it does not change.
    """
    cpu = signed32(_sched_getcpu())
    place = context.cpus + 8 * (cpu & (CPUS - 1))
    mine = (cpu << 32) | (context.rank + 1)
    seen = load64(place)
    if seen == mine:
        return False
    store64(place, mine)
    return seen >> 32 == cpu and seen != 0


@inline
def _look_for_sharers(context: Context) -> None:
    """Spin less from now on if another rank is on this CPU: it cannot run while this one spins."""
    sharing = context.sharing
    if _shares_cpu(context):
        context.spins = min(SHARING_SPINS, context.full_spins)
        context.sharing = SHARING_LASTS
    elif sharing > 0:
        context.sharing = sharing - 1
        if sharing == 1:
            context.spins = context.full_spins
            context.sharing_waits = 0


@inline
def _yield_until(context: Context, address: int, value: int) -> bool:
    """Yield for a while; return whether the word has reached `value`.

    A yield to another rank takes a microsecond, or the time of a chunk. A yield that takes a time
    slice went to a process outside this job: two such processes on two cores make an all_reduce of
    four ranks 50 times slower than sleeping does. So the next waits sleep at once.
    """
    sleepy = context.sleepy
    if sleepy > 0:
        context.sleepy = sleepy - 1
        return False
    yields = context.yields
    if context.sharing > 0:
        yields = min(yields, SHARING_YIELDS)
        waits = context.sharing_waits
        context.sharing_waits = waits + 1
        if waits % SHARING_SLEEPS == 0:
            return False
    before_ns = start_clock(context)
    for _ in range(yields):
        sched_yield()
        if not behind(load32_acquire(address), value):
            return True
        after_ns = now_ns(context)
        if after_ns - before_ns > TIME_SLICE_NS:
            context.sleepy = SLEEPY_WAITS
            return False
        before_ns = after_ns
    return False


@inline
def _event_unless_reached(address: int, value: int) -> int:
    """Return EVENT, unless the awaited value came before the event; return a status.

    A mismatch is announced when all ranks have posted the call. A rank that has posted that call
    ahead still ends the earlier calls, which the others have ended. The event must not make one of
    them fail.
    """
    fence_acquire()
    return Status.EVENT if behind(load32_acquire(address), value) else Status.OK


@compiled
def wait_long(context: Context, address: int, waiters: int, value: int) -> int:
    """Go on spinning, yield, then sleep in slices, with checks after each slice.

    It is a C function of its own, so that it is compiled once, not into every place that waits.
    """
    release_interpreter(context)
    if context.full_spins > FIRST_SPINS:
        _look_for_sharers(context)
    for _ in range(context.spins - FIRST_SPINS):
        pause()
        if not behind(load32_acquire(address), value):
            return Status.OK
    if _yield_until(context, address, value):
        return Status.OK
    time_ns = start_clock(context)
    look_ns = time_ns + context.slice_ns
    end_ns = context.start_ns + context.timeout_ns
    while True:
        slice_ns = max(min(context.slice_ns, end_ns - time_ns), LEAST_SLICE_NS)
        _sleep_slice(context, address, waiters, value, slice_ns)
        if not behind(load32_acquire(address), value):
            return Status.OK
        if event_pending(context):
            return _event_unless_reached(address, value)
        time_ns = now_ns(context)
        if time_ns >= look_ns or time_ns > end_ns:
            status = look_around(context, Abort.DEADLINE)
            if status != Status.OK:
                return status
            look_ns = now_ns(context) + context.slice_ns


@inline
def wait_counter(context: Context, address: int, waiters: int, value: int) -> int:
    """Wait until the 32-bit counter at `address` has reached `value`; return a status."""
    if not behind(load32_acquire(address), value):
        return Status.OK
    for _ in range(min(context.spins, FIRST_SPINS)):
        pause()
        if not behind(load32_acquire(address), value):
            return Status.OK
    return call_wait(context.wait_long, context, address, waiters, np.int64(value))


@inline
def wait(context: Context, address: int, value: int) -> int:
    """Wait until a {value, waiters} word has reached `value`; return a status."""
    return wait_counter(context, address, address + 4, value)


@inline
def wait_header(context: Context, slot: int, word: int) -> int:
    """Wait until the rank of `slot` has posted this sequence; MISMATCH if its digest differs.

    A rank that is a whole ring ahead compared this rank's digest before it reused the slot.
    """
    seen = load64_acquire(slot + HEADER_WORD)
    if seen == word:
        return Status.OK
    status = wait_counter(context, slot + HEADER_WORD, slot + HEADER_WAITERS, signed32(word))
    if status != Status.OK:
        return status
    seen = load64_acquire(slot + HEADER_WORD)
    if seen != word and np.int32(seen) == np.int32(word):
        return Status.MISMATCH
    return Status.OK


@compiled
def event_compare_exchange(address: int, expected: int, desired: int) -> int:
    """Store `desired` if the word is `expected`, with a full fence; return the old value."""
    before = compare_exchange64(address, expected, desired)
    fence_full()
    return before


@compiled
def event_store(address: int, value: int) -> int:
    """Store with a full fence; return the old value. For Python."""
    return exchange64(address, value)


@compiled
def wait_long_alone(context: Context, address: int, waiters: int, value: int) -> int:
    """Wait like `wait_long`, in a thread that is not Python's and runs next to one that computes.

    Unlike `wait_long`, it sleeps at once. It does not check for Python signals, because such a
    thread never takes the interpreter. It ends when another thread gives the communicator up.
    """
    start_clock(context)
    while True:
        _sleep_slice(context, address, waiters, value, context.slice_ns)
        if not behind(load32_acquire(address), value):
            return Status.OK
        if event_pending(context):
            return _event_unless_reached(address, value)
        status = look_for_end(context, Abort.DEADLINE)
        if status != Status.OK:
            return status
