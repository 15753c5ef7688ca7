"""Matching: a receive or a probe gets the first message that fits it, in the order sent.

A message goes to the first posted receive that it matches. A message without such a receive stays
in the mailbox, unless a receive waits for a later one: then it is held aside.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.held_messages import (
    H_ACKNOWLEDGEMENT,
    H_COST,
    H_DATA,
    H_DESCRIPTION_BYTES,
    H_DIMENSIONS,
    H_DONE_BYTES,
    H_DTYPE,
    H_IS_WHOLE,
    H_MODE,
    H_NEXT,
    H_NUMBER,
    H_OWNER,
    H_PLACE,
    H_SENDER,
    H_SIZE_BYTES,
    H_TAG,
    H_WAY,
    copy_shape,
    message_extra,
    message_record_bytes,
    new_held,
    release,
)
from gpucoll.backends.cpu.host.mailboxes import (
    E_DTYPE,
    E_PLACE,
    E_SIZE_BYTES,
    E_TAG,
    ENVELOPE_BYTES,
    IN_ARENA,
    IN_NUMBER,
    IN_TARGET,
    IN_TARGET_IS_HELD,
    IN_WANTED,
    ON_ANOTHER_HOST,
    POST_BYTES,
    POSTED,
    SHAPE_BYTES,
    acknowledgement_of,
    copy,
    data_place,
    description_bytes_of,
    give_back,
    mailbox_words,
    mode_of,
    note_matched,
    record_bytes,
    ring_bell,
    way_of,
    written_record,
)
from gpucoll.backends.cpu.host.sending import MOVED, OVER, STAYED, acknowledgement_word
from gpucoll.backends.cpu.host.transfers import (
    ACKNOWLEDGEMENT,
    ADDRESS,
    ANY,
    CALLS,
    CONTEXT,
    DESCRIPTION,
    DESCRIPTION_BYTES,
    DIMENSIONS,
    DONE,
    DONE_BYTES,
    DTYPE,
    FETCH,
    FIRST,
    FIRST_HELD,
    FIRST_POSTED,
    FOLLOWS,
    FOUND_BYTES,
    FOUND_DTYPE,
    FOUND_NUMBER,
    FOUND_PEER,
    FOUND_TAG,
    GONE,
    HELD,
    KIND,
    LAST,
    LAST_HELD,
    LAST_POSTED,
    LAST_SENDER,
    MISFIT,
    N_ANY,
    N_WANTED,
    NEXT,
    NUMBER,
    PEER,
    PLACE,
    PROBE,
    RECV,
    SIZE_BYTES,
    STATE,
    TAG,
    TAKE,
    UNDER_WAY,
    WAY,
    append,
    finish,
    remove,
)
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_loop, exchange64, get, put
from gpucoll.transport.shared.flags import copy_from_process, give_up, is_aborted_since
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.peer_arena import reach
from gpucoll.transport.shared.steps import RANK, SEQUENCE, WORLD_SIZE
from gpucoll.transport.shared.words import HELD_WORDS, Context

_PIDS, _ABORT_UNREADABLE = int(Context.PIDS), int(Abort.UNREADABLE)
_FETCHED_BYTES = 1 << 20
"""How much one step fetches: another thread may need the table meanwhile."""
_MOST_RECORDS = 64
"""How many records of one rank one step takes."""


# --- pending receives and probes ------------------------------------------------------------------


@inline
def want(table, peer, change):
    """Change the count of receives and probes for which a rank's mailbox may have a message."""
    put(table, N_WANTED, get(table, N_WANTED) + change)
    if peer == ANY:
        put(table, N_ANY, get(table, N_ANY) + change)
        return
    words = mailbox_words(table, peer)
    put(words, IN_WANTED, get(words, IN_WANTED) + change)


@inline
def _asks_for(row, sender, tag, number, mode):
    """Return whether a receive or probe matches a message."""
    if get(row, PEER) != ANY and get(row, PEER) != sender:
        return False
    if get(row, NUMBER) != 0:
        return get(row, NUMBER) == number
    if mode & FOLLOWS:
        return False
    return get(row, TAG) == ANY or get(row, TAG) == tag


@inline
def _first_posted(table, sender, tag, number, mode):
    """Return the first receive or probe that matches a message, and the row before it."""
    before, row = 0, get(table, FIRST_POSTED)
    while row != 0:
        if _asks_for(row, sender, tag, number, mode):
            break
        before, row = row, get(row, NEXT)
    return row, before


@inline
def _first_held(table, row):
    """Return the first held message that matches a row, and the one before it."""
    before, held = 0, get(table, FIRST_HELD)
    while held != 0:
        sender, number = get(held, H_SENDER), get(held, H_NUMBER)
        if _asks_for(row, sender, get(held, H_TAG), number, get(held, H_MODE)):
            break
        before, held = held, get(held, H_NEXT)
    return held, before


@inline
def _unpost(table, row, before):
    remove(table, FIRST_POSTED, LAST_POSTED, before, row, NEXT)
    want(table, get(row, PEER), -1)


# --- fetching -------------------------------------------------------------------------------------


@inline
def acknowledge(table, sender, acknowledgement):
    """Tell the sender of a message that it was taken, if the sender waits for that."""
    if acknowledgement == 0:
        return
    context = get(table, CONTEXT)
    exchange64(acknowledgement_word(context, sender, acknowledgement), 1)
    ring_bell(context, sender)


@inline
def _ask_other_host(table, row):
    """Request a message's data, which then arrives without further steps; return how it went."""
    if get(row, PLACE) != 0:
        put(row, PLACE, 0)
        return call_loop(get(table, FETCH), table, row)
    return OVER if get(row, DONE_BYTES) == get(row, FOUND_BYTES) else STAYED


@inline
def fetch_step(table, row):
    """Copy a piece of a message from the sender's arena or process; return how it went."""
    context, sender, done = get(table, CONTEXT), get(row, FOUND_PEER), get(row, DONE_BYTES)
    step = min(_FETCHED_BYTES, get(row, FOUND_BYTES) - done)
    source, destination = get(row, PLACE) + done, get(row, ADDRESS) + done
    if get(row, WAY) == IN_ARENA:
        arena = reach(context, sender, source + step)
        if arena == 0:
            return STAYED
        copy(context, destination, arena + source, step)
    elif sender == get(context, RANK):
        copy(context, destination, source, step)
    elif get(row, WAY) == ON_ANOTHER_HOST:
        return _ask_other_host(table, row)
    else:
        pid = get(get(context, _PIDS), sender)
        if copy_from_process(context, pid, destination, source, step) != step:
            put(context, SEQUENCE, get(get(table, CALLS), SEQUENCE))
            give_up(context, _ABORT_UNREADABLE, sender)
    if is_aborted_since(context):
        return STAYED  # the data read may be invalid by then
    put(row, DONE_BYTES, done + step)
    if done + step < get(row, FOUND_BYTES):
        return MOVED
    acknowledge(table, sender, get(row, ACKNOWLEDGEMENT))
    return OVER


@inline
def _begin_to_fetch(table, row, way, place, acknowledgement):
    put(row, WAY, way)
    put(row, PLACE, place)
    put(row, ACKNOWLEDGEMENT, acknowledgement)
    put(row, DONE_BYTES, 0)
    put(row, STATE, UNDER_WAY)
    if fetch_step(table, row) == OVER:
        finish(table, row, DONE)
    else:
        append(table, FIRST, LAST, row, NEXT)


# --- out of the mailbox ---------------------------------------------------------------------------


@inline
def _describe_record(row, record, sender):
    put(row, FOUND_PEER, sender)
    put(row, FOUND_TAG, get(record, E_TAG))
    put(row, FOUND_BYTES, get(record, E_SIZE_BYTES))
    put(row, FOUND_DTYPE, get(record, E_DTYPE))
    put(row, FOUND_NUMBER, get(record, 0))
    copy_shape(record, row, DIMENSIONS)


@inline
def _copy_description(row, source, size_bytes):
    """Copy a message's description of its dtype for a probe, which has room for the longest."""
    put(row, DESCRIPTION_BYTES, size_bytes)
    for place in range((size_bytes + 7) >> 3):
        put(get(row, DESCRIPTION), place, get(source, place))


@inline
def _fits(row):
    return get(row, FOUND_BYTES) <= get(row, SIZE_BYTES) and get(row, FOUND_DTYPE) == get(
        row, DTYPE
    )


@inline
def _take_first_part(table, words, sender, record, destination):
    """Copy the data in a message's first record; return its size."""
    context, size_bytes = get(table, CONTEXT), get(record, E_SIZE_BYTES)
    part_bytes = min(size_bytes, POST_BYTES)
    if part_bytes:
        place = data_place(record, message_extra(record), size_bytes)
        copy(context, destination, place, part_bytes)
    return part_bytes


@inline
def _leave_mailbox(table, words, sender, record):
    """Return the place of a message's first record to the sender."""
    put(words, IN_NUMBER, get(record, 0))
    give_back(get(table, CONTEXT), words, sender, message_record_bytes(record))


@inline
def _await_parts(table, words, sender, target, is_held):
    """Note the row or held message that gets a rank's next records, and that it waits for them."""
    put(words, IN_TARGET, target)
    put(words, IN_TARGET_IS_HELD, is_held)
    want(table, sender, 1)


@inline
def _hold(table, words, sender, record, owner):
    """Take a message aside, for a receive or for a later one; return it, or 0."""
    held = new_held(record, sender)
    if held == 0:
        return held
    put(held, H_OWNER, owner)
    if owner == 0:
        append(table, FIRST_HELD, LAST_HELD, held, H_NEXT)
    done = get(record, E_SIZE_BYTES)
    if get(held, H_WAY) == POSTED:
        done = _take_first_part(table, words, sender, record, get(held, H_DATA))
    put(held, H_DONE_BYTES, done)
    is_whole = 1 if done == get(held, H_SIZE_BYTES) else 0
    put(held, H_IS_WHOLE, is_whole)
    _leave_mailbox(table, words, sender, record)
    if is_whole == 0:
        _await_parts(table, words, sender, held, 1)
    return held


@inline
def _take_into_row(table, words, sender, record, row):
    """Begin to receive a message that fits; its row is not in any list."""
    way, acknowledgement = way_of(record), acknowledgement_of(record)
    note_matched(words, message_record_bytes(record))
    if way != POSTED:
        place = get(record, E_PLACE)
        _leave_mailbox(table, words, sender, record)
        _begin_to_fetch(table, row, way, place, acknowledgement)
        return
    done = _take_first_part(table, words, sender, record, get(row, ADDRESS))
    put(row, DONE_BYTES, done)
    _leave_mailbox(table, words, sender, record)
    acknowledge(table, sender, acknowledgement)
    if done == get(row, FOUND_BYTES):
        finish(table, row, DONE)
    else:
        put(row, STATE, UNDER_WAY)
        _await_parts(table, words, sender, row, 0)


@inline
def _give_record(table, words, sender, record, row, before):
    """Give the first message of a mailbox to a row; return False if there was no memory."""
    _describe_record(row, record, sender)
    if get(row, KIND) == PROBE:
        _unpost(table, row, before)
        description = record + ENVELOPE_BYTES + SHAPE_BYTES
        _copy_description(row, description, description_bytes_of(record))
        finish(table, row, DONE)
        return True
    if get(row, KIND) == RECV and not _fits(row):
        _unpost(table, row, before)
        finish(table, row, MISFIT)
        return True
    put(table, LAST_SENDER, sender)
    if get(row, KIND) == RECV:
        _unpost(table, row, before)
        _take_into_row(table, words, sender, record, row)
        return True
    cost, way, acknowledgement = message_record_bytes(record), way_of(record), 0
    if way == POSTED:
        acknowledgement = acknowledgement_of(record)
    held = _hold(table, words, sender, record, row)
    if held == 0:
        return False
    _unpost(table, row, before)
    note_matched(words, cost)
    acknowledge(table, sender, acknowledgement)
    put(row, HELD, held)
    if get(held, H_IS_WHOLE):
        finish(table, row, DONE)
    else:
        put(row, STATE, UNDER_WAY)
    return True


@inline
def _take_part(table, words, sender, record):
    """Take one more part of the message under way."""
    target, is_held = get(words, IN_TARGET), get(words, IN_TARGET_IS_HELD)
    part_bytes, context = get(record, E_SIZE_BYTES), get(table, CONTEXT)
    done_field = H_DONE_BYTES if is_held else DONE_BYTES
    start = get(target, H_DATA) if is_held else get(target, ADDRESS)
    size_bytes = get(target, H_SIZE_BYTES) if is_held else get(target, FOUND_BYTES)
    done = get(target, done_field)
    copy(context, start + done, data_place(record, 0, part_bytes), part_bytes)
    put(target, done_field, done + part_bytes)
    give_back(context, words, sender, record_bytes(0, part_bytes))
    if done + part_bytes < size_bytes:
        return
    put(words, IN_TARGET, 0)
    want(table, sender, -1)
    if not is_held:
        finish(table, target, DONE)
        return
    put(target, H_IS_WHOLE, 1)
    owner = get(target, H_OWNER)
    if owner != 0:
        finish(table, owner, DONE)
        return
    row, before = _first_posted(
        table, sender, get(target, H_TAG), get(target, H_NUMBER), get(target, H_MODE)
    )
    if row != 0:
        _unpost(table, row, before)
        _, ahead = _first_held(table, row)
        _give_held(table, row, target, ahead)


@inline
def receive_from(table, sender):
    """Take a rank's records as far as receives need them; return how many were taken."""
    words = mailbox_words(table, sender)
    for count in range(_MOST_RECORDS):
        record = written_record(table, words, sender)
        if record == 0:
            return count
        if get(words, IN_TARGET) != 0:
            _take_part(table, words, sender, record)
            continue
        row, before = _first_posted(
            table, sender, get(record, E_TAG), get(record, 0), mode_of(record)
        )
        if row != 0:
            if not _give_record(table, words, sender, record, row, before):
                return count
            continue
        if get(words, IN_WANTED) == 0 and get(table, N_ANY) == 0:
            return count
        if _hold(table, words, sender, record, 0) == 0:
            return count
    return _MOST_RECORDS


# --- out of held messages -------------------------------------------------------------------------


@inline
def _describe_held(row, held):
    put(row, FOUND_PEER, get(held, H_SENDER))
    put(row, FOUND_TAG, get(held, H_TAG))
    put(row, FOUND_BYTES, get(held, H_SIZE_BYTES))
    put(row, FOUND_DTYPE, get(held, H_DTYPE))
    put(row, FOUND_NUMBER, get(held, H_NUMBER))
    for place in range(9):
        put(row, DIMENSIONS + place, get(held, H_DIMENSIONS + place))


@inline
def _claim(table, held, before):
    """Take a held message out of the list, unless it has an owner already."""
    if get(held, H_OWNER) != 0:
        return
    sender = get(held, H_SENDER)
    remove(table, FIRST_HELD, LAST_HELD, before, held, H_NEXT)
    if get(held, H_COST) != 0:  # it has not been taken and put back before
        note_matched(mailbox_words(table, sender), get(held, H_COST))
    if get(held, H_WAY) == POSTED:
        acknowledge(table, sender, get(held, H_ACKNOWLEDGEMENT))


@inline
def _give_held(table, row, held, before):
    """Give a held message to a row in no list; the message is whole, or the row is a probe."""
    _describe_held(row, held)
    if get(row, KIND) == PROBE:
        description = held + 8 * HELD_WORDS
        _copy_description(row, description, get(held, H_DESCRIPTION_BYTES))
        finish(table, row, DONE)
        return
    if get(row, KIND) == TAKE:
        _claim(table, held, before)
        put(held, H_OWNER, row)
        put(row, HELD, held)
        finish(table, row, DONE)
        return
    if not _fits(row):
        finish(table, row, MISFIT)
        return
    _claim(table, held, before)
    way, place, acknowledgement = (
        get(held, H_WAY),
        get(held, H_PLACE),
        get(held, H_ACKNOWLEDGEMENT),
    )
    if way == POSTED:
        copy(get(table, CONTEXT), get(row, ADDRESS), get(held, H_DATA), get(held, H_SIZE_BYTES))
    release(held)
    if way == POSTED:
        finish(table, row, DONE)
    else:
        _begin_to_fetch(table, row, way, place, acknowledgement)


@inline
def receive_all(table):
    """Check every mailbox that a receive or probe needs; return how many records were taken."""
    first = get(table, FIRST_POSTED)
    if get(table, N_WANTED) == 1 and first != 0 and get(first, PEER) != ANY:
        return receive_from(table, get(first, PEER))
    world_size, last, moved = get(get(table, CONTEXT), WORLD_SIZE), get(table, LAST_SENDER), 0
    for step in range(1, world_size + 1):
        sender = last + step
        if sender >= world_size:
            sender -= world_size
        if get(table, N_ANY) != 0 or get(mailbox_words(table, sender), IN_WANTED) != 0:
            moved += receive_from(table, sender)
    return moved


@inline
def post_receive(table, row):
    """Start a receive or probe, after all that were posted before."""
    if get(row, HELD) != 0:
        held = get(row, HELD)
        put(row, HELD, 0)
        _give_held(table, row, held, 0)
        return
    held, before = _first_held(table, row)
    if held != 0 and (get(held, H_IS_WHOLE) or get(row, KIND) == PROBE):
        _give_held(table, row, held, before)
        return
    number, peer = get(row, NUMBER), get(row, PEER)
    if held == 0 and number != 0 and number <= get(mailbox_words(table, peer), IN_NUMBER):
        finish(table, row, GONE)
        return
    append(table, FIRST_POSTED, LAST_POSTED, row, NEXT)
    want(table, peer, 1)
    if held == 0:
        receive_all(table)
