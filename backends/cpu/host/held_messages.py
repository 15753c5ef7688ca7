"""Messages that were taken out of the mailbox before a receive asked for them.

A message is held aside if a receive waits for a later message of the same sender. A message that is
received without giving size and dtype is also held: it is received in two steps. Compiled code
allocates and frees the memory through the C library.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.mailboxes import (
    E_DTYPE,
    E_FIRST_LENGTH,
    E_PLACE,
    E_SIZE_BYTES,
    E_TAG,
    ENVELOPE_BYTES,
    MANY_DIMENSIONS,
    POSTED,
    SHAPE_BYTES,
    acknowledgement_of,
    description_bytes_of,
    dimensions_of,
    extra_bytes,
    mode_of,
    record_bytes,
    way_of,
)
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.memory import get, put
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.words import HELD_WORDS, Held

H_NEXT, H_SENDER, H_TAG = int(Held.NEXT), int(Held.SENDER), int(Held.TAG)
H_SIZE_BYTES, H_DTYPE, H_WAY = int(Held.SIZE_BYTES), int(Held.DTYPE), int(Held.WAY)
H_PLACE, H_ACKNOWLEDGEMENT = int(Held.PLACE), int(Held.ACKNOWLEDGEMENT)
H_MODE, H_NUMBER, H_COST = int(Held.MODE), int(Held.NUMBER), int(Held.COST)
H_DONE_BYTES, H_IS_WHOLE = int(Held.DONE_BYTES), int(Held.IS_WHOLE)
H_DESCRIPTION_BYTES, H_DATA = int(Held.DESCRIPTION_BYTES), int(Held.DATA)
H_DIMENSIONS, H_DIMENSION = int(Held.DIMENSIONS), int(Held.DIMENSION)
H_OWNER = int(Held.OWNER)
_MOST_SHOWN = layout.MESSAGE_DIMENSIONS

_i64 = types.int64
_malloc = types.ExternalFunction("malloc", _i64(_i64))
release = types.ExternalFunction("free", types.void(_i64))


@inline
def copy_shape(record, target, dimensions_field):
    """Write the shape of a message into a row or a held message."""
    dimensions = dimensions_of(record)
    put(target, dimensions_field, dimensions)
    first = E_PLACE if way_of(record) == POSTED else E_FIRST_LENGTH
    put(target, dimensions_field + 1, get(record, first))
    if dimensions > 1 and dimensions < MANY_DIMENSIONS:
        for place in range(_MOST_SHOWN):
            length = get(record + ENVELOPE_BYTES, place)
            put(target, dimensions_field + 1 + place, length)


@inline
def message_extra(record):
    """Return the size of shape and description that follow a message's envelope."""
    return extra_bytes(dimensions_of(record), description_bytes_of(record))


@inline
def message_record_bytes(record):
    """Return the size of a message's first record."""
    extra = message_extra(record)
    if way_of(record) != POSTED:
        return ENVELOPE_BYTES + extra
    return record_bytes(extra, min(get(record, E_SIZE_BYTES), layout.POST_BYTES))


@inline
def new_held(record, sender):
    """Return a new held message, without its data, for one in a mailbox; 0: no memory."""
    description_bytes = description_bytes_of(record)
    padded = (description_bytes + 7) & -8
    data_bytes = get(record, E_SIZE_BYTES) if way_of(record) == POSTED else 0
    held = _malloc(8 * HELD_WORDS + padded + max(data_bytes, 1))
    if held == 0:
        return held
    put(held, H_NEXT, 0)
    put(held, H_SENDER, sender)
    put(held, H_TAG, get(record, E_TAG))
    put(held, H_SIZE_BYTES, get(record, E_SIZE_BYTES))
    put(held, H_DTYPE, get(record, E_DTYPE))
    put(held, H_WAY, way_of(record))
    put(held, H_PLACE, get(record, E_PLACE))
    put(held, H_ACKNOWLEDGEMENT, acknowledgement_of(record))
    put(held, H_MODE, mode_of(record))
    put(held, H_NUMBER, get(record, 0))
    put(held, H_COST, message_record_bytes(record))
    put(held, H_DONE_BYTES, 0)
    put(held, H_IS_WHOLE, 0)
    put(held, H_DESCRIPTION_BYTES, description_bytes)
    put(held, H_DATA, held + 8 * HELD_WORDS + padded)
    put(held, H_OWNER, 0)
    copy_shape(record, held, H_DIMENSIONS)
    source = record + ENVELOPE_BYTES + SHAPE_BYTES
    for place in range(padded >> 3):
        put(held + 8 * HELD_WORDS, place, get(source, place))
    return held
