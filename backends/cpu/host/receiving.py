"""What a receive or a probe does next: the message that it asks for, and which nobody does."""

from __future__ import annotations

from gpucoll.backends.cpu.host.mailboxes import (
    E_DTYPE,
    E_PLACE,
    E_SIZE_BYTES,
    E_TAG,
    E_WAY,
    IN_ARENA,
    POST_BYTES,
    POSTED,
    advance_tail,
    copy,
    data_of,
    incoming,
    is_written,
    post_at,
    read_shape,
    tail_of,
)
from gpucoll.backends.cpu.host.single_copy import SLICE_BYTES, read_from
from gpucoll.backends.cpu.host.transfers import (
    ADDRESS,
    ANY,
    DONE,
    DONE_BYTES,
    DTYPE,
    FOUND_PEER,
    FOUND_TAG,
    KEPT_ASIDE,
    KIND,
    LAST_SENDER,
    MISFIT,
    PEER,
    POST,
    PROBE,
    RECV,
    SEND,
    SIZE_BYTES,
    STATE,
    TAG,
    UNDER_WAY,
    WAITING,
    row_of,
)
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import get, put
from gpucoll.transport.shared.flags import is_aborted, is_aborted_since
from gpucoll.transport.shared.peer_arena import reach
from gpucoll.transport.shared.steps import OK, WORLD_SIZE
from gpucoll.transport.shared.words import Status

_EVENT, _LOST = int(Status.EVENT), int(Status.LOST)


@inline
def _is_being_taken(table, count, sender):
    """Return whether a receive is in the middle of a message of this sender.

    One that is taken aside counts until Python knows of it: later receives may ask for it.
    """
    for place in range(count):
        row = row_of(table, place)
        if get(row, KIND) == RECV and get(row, FOUND_PEER) == sender:
            state, is_aside = get(row, STATE), get(row, POST) == KEPT_ASIDE
            if state == UNDER_WAY or (is_aside and state == DONE):
                return True
    return False


@inline
def _asks_for(row, sender, tag):
    wants_sender = get(row, PEER) == ANY or get(row, PEER) == sender
    return wants_sender and (get(row, TAG) == ANY or get(row, TAG) == tag)


@inline
def _is_first(table, place, sender, tag):
    """Return whether no earlier operation asks for this message, which may have come just now."""
    for before in range(place):
        row = row_of(table, before)
        if get(row, KIND) != SEND and get(row, STATE) == WAITING and _asks_for(row, sender, tag):
            return False
    return True


@inline
def _take_part(context, row, mailbox, number):
    """Copy a post's data to its place, and give the post back."""
    done = get(row, DONE_BYTES)
    part_bytes = min(get(context, POST_BYTES), get(row, SIZE_BYTES) - done)
    place = data_of(post_at(context, mailbox, number), get(row, SIZE_BYTES))
    copy(context, get(row, ADDRESS) + done, place, part_bytes)
    put(row, DONE_BYTES, done + part_bytes)
    # First the state: `MessageTable.look` must not take the next post for a message's beginning.
    put(row, STATE, DONE if done + part_bytes >= get(row, SIZE_BYTES) else UNDER_WAY)
    advance_tail(context, mailbox, get(row, FOUND_PEER))


@inline
def _fetch(context, row, mailbox, post):
    """Copy a message from the sender's arena or process; return a status."""
    sender, size_bytes, status = get(row, FOUND_PEER), get(row, SIZE_BYTES), OK
    place = get(post, E_PLACE)
    if get(post, E_WAY) == IN_ARENA:
        arena = reach(context, sender, place + size_bytes)
        if arena == 0:
            return _EVENT
        copy(context, get(row, ADDRESS), arena + place, size_bytes)
    else:
        done = 0
        while done < size_bytes and status != _LOST and not is_aborted(context):
            step = min(SLICE_BYTES, size_bytes - done)  # a mismatch ends no message: see `_answer`
            status = read_from(context, sender, get(row, ADDRESS) + done, place + done, step)
            done += step
    if status != _LOST:
        status = (
            _EVENT if is_aborted_since(context) else OK
        )  # what was read may be anything by then
    if status == OK:
        advance_tail(context, mailbox, sender)
        put(row, STATE, DONE)
    return status


@inline
def _match(context, row, sender, mailbox, number):
    """Give the message at the head of a mailbox to a receive or probe; return a status."""
    post = post_at(context, mailbox, number)
    put(row, FOUND_PEER, sender)
    put(row, FOUND_TAG, get(post, E_TAG))
    fits = get(row, SIZE_BYTES) == get(post, E_SIZE_BYTES) and get(row, DTYPE) == get(post, E_DTYPE)
    if get(row, KIND) == PROBE or not fits:
        put(row, STATE, DONE if get(row, KIND) == PROBE else MISFIT)
        put(row, SIZE_BYTES, get(post, E_SIZE_BYTES))
        put(row, DTYPE, get(post, E_DTYPE))
        read_shape(row, post)
        return OK
    put(context, LAST_SENDER, sender)
    if get(post, E_WAY) != POSTED:
        return _fetch(context, row, mailbox, post)
    _take_part(context, row, mailbox, number)
    return OK


@inline
def receive_step(context, table, count, place):
    """Take a receive or probe one step further; return 1 if it moved, 0 if not, -status."""
    row = row_of(table, place)
    if get(row, STATE) == UNDER_WAY:
        mailbox = incoming(context, get(row, FOUND_PEER))
        number = tail_of(mailbox)
        if not is_written(context, mailbox, number):
            return 0
        _take_part(context, row, mailbox, number)
        return 1
    first = get(row, PEER)
    n_senders = 1 if first != ANY else get(context, WORLD_SIZE)
    for step in range(n_senders):
        sender = first if first != ANY else (get(context, LAST_SENDER) + 1 + step) % n_senders
        mailbox = incoming(context, sender)
        number = tail_of(mailbox)
        if not is_written(context, mailbox, number) or _is_being_taken(table, count, sender):
            continue
        tag = get(post_at(context, mailbox, number), E_TAG)
        if _asks_for(row, sender, tag) and _is_first(table, place, sender, tag):
            status = _match(context, row, sender, mailbox, number)
            return 1 if status == OK else -status
    return 0


@inline
def unwanted_sender(context, table, count):
    """Return a rank whose next message nobody asks for, while somebody waits for it; or -1."""
    for sender in range(get(context, WORLD_SIZE)):
        mailbox = incoming(context, sender)
        number = tail_of(mailbox)
        if not is_written(context, mailbox, number) or _is_being_taken(table, count, sender):
            continue
        tag = get(post_at(context, mailbox, number), E_TAG)
        is_waited_for = is_wanted = False
        for place in range(count):
            row = row_of(table, place)
            if get(row, KIND) != SEND and get(row, STATE) == WAITING:
                if get(row, PEER) == ANY or get(row, PEER) == sender:
                    is_waited_for = True
                if _asks_for(row, sender, tag):
                    is_wanted = True
        if is_waited_for and not is_wanted:
            return sender
    return -1
