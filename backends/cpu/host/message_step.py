"""Steps of pending messages, made by any thread that starts one, waits for one, or has time.

A step never waits, and never takes the interpreter. A thread that waits for a message checks its
row, and sleeps on this rank's bell. When a row is over, the step of another thread rings that bell,
too.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.held_messages import (
    H_ACKNOWLEDGEMENT,
    H_COST,
    H_NEXT,
    H_OWNER,
    H_WAY,
    release,
)
from gpucoll.backends.cpu.host.mailboxes import (
    IN_TARGET,
    IN_TARGET_IS_HELD,
    OUT_TURN,
    OUT_WAITING,
    POSTED,
    mailbox_words,
    ring_bell,
)
from gpucoll.backends.cpu.host.receiving import fetch_step, post_receive, receive_all, want
from gpucoll.backends.cpu.host.sending import MOVED, OVER, STAYED, is_posted, note_room, send_step
from gpucoll.backends.cpu.host.transfers import (
    ACKNOWLEDGEMENT,
    CONTEXT,
    DONE,
    DONE_BYTES,
    DROPPED,
    FINISHED,
    FIRST,
    FIRST_HELD,
    FIRST_POSTED,
    IS_DEAD,
    IS_WAITING,
    KIND,
    LAST,
    LAST_HELD,
    LAST_POSTED,
    MOVES,
    N_WANTED,
    NEEDS_ROOM,
    NEXT,
    NOTED,
    PEER,
    PENDING,
    ROW_BYTES,
    SEND,
    STATE,
    TAG,
    TURN,
    WAITING,
    append,
    finish,
    remove,
    state_of,
    try_lock,
    unlock,
)
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import get, load64_acquire, pause, put
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import is_aborted, yield_once
from gpucoll.transport.shared.layout import Doing
from gpucoll.transport.shared.steps import LINE, RANK, WORLD_SIZE
from gpucoll.transport.shared.words import Context

_BELLS, _DOING = int(Context.BELLS), layout.BELL_DOING
_D_SENDS, _D_SEND_PEER, _D_SEND_TAG = (
    int(Doing.SENDS),
    int(Doing.SEND_PEER),
    int(Doing.SEND_TAG),
)
_MOST_PARTS = 8
_TRIES = 100


@inline
def lock(table):
    """Take the table's lock; a thread that holds it waits for nothing."""
    tries = 0
    while not try_lock(table):
        tries += 1
        if tries < _TRIES:
            pause()
        else:
            yield_once()


@inline
def _is_dead(table):
    """Return whether nothing may be touched any more; once true, it stays true."""
    if get(table, IS_DEAD) == 0 and is_aborted(get(table, CONTEXT)):
        put(table, IS_DEAD, 1)
    return get(table, IS_DEAD) != 0


@inline
def _send_on(table, row):
    """Advance a send as far as there is room; return how it went."""
    went = send_step(table, row)
    if went != MOVED:
        return went
    for _ in range(_MOST_PARTS):
        went = send_step(table, row)
        if went == OVER:
            return OVER
        if went == STAYED:
            return MOVED
    return MOVED


@inline
def _step_row(table, row, turn):
    """Advance a send, or a receive that fetches, by a step; return how it went.

    Of the sends to one rank, only the first that is not yet in the mailbox may advance.
    """
    if get(row, KIND) != SEND:
        return fetch_step(table, row)
    words = mailbox_words(table, get(row, PEER))
    if not is_posted(row) and get(words, OUT_TURN) == turn:
        return STAYED
    went = _send_on(table, row)
    if went != OVER and not is_posted(row):
        put(words, OUT_TURN, turn)
    return went


@inline
def _step_rows(table):
    """Advance all rows that need no record from others; return how many moved."""
    turn = get(table, TURN) + 1
    put(table, TURN, turn)
    moved, before, row = 0, 0, get(table, FIRST)
    while row != 0:
        after = get(row, NEXT)
        went = _step_row(table, row, turn)
        if went != STAYED:
            moved += 1
        if went == OVER:
            remove(table, FIRST, LAST, before, row, NEXT)
            finish(table, row, DONE)  # from here on the row belongs to its owner
        else:
            before = row
        row = after
    return moved


@inline
def _note_sends(table):
    """Report the first send that waits to the other ranks, which read it when a rank gives up."""
    row, noted = get(table, FIRST), 0
    if row != 0 and get(row, KIND) == SEND:
        noted = ((get(row, PEER) + 1) << 32) | get(row, TAG)
    if noted == get(table, NOTED):
        return  # others read that cache line whenever they wake this rank
    put(table, NOTED, noted)
    context = get(table, CONTEXT)
    doing = get(context, _BELLS) + get(context, RANK) * LINE + _DOING
    put(doing, _D_SENDS, 1 if noted else 0)
    put(doing, _D_SEND_PEER, (noted >> 32) - 1)
    put(doing, _D_SEND_TAG, noted & 0xFFFFFFFF)


@inline
def _step(table):
    moved = 0
    if get(table, FIRST) != 0:
        moved += _step_rows(table)
    if get(table, N_WANTED) != 0:
        moved += receive_all(table)
    if moved:
        put(table, MOVES, get(table, MOVES) + 1)


@inline
def _post(table, row):
    if get(row, KIND) != SEND:
        post_receive(table, row)
        return
    words = mailbox_words(table, get(row, PEER))
    put(row, IS_WAITING, 1)
    put(row, DONE_BYTES, 0)
    put(row, ACKNOWLEDGEMENT, 0)
    put(words, OUT_WAITING, get(words, OUT_WAITING) + 1)
    went = STAYED
    if get(words, OUT_WAITING) == 1:
        went = _send_on(table, row)
    if went == OVER:
        finish(table, row, DONE)
    else:
        append(table, FIRST, LAST, row, NEXT)


@compiled
def message_step(table):
    """Advance all pending messages by a step; return how many are pending.

    Does nothing if another thread is doing it.
    """
    if not try_lock(table):
        return load64_acquire(table + 8 * PENDING)
    finished = get(table, FINISHED)
    if not _is_dead(table):
        _step(table)
        _note_sends(table)
    pending, has_finished = get(table, PENDING), get(table, FINISHED) != finished
    unlock(table)
    if has_finished:  # another thread may be asleep until one of them is over
        context = get(table, CONTEXT)
        ring_bell(context, get(context, RANK))
    return pending


@compiled
def message_post(table, rows, count):
    """Start sends, receives and probes, after all others; return whether they were started.

    Whatever can be done immediately is done. No other thread's requests come between them.
    """
    lock(table)
    is_dead, mine = _is_dead(table), 0
    finished = get(table, FINISHED)
    if not is_dead:
        put(table, PENDING, get(table, PENDING) + count)
        for place in range(count):
            row = rows + place * ROW_BYTES
            put(row, STATE, WAITING)
            _post(table, row)
        _note_sends(table)
    others = get(table, FINISHED) - finished
    unlock(table)
    for place in range(count):
        mine += 1 if state_of(rows + place * ROW_BYTES) >= DONE else 0
    if others > mine:
        context = get(table, CONTEXT)
        ring_bell(context, get(context, RANK))
    return 0 if is_dead else 1


@inline
def _drop_from(table, first, last, row):
    """Remove a row from a list if it is there; return whether it was."""
    before, found = 0, get(table, first)
    while found != 0 and found != row:
        before, found = found, get(found, NEXT)
    if found != 0:
        remove(table, first, last, before, row, NEXT)
    return found != 0


@inline
def drop(table, row):
    """Remove a row if nothing has begun to move it; return whether that was possible."""
    if get(row, KIND) == SEND:
        if not get(row, IS_WAITING) or not _drop_from(table, FIRST, LAST, row):
            return False
        words = mailbox_words(table, get(row, PEER))
        put(words, OUT_WAITING, get(words, OUT_WAITING) - 1)
        note_room(table, row)
        return True
    if not _drop_from(table, FIRST_POSTED, LAST_POSTED, row):
        return False
    want(table, get(row, PEER), -1)
    return True


@compiled
def message_drop(table, row):
    """Withdraw a row; return 1, or 0 if another rank may see it, or row or table is over."""
    lock(table)
    is_dropped = not _is_dead(table) and state_of(row) < DONE and drop(table, row)
    if is_dropped:
        finish(table, row, DROPPED)
    unlock(table)
    return 1 if is_dropped else 0


@compiled
def message_refuse(table):
    """Drop the send for which there is no memory; return 1, or 0 if there is no such send."""
    lock(table)
    row = get(table, NEEDS_ROOM)
    put(table, NEEDS_ROOM, 0)
    is_dropped = row != 0 and not _is_dead(table) and drop(table, row)
    if is_dropped:
        finish(table, row, DROPPED)
    unlock(table)
    if is_dropped:  # the thread that waits for it may be asleep
        context = get(table, CONTEXT)
        ring_bell(context, get(context, RANK))
    return 1 if is_dropped else 0


@compiled
def message_end(table):
    """Make sure that no thread touches anything from here on; return how many rows were pending."""
    lock(table)
    put(table, IS_DEAD, 1)
    pending = get(table, PENDING)
    unlock(table)
    return pending


@compiled
def message_put_back(table, held):
    """Release a message reserved for a receive: others can receive it, before later messages."""
    lock(table)
    if get(held, H_WAY) == POSTED:
        put(held, H_ACKNOWLEDGEMENT, 0)
    put(held, H_OWNER, 0)
    put(held, H_COST, 0)
    put(held, H_NEXT, get(table, FIRST_HELD))
    if get(table, FIRST_HELD) == 0:
        put(table, LAST_HELD, held)
    put(table, FIRST_HELD, held)
    unlock(table)
    return 1


@compiled
def message_release(table):
    """Free messages that nobody received; the table is at its end."""
    world_size = get(get(table, CONTEXT), WORLD_SIZE)
    for rank in range(world_size):
        words = mailbox_words(table, rank)
        target = get(words, IN_TARGET)
        if target != 0 and get(words, IN_TARGET_IS_HELD) != 0 and get(target, H_OWNER) != 0:
            release(target)  # the other messages are in the list
        put(words, IN_TARGET, 0)
    count, held = 0, get(table, FIRST_HELD)
    put(table, FIRST_HELD, 0)
    while held != 0:
        after = get(held, H_NEXT)
        release(held)
        count, held = count + 1, after
    return count
