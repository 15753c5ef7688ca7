"""Mailboxes: a ring of posts for each pair of ranks, written by one and taken by the other.

A message begins with an envelope. Its data is in it if it is very small, follows in the same post
and, if it is longer, in the next ones; or the envelope says where the receiver finds it, in the
sender's arena or process, and the sender waits until the post is taken. Whoever changes a mailbox
rings the other's bell, which costs a system call only where that one sleeps.
"""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import (
    call_copy,
    exchange64,
    get,
    load64,
    load64_acquire,
    put,
    store64,
    take_line,
)
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import ring
from gpucoll.transport.shared.layout import Envelope, Way
from gpucoll.transport.shared.steps import LINE, RANK, WORLD_SIZE
from gpucoll.transport.shared.words import Context, Transfer

POSTS, ENVELOPE_BYTES = layout.POSTS, layout.ENVELOPE_BYTES
MAILBOX_HEAD, MAILBOX_TAIL = layout.MAILBOX_HEAD, layout.MAILBOX_TAIL
MAILBOX_POSTS, _KNOWN_TAIL = layout.MAILBOX_POSTS, layout.MAILBOX_KNOWN_TAIL
EAGER_BYTES, POST_BYTES = int(Context.EAGER_BYTES), int(Context.POST_BYTES)
_MAILBOXES, _MAILBOX_STRIDE = int(Context.MAILBOXES), int(Context.MAILBOX_STRIDE)
_BELLS, _COPY_PLAIN = int(Context.BELLS), int(Context.COPY_PLAIN)
_COPY_POSTED, _PREFETCH_BYTES = int(Context.COPY_POSTED), int(Context.PREFETCH_BYTES)

E_SIZE_BYTES, E_TAG, E_DTYPE = int(Envelope.SIZE_BYTES), int(Envelope.TAG), int(Envelope.DTYPE)
E_WAY, E_PLACE = int(Envelope.WAY), int(Envelope.PLACE)
_E_NUMBER, _SMALLEST_BYTES = int(Envelope.NUMBER), layout.SMALLEST_BYTES
_E_DIMENSIONS, _T_DIMENSIONS = int(Envelope.DIMENSIONS), int(Transfer.DIMENSIONS)
POSTED, IN_ARENA, IN_PROCESS = int(Way.POSTED), int(Way.IN_ARENA), int(Way.IN_PROCESS)
N_DIMENSIONS = layout.MESSAGE_DIMENSIONS
_TAKEN_BYTES, _LINE_BYTES = 4096, 64
"""So much of the next post is taken; with 8 KiB nothing more was gained."""


@inline
def mailbox_of(context, receiver, sender):
    """Return the address of the mailbox between two ranks."""
    place = receiver * get(context, WORLD_SIZE) + sender
    return get(context, _MAILBOXES) + place * get(context, _MAILBOX_STRIDE)


@inline
def post_at(context, mailbox, number):
    """Return the address of a post by its running number."""
    size_bytes = ENVELOPE_BYTES + get(context, POST_BYTES)
    return mailbox + MAILBOX_POSTS + (number & (POSTS - 1)) * size_bytes


@inline
def head_of(mailbox):
    """Return how many posts have been written; for the sender."""
    return load64(mailbox + MAILBOX_HEAD)


@inline
def is_full(mailbox):
    """Return whether no post is free; the sender looks at the receiver's line only if need be."""
    head = head_of(mailbox)
    if head - load64(mailbox + _KNOWN_TAIL) < POSTS:
        return False
    store64(mailbox + _KNOWN_TAIL, tail_of(mailbox))
    return head - load64(mailbox + _KNOWN_TAIL) >= POSTS


@inline
def is_written(context, mailbox, number):
    """Return whether the post that is taken next has been written; for the receiver."""
    return load64_acquire(post_at(context, mailbox, number) + 8 * _E_NUMBER) == number + 1


@inline
def data_of(post, size_bytes):
    """Return where the data of a message of this size lies in its posts."""
    if size_bytes <= _SMALLEST_BYTES:
        return post + 8 * E_PLACE
    return post + ENVELOPE_BYTES


@inline
def tail_of(mailbox):
    """Return how many posts have been taken."""
    return load64_acquire(mailbox + MAILBOX_TAIL)


@inline
def ring_bell(context, rank):
    """Wake a rank that sleeps until one of its mailboxes changes."""
    ring(get(context, _BELLS) + rank * LINE)


@inline
def advance_head(context, mailbox, receiver, size_bytes):
    """Give one more post to the receiver; begin to take the lines of the next, which it has read.

    Those that a message of this size would use.
    """
    number = head_of(mailbox) + 1
    store64(mailbox + MAILBOX_HEAD, number)
    exchange64(post_at(context, mailbox, number - 1) + 8 * _E_NUMBER, number)
    ring_bell(context, receiver)
    following = post_at(context, mailbox, number)
    take_line(following)
    if size_bytes > _SMALLEST_BYTES:
        for line in range(0, min(size_bytes, _TAKEN_BYTES), _LINE_BYTES):
            take_line(following + ENVELOPE_BYTES + line)


@inline
def advance_tail(context, mailbox, sender):
    """Give one more post back to the sender."""
    exchange64(mailbox + MAILBOX_TAIL, load64(mailbox + MAILBOX_TAIL) + 1)
    ring_bell(context, sender)


@inline
def write_shape(envelope, transfer):
    """Copy the shape of a transfer into an envelope."""
    n_dimensions = get(transfer, _T_DIMENSIONS)
    put(envelope, _E_DIMENSIONS, n_dimensions)
    for place in range(1, min(n_dimensions, N_DIMENSIONS) + 1):
        put(envelope, _E_DIMENSIONS + place, get(transfer, _T_DIMENSIONS + place))


@inline
def read_shape(transfer, envelope):
    """Copy the shape in an envelope into a transfer."""
    n_dimensions = get(envelope, _E_DIMENSIONS)
    put(transfer, _T_DIMENSIONS, n_dimensions)
    for place in range(1, min(n_dimensions, N_DIMENSIONS) + 1):
        put(transfer, _T_DIMENSIONS + place, get(envelope, _E_DIMENSIONS + place))


@inline
def copy(context, destination, source, size_bytes):
    """Copy between private memory and a post, or out of an arena."""
    call_copy(get(context, _COPY_PLAIN), destination, source, size_bytes, 0)


@inline
def copy_posted(context, destination, source, size_bytes):
    """Copy to a post, taking its lines back from whoever read them."""
    ahead = get(context, _PREFETCH_BYTES)
    call_copy(get(context, _COPY_POSTED), destination, source, size_bytes, ahead)


@inline
def incoming(context, sender):
    """Return this rank's mailbox for messages of `sender`."""
    return mailbox_of(context, get(context, RANK), sender)


@inline
def outgoing(context, receiver):
    """Return the mailbox of `receiver` for messages of this rank."""
    return mailbox_of(context, receiver, get(context, RANK))
