"""Point-to-point within a host: a table of sends, receives and probes, all making progress.

One loop serves a single blocking call, a group and what is asynchronous. Sends to one rank go in
the table's order; a message goes to the first receive of the table that asks for its sender and
tag. One that nobody asks for, but stands before others, is given to Python to be kept aside.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.receiving import receive_step, unwanted_sender
from gpucoll.backends.cpu.host.sending import send_step
from gpucoll.backends.cpu.host.transfers import (
    ANY,
    DONE,
    DTYPE,
    KIND,
    PEER,
    SEND,
    SIZE_BYTES,
    STATE,
    TAG,
    UNDER_WAY,
    row_of,
)
from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import exchange64, get, load64, load64_acquire, pause, put
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import (
    FIRST_SPINS,
    begin_to_sleep,
    end_sleep,
    event_pending,
    give_up,
    is_aborted,
    look_around,
    release_interpreter,
    sleep_until_rung,
    start_clock,
    yield_once,
)
from gpucoll.transport.shared.layout import Abort, Doing
from gpucoll.transport.shared.steps import LINE, OK, PATH, RANK, STATUS_LINES, WORLD_SIZE
from gpucoll.transport.shared.words import Call, Context, Path, Status

_TRANSFERS, _N_TRANSFERS = int(Call.TRANSFERS), int(Call.N_TRANSFERS)
_TAKES_MORE = int(Call.TAKES_MORE)
_BELLS, _DOING = int(Context.BELLS), layout.BELL_DOING
_D_KIND, _D_PEER, _D_TAG = int(Doing.KIND), int(Doing.PEER), int(Doing.TAG)
_D_SIZE_BYTES, _D_DTYPE = int(Doing.SIZE_BYTES), int(Doing.DTYPE)
_D_FURTHER = int(Doing.FURTHER)
_UNMATCHED, _MORE = int(Context.UNMATCHED), int(Context.MORE)
_SPINS, _YIELDS = int(Context.SPINS), int(Context.YIELDS)
_STATUS_CLOSED = layout.STATUS_CLOSED
_EVENT_LINE, _EVENT_WORD = int(Context.EVENT_LINE), layout.EVENT_WORD
_SEQUENCE, _CHUNK = int(Context.SEQUENCE), int(Context.CHUNK)
_EVENT, _LOST = int(Status.EVENT), int(Status.LOST)
_ASIDE, _STATUS_MORE = int(Status.ASIDE), int(Status.MORE)
_ABORT_LOST, _MESSAGE = int(Abort.LOST), int(Path.MESSAGE)
_ABORT_DEADLINE = int(Abort.MESSAGE_DEADLINE)
_ANSWER_EVEN, _ANSWER_ODD = layout.STATUS_ACKNOWLEDGED
_PATIENCE = 3
"""A message of 256 KiB is copied in 10 us, which is more than `Context.YIELDS` cover."""


@inline
def _step(context, table, count):
    """Take every operation one step further, sends first: others wait for them.

    Return how many moved, or a negative status; and how many are not done.
    """
    moved = unfinished = 0
    for place in range(count):
        row = row_of(table, place)
        if get(row, KIND) == SEND and get(row, STATE) < DONE:
            moved += send_step(context, table, count, place)
            unfinished += get(row, STATE) < DONE
    for place in range(count):
        row = row_of(table, place)
        if get(row, KIND) != SEND and get(row, STATE) < DONE:
            step = receive_step(context, table, count, place)
            if step < 0:
                return step, 1
            moved += step
            unfinished += get(row, STATE) < DONE
    return moved, unfinished


@inline
def _has_started(table, count):
    """Return whether an operation is under way: then nothing but an abort may end it."""
    n_started = 0
    for place in range(count):
        n_started += get(row_of(table, place), STATE) == UNDER_WAY
    return n_started > 0


@inline
def _closed_peer(context, table, count):
    """Return a rank that has closed while an operation still needs it, or -1."""
    world_size, me = get(context, WORLD_SIZE), get(context, RANK)
    for place in range(count):
        row = row_of(table, place)
        if get(row, STATE) >= DONE:
            continue
        peer, n_open, closed = get(row, PEER), 0, -1
        for rank in range(world_size):
            if peer == ANY or peer == rank:
                line = get(context, STATUS_LINES) + rank * LINE
                if load64_acquire(line + _STATUS_CLOSED) == 0 and rank != me:
                    n_open += 1
                elif rank != me:
                    closed = rank
        if n_open == 0 and closed >= 0:
            return closed
    return -1


@inline
def _note(context, table, count):
    """Say in the segment what this rank waits for: read when a rank gives up."""
    doing = get(context, _BELLS) + get(context, RANK) * LINE + _DOING
    first, further = -1, 0
    for place in range(count):
        if get(row_of(table, place), STATE) < DONE:
            if first < 0:
                first = place
            else:
                further += 1
    row = row_of(table, max(first, 0))
    put(doing, _D_PEER, get(row, PEER))
    put(doing, _D_TAG, get(row, TAG))
    put(doing, _D_SIZE_BYTES, get(row, SIZE_BYTES))
    put(doing, _D_DTYPE, get(row, DTYPE))
    put(doing, _D_FURTHER, further)
    put(doing, _D_KIND, get(row, KIND))


@inline
def _note_the_end(context):
    """Say that this rank waits for no message any more, unless that is how the others find it."""
    if not is_aborted(context):
        put(get(context, _BELLS) + get(context, RANK) * LINE + _DOING, _D_KIND, 0)


@inline
def _answer(context):
    """Answer a mismatch while operations are under way, so that no rank waits for this one.

    The other end of a message may have to recover before it can go on. The event stays pending:
    this rank raises it at its next call.
    """
    event = load64(get(context, _EVENT_LINE) + _EVENT_WORD)
    line = get(context, STATUS_LINES) + get(context, RANK) * LINE
    place = line + (_ANSWER_ODD if event & 1 else _ANSWER_EVEN)
    if load64(place) != event:
        put(place, 1, get(context, _SEQUENCE))
        put(place, 2, get(context, _CHUNK))
        exchange64(place, event)


@inline
def _has_more(context):
    """Return whether operations were added; another thread says so, and rings the bell."""
    return load64_acquire(context + 8 * _MORE) != 0


@inline
def _wait_for_bell(context, table, count, takes_more):
    """Sleep until a mailbox changes or a slice of time is over.

    Return how many operations moved, or a negative status.
    """
    _note(context, table, count)
    bell = get(context, _BELLS) + get(context, RANK) * LINE
    release_interpreter(context)
    start_clock(context)
    seen = begin_to_sleep(bell)
    moved, _ = _step(context, table, count)
    is_needed = unwanted_sender(context, table, count) >= 0
    is_needed = is_needed or (takes_more and _has_more(context))
    if moved == 0 and not is_needed:
        sleep_until_rung(context, bell, seen)
    end_sleep(bell)
    if moved != 0 or is_needed:
        return moved
    if event_pending(context):
        if is_aborted(context) or not _has_started(table, count):
            return -_EVENT
        _answer(context)
    status = look_around(context, _ABORT_DEADLINE)
    if status != OK:
        return -status
    closed = _closed_peer(context, table, count)
    if closed >= 0:
        moved, _ = _step(context, table, count)  # what it sent before it closed is still there
        if moved == 0 and unwanted_sender(context, table, count) < 0:
            give_up(context, _ABORT_LOST, closed)
            return -_LOST
    return moved


@inline
def _run_table(context, call, table, count):
    """Run the operations; return a status, and whether this rank has noted what it waits for."""
    takes_more = get(call, _TAKES_MORE) != 0
    turns, has_noted = 0, False
    while True:
        moved, unfinished = _step(context, table, count)
        if moved < 0:
            return -moved, has_noted
        if unfinished == 0:
            return OK, has_noted
        if takes_more and (unfinished < count or _has_more(context)):
            return _STATUS_MORE, has_noted  # Python reports what is done, takes up what was added
        if moved > 0:
            turns = 0
            continue
        turns += 1
        if turns == 1:
            sender = unwanted_sender(context, table, count)
            if sender >= 0:
                put(context, _UNMATCHED, sender)
                _note(context, table, count)
                status = look_around(context, _ABORT_DEADLINE)  # they may come without end
                return (_ASIDE if status == OK else status), True
        if turns >= min(FIRST_SPINS, get(context, _SPINS)):
            release_interpreter(context)
        if turns <= get(context, _SPINS):
            pause()
        elif turns <= get(context, _SPINS) + _PATIENCE * get(context, _YIELDS):
            yield_once()
        else:
            has_noted = True
            moved = _wait_for_bell(context, table, count, takes_more)
            if moved < 0:
                return -moved, has_noted
            turns = 0


@compiled(types.int64(types.int64, types.int64))
def message_loop(context, call):
    """Run the call's table of operations until all are done; return a status.

    The deadline counts from `Context.START_NS`, or from when it first sleeps if that is 0: a caller
    may go on with a table.
    """
    table, count = get(call, _TRANSFERS), get(call, _N_TRANSFERS)
    if event_pending(context) and (is_aborted(context) or not _has_started(table, count)):
        return _EVENT
    put(context, PATH, _MESSAGE)
    status, has_noted = _run_table(context, call, table, count)
    if has_noted:
        _note_the_end(context)
    return status
