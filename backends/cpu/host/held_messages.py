"""Messages that were taken out of the mailbox before a receive asked for them.

A message is held aside if a receive waits for a later message of the same sender. A message that is
received without giving size and dtype is also held: it is received in two steps. Compiled code
allocates and frees the memory through the C library.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.mailboxes import (
    ENVELOPE_BYTES,
    MANY_DIMENSIONS,
    SHAPE_BYTES,
    acknowledgement_of,
    description_bytes_of,
    dimensions_of,
    extra_bytes,
    mode_of,
    record_bytes,
    way_of,
)
from gpucoll.blocks import Words
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.layout import Envelope, Way
from gpucoll.transport.shared.words import Held, Transfer

_MOST_SHOWN = layout.MESSAGE_DIMENSIONS

_i64 = types.int64
_malloc = types.ExternalFunction("malloc", _i64(_i64))
release = types.ExternalFunction("free", types.void(_i64))


@inline
def copy_shape(record: Envelope, shape: Words) -> None:
    """Write the shape of a message into a row or a held message: dimensions, then lengths."""
    dimensions = dimensions_of(record)
    shape[0] = dimensions
    shape[1] = record.place if way_of(record) == Way.POSTED else record.first_length
    if dimensions > 1 and dimensions < MANY_DIMENSIONS:
        for place in range(_MOST_SHOWN):
            shape[1 + place] = Words(record.address + ENVELOPE_BYTES)[place]


@inline
def message_extra(record: Envelope) -> int:
    """Return the size of shape and description that follow a message's envelope."""
    return extra_bytes(dimensions_of(record), description_bytes_of(record))


@inline
def message_record_bytes(record: Envelope) -> int:
    """Return the size of a message's first record."""
    extra = message_extra(record)
    if way_of(record) != Way.POSTED:
        return ENVELOPE_BYTES + extra
    return record_bytes(extra, min(record.size_bytes, layout.POST_BYTES))


@inline
def new_held(record: Envelope, sender: int) -> Held:
    """Return a new held message, without its data, for one in a mailbox; 0: no memory."""
    description_bytes = description_bytes_of(record)
    padded = (description_bytes + 7) & -8
    data_bytes = record.size_bytes if way_of(record) == Way.POSTED else 0
    held = Held(_malloc(Held.n_bytes + padded + max(data_bytes, 1)))
    if not held:
        return held
    held.next = Held(0)
    held.sender = sender
    held.tag = record.tag
    held.size_bytes = record.size_bytes
    held.dtype = record.dtype
    held.way = way_of(record)
    held.place = record.place
    held.acknowledgement = acknowledgement_of(record)
    held.mode = mode_of(record)
    held.number = record.number
    held.cost = message_record_bytes(record)
    held.done_bytes = 0
    held.is_whole = 0
    held.description_bytes = description_bytes
    held.data = held.address + Held.n_bytes + padded
    held.owner = Transfer(0)
    copy_shape(record, Words(held.at.n_dimensions))
    source = Words(record.address + ENVELOPE_BYTES + SHAPE_BYTES)
    for place in range(padded >> 3):
        Words(held.address + Held.n_bytes)[place] = source[place]
    return held
