"""Steps of pending messages, made by any thread that starts one, waits for one, or has time.

A step never waits, and never takes the interpreter. A thread that waits for a message checks its
row, and sleeps on this rank's bell. When a row is over, the step of another thread rings that bell,
too.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.mailboxes import append, finish, remove, ring_bell, try_lock, unlock
from gpucoll.backends.cpu.host.receiving import fetch_step, post_receive, receive_all, want
from gpucoll.backends.cpu.host.sending import MOVED, OVER, STAYED, is_posted, note_room, send_step
from gpucoll.entries.messages import row_state
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import load64, load64_acquire, pause
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import is_aborted, yield_once
from gpucoll.transport.shared.layout import Doing, Way
from gpucoll.transport.shared.libc import free
from gpucoll.transport.shared.spans import time_if_watched
from gpucoll.transport.shared.steps import LINE
from gpucoll.transport.shared.words import Held, Kind, LinkedList, Progress, Transfer, TransferTable

_MOST_PARTS = 8
_TRIES = 100


@inline
def lock(table: TransferTable) -> None:
    """Take the table's lock; a thread that holds it waits for nothing."""
    tries = 0
    while not try_lock(table):
        tries += 1
        if tries < _TRIES:
            pause()
        else:
            yield_once()


@inline
def _is_dead(table: TransferTable) -> bool:
    """Return whether nothing may be touched any more; once true, it stays true."""
    if table.is_dead == 0 and is_aborted(table.context):
        table.is_dead = 1
    return table.is_dead != 0


@inline
def _send_on(table: TransferTable, row: Transfer) -> int:
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
def _step_row(table: TransferTable, row: Transfer, turn: int) -> int:
    """Advance a send, or a receive that fetches, by a step; return how it went.

    Of the sends to one rank, only the first that is not yet in the mailbox may advance.
    """
    if row.kind != Kind.SEND:
        return fetch_step(table, row)
    words = table.peers[row.peer]
    if not is_posted(row) and words.out_turn == turn:
        return STAYED
    went = _send_on(table, row)
    if went != OVER and not is_posted(row):
        words.out_turn = turn
    return went


@inline
def _step_rows(table: TransferTable) -> int:
    """Advance all rows that need no record from others; return how many moved."""
    turn = table.turn + 1
    table.turn = turn
    moved, before, row = 0, Transfer(0), Transfer(table.moving.first)
    while row:
        after = row.next
        went = _step_row(table, row, turn)
        if went != STAYED:
            moved += 1
        if went == OVER:
            remove(table.moving, before.address, row.address, Transfer.next)
            finish(table, row, Progress.DONE)  # from here on the row belongs to its owner
        else:
            before = row
        row = after
    return moved


@inline
def _note_sends(table: TransferTable) -> None:
    """Report the first send that waits to the other ranks, which read it when a rank gives up."""
    row, noted = Transfer(table.moving.first), 0
    if row and row.kind == Kind.SEND:
        noted = ((row.peer + 1) << 32) | row.tag
    if noted == table.noted:
        return  # others read that cache line whenever they wake this rank
    table.noted = noted
    context = table.context
    doing = Doing(context.bells + context.rank * LINE + layout.BELL_DOING)
    doing.sends = 1 if noted else 0
    doing.send_peer = (noted >> 32) - 1
    doing.send_tag = noted & 0xFFFFFFFF


@inline
def _step(table: TransferTable) -> None:
    moved = 0
    if table.moving.first != 0:
        moved += _step_rows(table)
    if table.n_wanted != 0:
        moved += receive_all(table)
    if moved:
        table.moves += 1


@inline
def _post(table: TransferTable, row: Transfer) -> None:
    if row.kind != Kind.SEND:
        post_receive(table, row)
        return
    words = table.peers[row.peer]
    row.is_waiting = 1
    row.done_bytes = 0
    row.acknowledgement = 0
    words.out_waiting += 1
    went = STAYED
    if words.out_waiting == 1:
        went = _send_on(table, row)
    if went == OVER:
        finish(table, row, Progress.DONE)
    else:
        append(table.moving, row.address, Transfer.next)


@compiled
def message_step(table: TransferTable) -> int:
    """Advance all pending messages by a step; return how many are pending.

    Does nothing if another thread is doing it.
    """
    if not try_lock(table):
        return load64_acquire(table.at.pending)
    finished = table.finished
    if not _is_dead(table):
        _step(table)
        _note_sends(table)
    pending, has_finished = table.pending, table.finished != finished
    unlock(table)
    if has_finished:  # another thread may be asleep until one of them is over
        context = table.context
        ring_bell(context, context.rank)
    return pending


@compiled
def message_post(table: TransferTable, rows: Transfer, count: int) -> int:
    """Start sends, receives and probes, after all others; return whether they were started.

    Whatever can be done immediately is done. No other thread's requests come between them.
    """
    lock(table)
    is_dead, mine = _is_dead(table), 0
    finished = table.finished
    if not is_dead:
        context, begun_ns = table.context, 0
        if load64(context.event_line + layout.EVENT_WATCHED) != 0:
            begun_ns = time_if_watched(context)
        table.pending += count
        for place in range(count):
            row = rows[place]
            row.state = Progress.WAITING
            row.begun_ns = begun_ns
            _post(table, row)
        _note_sends(table)
    others = table.finished - finished
    unlock(table)
    for place in range(count):
        mine += 1 if row_state(rows[place]) >= Progress.DONE else 0
    if others > mine:
        context = table.context
        ring_bell(context, context.rank)
    return 0 if is_dead else 1


@inline
def _drop_from(rows: LinkedList, row: Transfer) -> bool:
    """Remove a row from a list if it is there; return whether it was."""
    before, found = Transfer(0), Transfer(rows.first)
    while found and found.address != row.address:
        before, found = found, found.next
    if found:
        remove(rows, before.address, row.address, Transfer.next)
    return bool(found)


@inline
def drop(table: TransferTable, row: Transfer) -> bool:
    """Remove a row if nothing has begun to move it; return whether that was possible."""
    if row.kind == Kind.SEND:
        if not row.is_waiting or not _drop_from(table.moving, row):
            return False
        words = table.peers[row.peer]
        words.out_waiting -= 1
        note_room(table, row)
        return True
    if not _drop_from(table.posted, row):
        return False
    want(table, row.peer, -1)
    return True


@compiled
def message_drop(table: TransferTable, row: Transfer) -> int:
    """Withdraw a row; return 1, or 0 if another rank may see it, or row or table is over."""
    lock(table)
    is_dropped = not _is_dead(table) and row_state(row) < Progress.DONE and drop(table, row)
    if is_dropped:
        finish(table, row, Progress.DROPPED)
    unlock(table)
    return 1 if is_dropped else 0


@compiled
def message_refuse(table: TransferTable) -> int:
    """Drop the send for which there is no memory; return 1, or 0 if there is no such send."""
    lock(table)
    row = table.needs_room
    table.needs_room = Transfer(0)
    is_dropped = bool(row) and not _is_dead(table) and drop(table, row)
    if is_dropped:
        finish(table, row, Progress.DROPPED)
    unlock(table)
    if is_dropped:  # the thread that waits for it may be asleep
        context = table.context
        ring_bell(context, context.rank)
    return 1 if is_dropped else 0


@compiled
def message_end(table: TransferTable) -> int:
    """Make sure that no thread touches anything from here on; return how many rows were pending."""
    lock(table)
    table.is_dead = 1
    pending = table.pending
    unlock(table)
    return pending


@compiled
def message_put_back(table: TransferTable, held: Held) -> int:
    """Release a message reserved for a receive: others can receive it, before later messages."""
    lock(table)
    if held.way == Way.POSTED:
        held.acknowledgement = 0
    held.owner = Transfer(0)
    held.cost = 0
    held.next = Held(table.held.first)
    if table.held.first == 0:
        table.held.last = held.address
    table.held.first = held.address
    unlock(table)
    return 1


@compiled
def message_release(table: TransferTable) -> int:
    """Free messages that nobody received; the table is at its end."""
    world_size = table.context.world_size
    for rank in range(world_size):
        words = table.peers[rank]
        target = words.in_target
        if target != 0 and words.in_target_is_held != 0 and Held(target).owner:
            free(target)  # the other messages are in the list
        words.in_target = 0
    count, held = 0, Held(table.held.first)
    table.held.first = 0
    while held:
        after = held.next
        free(held)
        count, held = count + 1, after
    return count
