"""What the tests of messages share: sizes around every threshold, and the ways that data takes."""

from __future__ import annotations

import numpy as np

from gpucoll.backends.cpu.host.message_rows import held_words
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.layout import Envelope, Way
from gpucoll.transport.shared.words import Context, Held, TransferTable

WAYS = ("private", "streamed", "shared")
"""Read by the receiver; through the mailbox; in the arena."""


def members_of(comm):
    """Return what the ranks of this host share, on one host or on several."""
    return getattr(comm._group, "host", comm._group).members


def end_of(comm, rank):
    """Return how the table of messages counts a rank."""
    numbers = members_of(comm).job.numbers
    return numbers.index(rank) if numbers else rank


def eager_bytes(comm):
    """Return the largest size that a send does not wait with."""
    return members_of(comm).layout.eager_bytes


def sizes(comm):
    """Return sizes, in bytes, around those at which something changes."""
    eager, post = eager_bytes(comm), layout.POST_BYTES
    limits = (eager, post, members_of(comm).tuning.streamed_bytes)
    return [0, 1, 2, *(size + step for size in limits for step in (-1, 0, 1)), 3 * post, 1 << 20]


def choose_way(comm, way):
    """Make `way` hold for arrays of `place`; collective."""
    if way == "streamed":
        for rank in range(comm.world_size):
            members_of(comm).status_words(end_of(comm, rank))[layout.STATUS_COPIES // 8] = 0
    elif way == "private":  # on any processor
        comm._backend.messages._steps[Context.fetched_min_bytes] = 0
    comm.barrier()


def place(comm, way, shape, dtype):
    """Return an array where the way wants it."""
    return comm.empty(shape, dtype) if way == "shared" else np.empty(shape, dtype)


def pattern(size_bytes, seed):
    """Return bytes that tell where they belong."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


def posted(comm, receiver, sender):
    """Return how many messages a rank has begun to write for another, as long as they are few."""
    members, place = members_of(comm), members_of(comm).layout
    pair = end_of(comm, receiver) * comm.world_size + end_of(comm, sender)
    if not members.load(place.opened + 8 * pair):
        return 0
    mailbox = place.mailboxes + pair * place.mailbox_stride
    record, last = mailbox + layout.MAILBOX_SMALL, 0
    while number := members.load(record):
        packed = members.load(record + 8 * Envelope.packed)
        size_bytes = members.load(record + 8 * Envelope.size_bytes)
        way = packed & 0xFF
        if way == Way.TO_OTHER:
            record = mailbox + layout.MAILBOX_LARGE
            continue
        last = number
        posted_bytes = min(size_bytes, layout.POST_BYTES) if way in (Way.POSTED, Way.PART) else 0
        is_inside = posted_bytes <= layout.SMALLEST_BYTES
        record += layout.ENVELOPE_BYTES + (0 if is_inside else layout.round_up(posted_bytes, 64))
    return last


def held(comm):
    """Return how many messages this rank has taken aside."""
    words = comm._backend.messages._words
    count, message = 0, int(words[TransferTable.held])
    while message:
        count, message = count + 1, held_words(message)[Held.next]
    return count


def sleeps(comm, rank):
    """Return whether a rank sleeps until a message comes."""
    place = end_of(comm, rank)
    if place >= members_of(comm).world_size:
        return "waiting in" in comm._group.pairs.ask([rank], 5.0).get(rank, "")
    return members_of(comm).bell_words(place).view(np.int32)[1] > 0
