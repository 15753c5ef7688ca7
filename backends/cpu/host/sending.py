"""What a send does next: its message into posts, or where the receiver finds it."""

from __future__ import annotations

from gpucoll.backends.cpu.host.mailboxes import (
    E_DTYPE,
    E_PLACE,
    E_SIZE_BYTES,
    E_TAG,
    E_WAY,
    EAGER_BYTES,
    IN_ARENA,
    IN_PROCESS,
    POST_BYTES,
    POSTED,
    advance_head,
    copy_posted,
    data_of,
    head_of,
    is_full,
    outgoing,
    post_at,
    tail_of,
    write_shape,
)
from gpucoll.backends.cpu.host.single_copy import can_read
from gpucoll.backends.cpu.host.transfers import (
    ADDRESS,
    DONE,
    DONE_BYTES,
    DTYPE,
    KIND,
    PEER,
    POST,
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
from gpucoll.transport.shared.steps import NOT_SHARED, RANK, arena_offset
from gpucoll.transport.shared.words import Context

_SINGLE_COPY_MAX_BYTES = int(Context.SINGLE_COPY_MAX_BYTES)


@inline
def _may_start(table, place):
    """Return whether no earlier send to the same rank is unfinished: messages keep their order."""
    peer = get(row_of(table, place), PEER)
    for before in range(place):
        row = row_of(table, before)
        if get(row, KIND) == SEND and get(row, PEER) == peer and get(row, STATE) != DONE:
            return False
    return True


@inline
def _fill_post(context, row, post):
    """Put the next part of a message behind the envelope's place of a post."""
    done = get(row, DONE_BYTES)
    part_bytes = min(get(context, POST_BYTES), get(row, SIZE_BYTES) - done)
    place = data_of(post, get(row, SIZE_BYTES))
    copy_posted(context, place, get(row, ADDRESS) + done, part_bytes)
    put(row, DONE_BYTES, done + part_bytes)


@inline
def _is_fetched(context, row, is_alone):
    """Return whether the receiver reads the data straight from this process.

    Where each rank has a CPU, two processes stream what is very large faster than one copies it,
    if that is all they have to do: with messages both ways each copies one.
    """
    receiver, most_bytes = get(row, PEER), get(context, _SINGLE_COPY_MAX_BYTES)
    if receiver == get(context, RANK) or not can_read(context, receiver):
        return False
    return not is_alone or most_bytes == 0 or get(row, SIZE_BYTES) <= 2 * most_bytes


@inline
def _write_envelope(context, row, post, is_alone):
    """Write the envelope, and the data or where it is; return the way."""
    size_bytes = get(row, SIZE_BYTES)
    put(post, E_SIZE_BYTES, size_bytes)
    put(post, E_TAG, get(row, TAG))
    put(post, E_DTYPE, get(row, DTYPE))
    write_shape(post, row)
    way = POSTED
    if size_bytes > get(context, EAGER_BYTES):
        offset = arena_offset(context, get(row, ADDRESS), size_bytes)
        if offset != NOT_SHARED:
            way = IN_ARENA
            put(post, E_PLACE, offset)
        elif _is_fetched(context, row, is_alone):
            way = IN_PROCESS
            put(post, E_PLACE, get(row, ADDRESS))
    if way == POSTED:
        _fill_post(context, row, post)
    put(post, E_WAY, way)
    return way


@inline
def send_step(context, table, count, place):
    """Take a send one step further; return whether it moved."""
    row = row_of(table, place)
    mailbox = outgoing(context, get(row, PEER))
    if get(row, STATE) == UNDER_WAY and get(row, POST) >= 0:  # the receiver fetches it
        if tail_of(mailbox) <= get(row, POST):
            return False
        put(row, STATE, DONE)
        return True
    if get(row, STATE) == WAITING and not _may_start(table, place):
        return False
    if is_full(mailbox):
        return False
    head = head_of(mailbox)
    post = post_at(context, mailbox, head)
    if get(row, STATE) == WAITING:
        put(row, STATE, UNDER_WAY)
        way = _write_envelope(context, row, post, count == 1)
        put(row, POST, -1 if way == POSTED else head)
    else:
        _fill_post(context, row, post)
    advance_head(context, mailbox, get(row, PEER), get(row, SIZE_BYTES))
    if get(row, POST) < 0 and get(row, DONE_BYTES) >= get(row, SIZE_BYTES):
        put(row, STATE, DONE)
    return True
