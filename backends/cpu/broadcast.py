"""broadcast within a host: through the root's slot, its arena, or its stages.

A small one is over for the root as soon as it has posted: readers may lag up to the ring's length.
A larger one begins when everyone has arrived, so that a mismatch is found before anything is
written, and ends for the root when everyone has read.
"""

from __future__ import annotations

from numba import types

from gpucoll.backends.cpu.staged import stage_of
from gpucoll.control.calls import (
    DESTINATION,
    EVENT,
    LINE,
    MISMATCH,
    NOT_SHARED,
    OK,
    PATH,
    RANK,
    ROOT,
    SEQUENCE,
    SIZE_BYTES,
    SOURCE,
    WORLD_SIZE,
    arena_of,
    arena_offset,
    begin,
    close_record,
    header_word,
    leave_unverified,
    payload_of,
    post,
    posted_source,
    signal_done,
    slot_of,
    wait_all_arrived,
    wait_all_done,
)
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import call_copy, get, put
from gpucoll.transport import layout
from gpucoll.transport.flags import event_pending, signal, wait, wait_header
from gpucoll.transport.layout import Context, Path

_ONE_SHOT_BYTES, _COPY_PLAIN = int(Context.ONE_SHOT_BYTES), int(Context.COPY_PLAIN)
_SYMMETRIC_MIN_BYTES = int(Context.SYMMETRIC_MIN_BYTES)
_CHUNK, _CHUNK_BYTES = int(Context.CHUNK), int(Context.CHUNK_BYTES)
_FILLED, _REDUCED = int(Context.FILLED), int(Context.REDUCED)
_ONE_SHOT, _STAGED, _SYMMETRIC = int(Path.ONE_SHOT), int(Path.STAGED), int(Path.SYMMETRIC)


@inline
def _copy(context, destination, source, size_bytes):
    if destination != source:
        call_copy(get(context, _COPY_PLAIN), destination, source, size_bytes, 0)


@inline
def _send_chunks(context, call):
    """Root: put chunk after chunk into my stages, as the readers free them."""
    me, world_size = get(context, RANK), get(context, WORLD_SIZE)
    chunk_bytes, first = get(context, _CHUNK_BYTES), get(context, _CHUNK)
    chunks = (get(call, SIZE_BYTES) + chunk_bytes - 1) // chunk_bytes
    for place in range(chunks + layout.STAGES):
        freed = place - layout.STAGES
        if freed >= 0:
            for step in range(1, world_size):
                rank = (me + step) % world_size
                address = get(context, _REDUCED) + rank * LINE
                status = wait(context, address, first + freed + 1, rank)
                if status != OK:
                    return status
        if place < chunks:
            offset = place * chunk_bytes
            size_bytes = min(chunk_bytes, get(call, SIZE_BYTES) - offset)
            stage = stage_of(context, first + place, me)
            _copy(context, stage, get(call, SOURCE) + offset, size_bytes)
            signal(get(context, _FILLED) + me * LINE, first + place + 1)
    return OK


@inline
def _receive_chunks(context, call):
    """Reader: copy chunk after chunk out of the root's stages."""
    me, root = get(context, RANK), get(call, ROOT)
    chunk_bytes, first = get(context, _CHUNK_BYTES), get(context, _CHUNK)
    chunks = (get(call, SIZE_BYTES) + chunk_bytes - 1) // chunk_bytes
    for place in range(chunks):
        address = get(context, _FILLED) + root * LINE
        status = wait(context, address, first + place + 1, root)
        if status != OK:
            return status
        offset = place * chunk_bytes
        size_bytes = min(chunk_bytes, get(call, SIZE_BYTES) - offset)
        stage = stage_of(context, first + place, root)
        _copy(context, get(call, DESTINATION) + offset, stage, size_bytes)
        signal(get(context, _REDUCED) + me * LINE, first + place + 1)
    return OK


@inline
def _advance_chunks(context, call, unused_lines, status):
    """Count this call's chunks; move my word that it did not use along with them.

    A root never sets its "reduced" word and a reader never its "filled" one. Left behind for 2**31
    chunks (hours of broadcasts from one root) they would look as if they were ahead.
    """
    chunk_bytes = get(context, _CHUNK_BYTES)
    chunks = (get(call, SIZE_BYTES) + chunk_bytes - 1) // chunk_bytes
    put(context, _CHUNK, get(context, _CHUNK) + chunks)
    if status == OK:
        signal(get(context, unused_lines) + get(context, RANK) * LINE, get(context, _CHUNK))


@inline
def _send(context, call):
    size_bytes, source = get(call, SIZE_BYTES), get(call, SOURCE)
    offset = NOT_SHARED
    if size_bytes >= get(context, _SYMMETRIC_MIN_BYTES):
        offset = arena_offset(context, source, size_bytes)
    if offset == NOT_SHARED and size_bytes <= get(context, _ONE_SHOT_BYTES):
        slot = slot_of(context, get(context, SEQUENCE), get(context, RANK))
        _copy(context, payload_of(slot, size_bytes), source, size_bytes)
    post(context, call, offset, NOT_SHARED)
    if offset != NOT_SHARED or size_bytes > get(context, _ONE_SHOT_BYTES):
        status = wait_all_arrived(context, call)
        if status != OK:
            return status
    _copy(context, get(call, DESTINATION), source, size_bytes)
    if offset != NOT_SHARED:
        put(context, PATH, _SYMMETRIC)
        signal_done(context)
        return wait_all_done(context, get(context, SEQUENCE))
    if size_bytes <= get(context, _ONE_SHOT_BYTES):
        put(context, PATH, _ONE_SHOT)
        return OK
    put(context, PATH, _STAGED)
    status = _send_chunks(context, call)
    _advance_chunks(context, call, _REDUCED, status)
    return status


@inline
def _receive(context, call):
    size_bytes, root = get(call, SIZE_BYTES), get(call, ROOT)
    sequence = get(context, SEQUENCE)
    post(context, call, NOT_SHARED, NOT_SHARED)
    slot = slot_of(context, sequence, root)
    status = wait_header(context, slot, header_word(call, sequence), root)
    if status == MISMATCH:
        status = wait_all_arrived(context, call)  # the error names every odd rank
    if status != OK:
        return status
    offset = posted_source(context, root)
    if offset != NOT_SHARED or size_bytes > get(context, _ONE_SHOT_BYTES):
        status = wait_all_arrived(context, call)
        if status != OK:
            return status
    if offset != NOT_SHARED:
        put(context, PATH, _SYMMETRIC)
        _copy(context, get(call, DESTINATION), arena_of(context, root) + offset, size_bytes)
        return EVENT if event_pending(context) else OK  # see reduce_symmetric
    if size_bytes <= get(context, _ONE_SHOT_BYTES):
        put(context, PATH, _ONE_SHOT)
        _copy(context, get(call, DESTINATION), payload_of(slot, size_bytes), size_bytes)
        return OK
    put(context, PATH, _STAGED)
    status = _receive_chunks(context, call)
    _advance_chunks(context, call, _FILLED, status)
    return status


@compiled(types.int64(types.int64, types.int64))
def broadcast_loop(context, call):
    """Run one broadcast as the call block says; return a status."""
    status = begin(context, call)
    if status != OK:
        return status
    if get(context, RANK) == get(call, ROOT):
        status = _send(context, call)
    else:
        status = _receive(context, call)
    if status != OK:
        return status
    leave_unverified(context)
    signal_done(context)
    close_record(context)
    return OK
