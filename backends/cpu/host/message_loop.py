"""Waiting for messages: for rows of the table, until all of them are over.

One loop serves blocking calls, groups, and waits for messages that were started before. It advances
all pending messages, including those of others, and sleeps on this rank's bell, as collectives
sleep on their words: `gpucoll.transport.shared.flags`.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.mailboxes import ring_bell
from gpucoll.backends.cpu.host.message_step import drop, lock
from gpucoll.backends.cpu.host.transfers import (
    ANY,
    CALLS,
    DEADLINE_NS,
    DONE,
    DTYPE,
    EXPIRED,
    IS_DEAD,
    KIND,
    LEFT,
    MODE,
    MOVES,
    NEEDS_ROOM,
    PEER,
    PROBE,
    ROW_BYTES,
    SIZE_BYTES,
    STATE,
    TAG,
    TIMEOUT_NS,
    WITHDRAWS,
    finish,
    state_of,
    unlock,
)
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import (
    add32,
    call_post,
    call_step,
    exchange64,
    get,
    load64,
    load64_acquire,
    pause,
    put,
)
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import (
    FIRST_SPINS,
    SLEEPY_WAITS,
    TIME_SLICE_NS,
    begin_to_sleep,
    dead_rank,
    end_sleep,
    give_up,
    is_aborted,
    now_ns,
    python_raised,
    release_interpreter,
    sleep_until_rung,
    yield_once,
)
from gpucoll.transport.shared.layout import Abort, Doing
from gpucoll.transport.shared.steps import LINE, OK, RANK, SEQUENCE, STATUS_LINES, WORLD_SIZE
from gpucoll.transport.shared.words import Call, Context, Path, State, Status, TransferTable

_ROWS, _N_ROWS = int(Call.TRANSFERS), int(Call.N_TRANSFERS)
_IS_STARTED, _UNTIL_NS = int(Call.IS_STARTED), int(Call.UNTIL_NS)
_LEAVES = int(Call.LEAVES)
_TABLE, _PATH, _STATE = int(Context.TRANSFERS), int(Context.PATH), int(Context.STATE)
_STEP, _POST = int(TransferTable.STEP), int(TransferTable.POST)
_SEEN_NS, _WAITERS = int(TransferTable.SEEN_NS), int(TransferTable.WAITERS)
_BELLS, _DOING = int(Context.BELLS), layout.BELL_DOING
_D_KIND, _D_PEER, _D_TAG = int(Doing.KIND), int(Doing.PEER), int(Doing.TAG)
_D_SIZE_BYTES, _D_DTYPE = int(Doing.SIZE_BYTES), int(Doing.DTYPE)
_D_FURTHER, _D_TIMEOUT_NS = int(Doing.FURTHER), int(Doing.TIMEOUT_NS)
_SPINS, _YIELDS, _SLEEPY = int(Context.SPINS), int(Context.YIELDS), int(Context.SLEEPY)
_SLICE_NS, _TIMEOUT_NS = int(Context.SLICE_NS), int(Context.TIMEOUT_NS)
_LOST_RANK, _CHUNK = int(Context.LOST_RANK), int(Context.CHUNK)
_EVENT_LINE, _EVENT_SEEN = int(Context.EVENT_LINE), int(Context.EVENT_SEEN)
_EVENT_WORD, _STATUS_CLOSED = layout.EVENT_WORD, layout.STATUS_CLOSED
_EVENT, _LOST, _SIGNAL = int(Status.EVENT), int(Status.LOST), int(Status.SIGNAL)
_MISFIT = int(Status.MISFIT)
_DEADLINE, _NO_ROOM = int(Status.DEADLINE), int(Status.NO_ROOM)
_NOT_YET, _MESSAGE, _BUSY = int(Status.NOT_YET), int(Path.MESSAGE), int(State.BUSY)
_ABORT_LOST, _ABORT_INTERRUPTED = int(Abort.LOST), int(Abort.INTERRUPTED)
_ABORT_DEADLINE = int(Abort.MESSAGE_DEADLINE)
_ANSWER_EVEN, _ANSWER_ODD = layout.STATUS_ACKNOWLEDGED
_AT_ONCE = 1
_PATIENCE = 3
"""A message of 256 KiB is copied in 10 us, longer than `Context.YIELDS` cover."""
_MOVES_BETWEEN_LOOKS = 256
_LONGEST_SLICE_NS = int(TransferTable.LONGEST_SLICE_NS)
_SHORTEST_SLICE_NS = 100_000


@inline
def _row_at(rows, place):
    return rows + place * ROW_BYTES


@inline
def _all_over(rows, count):
    """Return whether all rows are over."""
    n_over = 0
    for place in range(count):
        n_over += state_of(_row_at(rows, place)) >= DONE
    return n_over == count


@inline
def _result(rows, count):
    """Return OK, or MISFIT if one of these rows, which are over, did not get its message."""
    n_done = 0
    for place in range(count):
        n_done += get(_row_at(rows, place), STATE) == DONE
    return OK if n_done == count else _MISFIT


# --- reporting what this rank waits for -----------------------------------------------------------


@inline
def _note(context, rows, count):
    """Write into the segment what this rank waits for: others read it when a rank gives up."""
    doing = get(context, _BELLS) + get(context, RANK) * LINE + _DOING
    first, further = -1, 0
    for place in range(count):
        if state_of(_row_at(rows, place)) < DONE:
            if first < 0:
                first = place
            else:
                further += 1
    row = _row_at(rows, max(first, 0))
    put(doing, _D_PEER, get(row, PEER))
    put(doing, _D_TAG, get(row, TAG))
    put(doing, _D_SIZE_BYTES, get(row, SIZE_BYTES))
    put(doing, _D_DTYPE, get(row, DTYPE))
    put(doing, _D_FURTHER, further)
    put(doing, _D_TIMEOUT_NS, get(row, TIMEOUT_NS))
    put(doing, _D_KIND, get(row, KIND))


@inline
def _note_the_end(context):
    """Note that this rank waits for no message any more; after an abort keep it for the others."""
    if not is_aborted(context):
        put(get(context, _BELLS) + get(context, RANK) * LINE + _DOING, _D_KIND, 0)


# --- looking around -------------------------------------------------------------------------------


@inline
def _answer(context, calls):
    """Answer a mismatch of collectives, so that no rank waits for this one.

    The other end of a message may have to recover before it can continue. The event stays pending:
    this rank raises it at its next collective. If another thread is in a collective, that thread
    answers.
    """
    event = load64(get(context, _EVENT_LINE) + _EVENT_WORD)
    if event == get(calls, _EVENT_SEEN) or get(calls, _STATE) == _BUSY:
        return
    line = get(context, STATUS_LINES) + get(context, RANK) * LINE
    place = line + (_ANSWER_ODD if event & 1 else _ANSWER_EVEN)
    if load64(place) != event:
        put(place, 1, get(calls, SEQUENCE))
        put(place, 2, get(calls, _CHUNK))
        exchange64(place, event)


@inline
def _has_left(context, table, rank):
    """Return whether a rank has closed the communicator; on another host, whether it said so."""
    line = get(context, STATUS_LINES) + rank * LINE
    if load64_acquire(line + _STATUS_CLOSED) != 0:
        return True
    left = get(table, LEFT)
    return left != 0 and get(left, rank) != 0


@inline
def _closed_peer(context, call, table, rows, count):
    """Return a rank that has closed while a row still needs it, or -1."""
    world_size, me = get(context, WORLD_SIZE), get(context, RANK)
    for place in range(count):
        row = _row_at(rows, place)
        only_looks = get(call, _UNTIL_NS) == _AT_ONCE and get(row, KIND) == PROBE
        if only_looks or state_of(row) >= DONE:
            continue
        peer, n_open, closed = get(row, PEER), 0, -1
        for rank in range(world_size):
            if (peer == ANY or peer == rank) and rank != me:
                if _has_left(context, table, rank):
                    closed = rank
                else:
                    n_open += 1
        if n_open == 0 and closed >= 0:
            return closed
    return -1


@inline
def _first_deadline(context, rows, count, time_ns):
    """Return the first deadline of these rows; deadlines not yet counting count from now."""
    first_ns = 0
    for place in range(count):
        row = _row_at(rows, place)
        if state_of(row) >= DONE:
            continue
        if get(row, DEADLINE_NS) == 0:
            if get(row, TIMEOUT_NS) == 0:
                put(row, TIMEOUT_NS, get(context, _TIMEOUT_NS))
            put(row, DEADLINE_NS, time_ns + get(row, TIMEOUT_NS))
        if first_ns == 0 or get(row, DEADLINE_NS) < first_ns:
            first_ns = get(row, DEADLINE_NS)
    return first_ns


@inline
def _withdraw(context, table, rows, count, time_ns):
    """Withdraw rows that no message matched before their own deadline; return how many are late.

    A message that is on its way gets the communicator's deadline instead. Otherwise a program that
    polls with a short deadline would break the communicator if a message arrived just before it.
    """
    call_step(get(table, _STEP), table)  # messages that have arrived by now are not late
    n_late = 0
    lock(table)
    for place in range(count):
        row = _row_at(rows, place)
        if get(table, IS_DEAD) != 0 or state_of(row) >= DONE or time_ns < get(row, DEADLINE_NS):
            continue
        if get(row, MODE) & WITHDRAWS == 0:
            n_late += 1
        elif drop(table, row):
            finish(table, row, EXPIRED)
        else:
            put(row, MODE, 0)
            put(row, TIMEOUT_NS, get(context, _TIMEOUT_NS))
            put(row, DEADLINE_NS, time_ns + get(row, TIMEOUT_NS))
    unlock(table)
    ring_bell(context, get(context, RANK))  # another thread may wait for the same
    return n_late


@inline
def _give_up_for(context, calls, code, rank):
    put(context, SEQUENCE, get(calls, SEQUENCE))
    give_up(context, code, rank)


@inline
def _look_around(context, call, table, rows, count, time_ns):
    """Check whether to go on waiting: signals, lost peers, deadlines; return a status."""
    calls = get(table, CALLS)
    put(table, _SEEN_NS, time_ns)
    if get(call, _UNTIL_NS) != _AT_ONCE and python_raised(context):
        if get(call, _LEAVES) == 0:
            _note(context, rows, count)
            _give_up_for(context, calls, _ABORT_INTERRUPTED, get(context, RANK))
        return _SIGNAL
    lost = dead_rank(context)
    if lost < 0:
        lost = _closed_peer(context, call, table, rows, count)
        if lost >= 0:  # messages that it sent before it closed are still there
            moves = get(table, MOVES)
            call_step(get(table, _STEP), table)
            if get(table, MOVES) != moves or _all_over(rows, count):
                lost = -1
    if lost >= 0:
        put(context, _LOST_RANK, lost)
        _note(context, rows, count)
        _give_up_for(context, calls, _ABORT_LOST, lost)
        return _LOST
    _answer(context, calls)
    deadline_ns = _first_deadline(context, rows, count, time_ns)
    is_late = deadline_ns != 0 and time_ns >= deadline_ns
    if is_late and _withdraw(context, table, rows, count, time_ns) != 0:
        _note(context, rows, count)
        _give_up_for(context, calls, _ABORT_DEADLINE, get(context, RANK))
        return _DEADLINE
    if get(call, _UNTIL_NS) > _AT_ONCE and time_ns >= get(call, _UNTIL_NS):
        return _NOT_YET
    return OK


# --- waiting --------------------------------------------------------------------------------------


@inline
def _may_yield(context):
    """Return whether a wait may yield to other processes before it sleeps: see `flags`."""
    sleepy = get(context, _SLEEPY)
    if sleepy > 0:
        put(context, _SLEEPY, sleepy - 1)
    return sleepy <= 0


@inline
def _yield_guarded(context):
    """Yield once; return whether another rank ran, rather than a process for a whole slice."""
    before_ns = now_ns(context)
    yield_once()
    if now_ns(context) - before_ns <= TIME_SLICE_NS:
        return True
    put(context, _SLEEPY, SLEEPY_WAITS)
    return False


@inline
def _sleep(context, call, table, rows, count):
    """Sleep until a mailbox changes or a slice of time is over; return a status."""
    _note(context, rows, count)
    bell = get(context, _BELLS) + get(context, RANK) * LINE
    time_ns = now_ns(context)
    until_ns = _first_deadline(context, rows, count, time_ns)
    if get(call, _UNTIL_NS) > _AT_ONCE:
        until_ns = min(until_ns, get(call, _UNTIL_NS))
    slice_ns = min(get(table, _LONGEST_SLICE_NS), until_ns - time_ns)
    slice_ns = max(slice_ns, _SHORTEST_SLICE_NS)
    put(context, _SLICE_NS, slice_ns)
    seen = begin_to_sleep(bell)
    moves = get(table, MOVES)
    call_step(get(table, _STEP), table)
    is_needed = get(table, MOVES) != moves or get(table, NEEDS_ROOM) != 0
    if not (is_needed or _all_over(rows, count) or is_aborted(context)):
        sleep_until_rung(context, bell, seen)
    end_sleep(bell)
    time_ns = now_ns(context)
    if time_ns - get(table, _SEEN_NS) < slice_ns and time_ns < until_ns:
        return OK
    return _look_around(context, call, table, rows, count, time_ns)


@inline
def _wait(context, call, table, rows, count):
    """Wait until these rows are over; return a status."""
    spins = get(context, _SPINS)
    yields = spins + _PATIENCE * get(context, _YIELDS)
    turns = n_moves = 0
    moves = get(table, MOVES)
    while True:
        call_step(get(table, _STEP), table)
        if _all_over(rows, count):
            return OK
        if is_aborted(context):
            return _EVENT
        if get(table, NEEDS_ROOM) != 0:
            return _NO_ROOM
        if get(call, _UNTIL_NS) == _AT_ONCE:
            return _poll(context, call, table, rows, count)
        turns += 1
        if get(table, MOVES) != moves:
            moves, turns, n_moves = get(table, MOVES), 0, n_moves + 1
            if n_moves % _MOVES_BETWEEN_LOOKS == 0:  # messages may move endlessly
                release_interpreter(context)
                status = _look_around(context, call, table, rows, count, now_ns(context))
                if status != OK:
                    return status
            continue
        if turns >= min(FIRST_SPINS, spins):
            release_interpreter(context)
        if turns <= spins:
            pause()
            continue
        if turns == spins + 1 and not _may_yield(context):
            turns = yields
        if turns <= yields:
            if not _yield_guarded(context):
                turns = yields
            continue
        status = _sleep(context, call, table, rows, count)
        if status != OK:
            return status
        turns = spins  # perhaps nothing else happens: a few more yields at most


@inline
def _poll(context, call, table, rows, count):
    """Look around at most once per time slice; return a status."""
    time_ns = now_ns(context)
    if time_ns - get(table, _SEEN_NS) >= get(table, _LONGEST_SLICE_NS):
        status = _look_around(context, call, table, rows, count, time_ns)
        if status != OK:
            return status
    return OK if _all_over(rows, count) else _NOT_YET


@compiled
def message_loop(context, call):
    """Start the call's rows unless they were started; wait until all are over; return a status.

    No thread touches any row after a status other than OK, MISFIT, NO_ROOM, NOT_YET, or a SIGNAL
    that ends the wait alone.
    """
    table, rows, count = get(context, _TABLE), get(call, _ROWS), get(call, _N_ROWS)
    if get(call, _IS_STARTED) == 0:
        if call_post(get(table, _POST), table, rows, count) == 0:
            return _EVENT
        put(get(table, CALLS), _PATH, _MESSAGE)
    if _all_over(rows, count):
        return _result(rows, count)
    add32(table + 8 * _WAITERS, 1)
    status = _wait(context, call, table, rows, count)
    add32(table + 8 * _WAITERS, -1)
    if get(context, _SLICE_NS) != 0:
        put(context, _SLICE_NS, 0)
        _note_the_end(context)
    is_left = status == _SIGNAL and get(call, _LEAVES) != 0
    if status != OK and status != _NO_ROOM and status != _NOT_YET and not is_left:
        lock(table)
        put(table, IS_DEAD, 1)
        unlock(table)
    return status if status != OK else _result(rows, count)
