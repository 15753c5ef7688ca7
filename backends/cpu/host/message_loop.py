"""Waiting for messages: for rows of the table, until all of them are over.

One loop serves blocking calls, groups, and waits for messages that were started before. It advances
all pending messages, including those of others, and sleeps on this rank's bell, as collectives
sleep on their words: `gpucoll.transport.shared.flags`.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.mailboxes import ANY, finish, ring_bell, unlock
from gpucoll.backends.cpu.host.message_step import drop, lock
from gpucoll.blocks import Words
from gpucoll.entries.messages import row_state
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import (
    add32,
    call_post,
    call_step,
    exchange64,
    load64,
    load64_acquire,
    pause,
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
from gpucoll.transport.shared.steps import LINE
from gpucoll.transport.shared.words import (
    Call,
    Context,
    Kind,
    Mode,
    Path,
    Progress,
    State,
    Status,
    Transfer,
    TransferTable,
)

_EVENT_WORD, _STATUS_CLOSED = layout.EVENT_WORD, layout.STATUS_CLOSED
_ANSWER_EVEN, _ANSWER_ODD = layout.STATUS_ACKNOWLEDGED
_AT_ONCE = 1
_PATIENCE = 3
"""A message of 256 KiB is copied in 10 us, longer than `Context.yields` cover."""
_MOVES_BETWEEN_LOOKS = 256
_SHORTEST_SLICE_NS = 100_000


@inline
def _all_over(rows: Transfer, count: int) -> bool:
    """Return whether all rows are over."""
    n_over = 0
    for place in range(count):
        n_over += row_state(rows[place]) >= Progress.DONE
    return n_over == count


@inline
def _result(rows: Transfer, count: int) -> int:
    """Return OK, or MISFIT if one of these rows, which are over, did not get its message."""
    n_done = 0
    for place in range(count):
        n_done += rows[place].state == Progress.DONE
    return Status.OK if n_done == count else Status.MISFIT


# --- reporting what this rank waits for -----------------------------------------------------------


@inline
def _note(context: Context, rows: Transfer, count: int) -> None:
    """Write into the segment what this rank waits for: others read it when a rank gives up."""
    doing = Doing(context.bells + context.rank * LINE + layout.BELL_DOING)
    first, further = -1, 0
    for place in range(count):
        if row_state(rows[place]) < Progress.DONE:
            if first < 0:
                first = place
            else:
                further += 1
    row = rows[max(first, 0)]
    doing.peer = row.peer
    doing.tag = row.tag
    doing.size_bytes = row.size_bytes
    doing.dtype = row.dtype
    doing.further = further
    doing.timeout_ns = row.timeout_ns
    if doing.kind == 0:
        doing.since_ns = now_ns(context)
    doing.kind = row.kind


@inline
def _note_the_end(context: Context) -> None:
    """Note that this rank waits for no message any more; after an abort keep it for the others."""
    if not is_aborted(context):
        Doing(context.bells + context.rank * LINE + layout.BELL_DOING).kind = 0


# --- looking around -------------------------------------------------------------------------------


@inline
def _answer(context: Context, calls: Context) -> None:
    """Answer a mismatch of collectives, so that no rank waits for this one.

    The other end of a message may have to recover before it can continue. The event stays pending:
    this rank raises it at its next collective. If another thread is in a collective, that thread
    answers.
    """
    event = load64(context.event_line + _EVENT_WORD)
    if event == calls.event_seen or calls.state == State.BUSY:
        return
    line = context.status_lines + context.rank * LINE
    place = Words(line + (_ANSWER_ODD if event & 1 else _ANSWER_EVEN))
    if load64(place.address) != event:
        place[1] = calls.sequence
        place[2] = calls.chunk
        exchange64(place.address, event)


@inline
def _has_left(context: Context, table: TransferTable, rank: int) -> bool:
    """Return whether a rank has closed the communicator; on another host, whether it said so."""
    line = context.status_lines + rank * LINE
    if load64_acquire(line + _STATUS_CLOSED) != 0:
        return True
    left = table.left
    return bool(left) and left[rank] != 0


@inline
def _closed_peer(
    context: Context, call: Call, table: TransferTable, rows: Transfer, count: int
) -> int:
    """Return a rank that has closed while a row still needs it, or -1."""
    world_size, me = context.world_size, context.rank
    for place in range(count):
        row = rows[place]
        only_looks = call.until_ns == _AT_ONCE and row.kind == Kind.PROBE
        if only_looks or row_state(row) >= Progress.DONE:
            continue
        peer, n_open, closed = row.peer, 0, -1
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
def _first_deadline(context: Context, rows: Transfer, count: int, time_ns: int) -> int:
    """Return the first deadline of these rows; deadlines not yet counting count from now."""
    first_ns = 0
    for place in range(count):
        row = rows[place]
        if row_state(row) >= Progress.DONE:
            continue
        if row.deadline_ns == 0:
            if row.timeout_ns == 0:
                row.timeout_ns = context.timeout_ns
            row.deadline_ns = time_ns + row.timeout_ns
        if first_ns == 0 or row.deadline_ns < first_ns:
            first_ns = row.deadline_ns
    return first_ns


@inline
def _withdraw(
    context: Context, table: TransferTable, rows: Transfer, count: int, time_ns: int
) -> int:
    """Withdraw rows that no message matched before their own deadline; return how many are late.

    A message that is on its way gets the communicator's deadline instead. Otherwise a program that
    polls with a short deadline would break the communicator if a message arrived just before it.
    """
    call_step(table.step, table)  # messages that have arrived by now are not late
    n_late = 0
    lock(table)
    for place in range(count):
        row = rows[place]
        if table.is_dead != 0 or row_state(row) >= Progress.DONE or time_ns < row.deadline_ns:
            continue
        if row.mode & Mode.WITHDRAWS == 0:
            n_late += 1
        elif drop(table, row):
            finish(table, row, Progress.EXPIRED)
        else:
            row.mode = 0
            row.timeout_ns = context.timeout_ns
            row.deadline_ns = time_ns + row.timeout_ns
    unlock(table)
    ring_bell(context, context.rank)  # another thread may wait for the same
    return n_late


@inline
def _give_up_for(context: Context, calls: Context, code: int, rank: int) -> None:
    context.sequence = calls.sequence
    give_up(context, code, rank)


@inline
def _look_around(
    context: Context, call: Call, table: TransferTable, rows: Transfer, count: int, time_ns: int
) -> int:
    """Check whether to go on waiting: signals, lost peers, deadlines; return a status."""
    calls = table.calls
    table.seen_ns = time_ns
    if call.until_ns != _AT_ONCE and python_raised(context):
        if call.leaves == 0:
            _note(context, rows, count)
            _give_up_for(context, calls, Abort.INTERRUPTED, context.rank)
        return Status.SIGNAL
    lost = dead_rank(context)
    if lost < 0:
        lost = _closed_peer(context, call, table, rows, count)
        if lost >= 0:  # messages that it sent before it closed are still there
            moves = table.moves
            call_step(table.step, table)
            if table.moves != moves or _all_over(rows, count):
                lost = -1
    if lost >= 0:
        _note(context, rows, count)
        _give_up_for(context, calls, Abort.LOST, lost)
        return Status.LOST
    _answer(context, calls)
    deadline_ns = _first_deadline(context, rows, count, time_ns)
    is_late = deadline_ns != 0 and time_ns >= deadline_ns
    if is_late and _withdraw(context, table, rows, count, time_ns) != 0:
        _note(context, rows, count)
        _give_up_for(context, calls, Abort.MESSAGE_DEADLINE, context.rank)
        return Status.DEADLINE
    if call.until_ns > _AT_ONCE and time_ns >= call.until_ns:
        return Status.NOT_YET
    return Status.OK


# --- waiting --------------------------------------------------------------------------------------


@inline
def _may_yield(context: Context) -> bool:
    """Return whether a wait may yield to other processes before it sleeps: see `flags`."""
    sleepy = context.sleepy
    if sleepy > 0:
        context.sleepy = sleepy - 1
    return sleepy <= 0


@inline
def _yield_guarded(context: Context) -> bool:
    """Yield once; return whether another rank ran, rather than a process for a whole slice."""
    before_ns = now_ns(context)
    yield_once()
    if now_ns(context) - before_ns <= TIME_SLICE_NS:
        return True
    context.sleepy = SLEEPY_WAITS
    return False


@inline
def _sleep(context: Context, call: Call, table: TransferTable, rows: Transfer, count: int) -> int:
    """Sleep until a mailbox changes or a slice of time is over; return a status."""
    _note(context, rows, count)
    bell = context.bells + context.rank * LINE
    time_ns = now_ns(context)
    until_ns = _first_deadline(context, rows, count, time_ns)
    if call.until_ns > _AT_ONCE:
        until_ns = min(until_ns, call.until_ns)
    slice_ns = min(table.longest_slice_ns, until_ns - time_ns)
    slice_ns = max(slice_ns, _SHORTEST_SLICE_NS)
    context.slice_ns = slice_ns
    seen = begin_to_sleep(bell)
    moves = table.moves
    call_step(table.step, table)
    is_needed = table.moves != moves or bool(table.needs_room)
    if not (is_needed or _all_over(rows, count) or is_aborted(context)):
        sleep_until_rung(context, bell, seen)
    end_sleep(bell)
    time_ns = now_ns(context)
    if time_ns - table.seen_ns < slice_ns and time_ns < until_ns:
        return Status.OK
    return _look_around(context, call, table, rows, count, time_ns)


@inline
def _wait(context: Context, call: Call, table: TransferTable, rows: Transfer, count: int) -> int:
    """Wait until these rows are over; return a status."""
    spins = context.spins
    yields = spins + _PATIENCE * context.yields
    turns = n_moves = 0
    moves = table.moves
    while True:
        call_step(table.step, table)
        if _all_over(rows, count):
            return Status.OK
        if is_aborted(context):
            return Status.EVENT
        if table.needs_room:
            return Status.NO_ROOM
        if call.until_ns == _AT_ONCE:
            return _poll(context, call, table, rows, count)
        turns += 1
        if table.moves != moves:
            moves, turns, n_moves = table.moves, 0, n_moves + 1
            if n_moves % _MOVES_BETWEEN_LOOKS == 0:  # messages may move endlessly
                release_interpreter(context)
                status = _look_around(context, call, table, rows, count, now_ns(context))
                if status != Status.OK:
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
        if status != Status.OK:
            return status
        turns = spins  # perhaps nothing else happens: a few more yields at most


@inline
def _poll(context: Context, call: Call, table: TransferTable, rows: Transfer, count: int) -> int:
    """Look around at most once per time slice; return a status."""
    time_ns = now_ns(context)
    if time_ns - table.seen_ns >= table.longest_slice_ns:
        status = _look_around(context, call, table, rows, count, time_ns)
        if status != Status.OK:
            return status
    return Status.OK if _all_over(rows, count) else Status.NOT_YET


@compiled
def message_loop(context: Context, call: Call) -> int:
    """Start the call's rows unless they were started; wait until all are over; return a status.

    No thread touches any row after a status other than OK, MISFIT, NO_ROOM, NOT_YET, or a SIGNAL
    that ends the wait alone.
    """
    table, rows, count = context.transfers, call.transfers, call.n_transfers
    if call.is_started == 0:
        if call_post(table.post, table, rows, count) == 0:
            return Status.EVENT
        table.calls.path = Path.MESSAGE
    if _all_over(rows, count):
        return _result(rows, count)
    add32(table.at.waiters, 1)
    status = _wait(context, call, table, rows, count)
    add32(table.at.waiters, -1)
    if context.slice_ns != 0:
        context.slice_ns = 0
        _note_the_end(context)
    is_left = status == Status.SIGNAL and call.leaves != 0
    if (
        status != Status.OK
        and status != Status.NO_ROOM
        and status != Status.NOT_YET
        and not is_left
    ):
        lock(table)
        table.is_dead = 1
        unlock(table)
    return status if status != Status.OK else _result(rows, count)
