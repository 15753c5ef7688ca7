"""broadcast, gather, scatter, all_gather, all_to_all and reduce_scatter within a host.

One loop for all of them: each rank takes its pieces (`pieces`) from the slots, from the arenas or,
chunk by chunk, from the stages of the others. Where pieces come from all ranks, reduce_scatter
reduces them and the others put them side by side.

A small rooted one does not synchronise: who only sends is over with it as soon as it has posted,
and may be ahead of the others by the ring's length. Everything else begins when everyone has
arrived, so that a mismatch is found before anything is written.
"""

from __future__ import annotations

from numba import types

from gpucoll.backends.cpu.pieces import (
    IS_SPREAD,
    PIECES,
    landing,
    piece_bytes,
    piece_offset,
    pieces_agree,
    posted_pieces,
)
from gpucoll.backends.cpu.staged_movement import move_staged
from gpucoll.backends.cpu.tables import DESTINATIONS, SOURCES, reduce_inputs
from gpucoll.control.calls import (
    DESTINATION,
    EVENT,
    KERNEL,
    LARGEST_BYTES,
    LINE,
    MISMATCH,
    MISMATCHED,
    NOT_SHARED,
    OK,
    PATH,
    RANK,
    ROOT,
    SEQUENCE,
    SIZE_BYTES,
    SOURCE,
    STATUS_DONE,
    STATUS_LINES,
    WORLD_SIZE,
    arena_of,
    arena_offset,
    begin,
    close_record,
    header_word,
    leave_unverified,
    payload_of,
    post,
    posted_destination,
    posted_source,
    signal_done,
    slot_of,
    wait_all_arrived,
    wait_all_done,
)
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import call_copy, get, put, store64
from gpucoll.transport.flags import event_pending, wait, wait_header
from gpucoll.transport.layout import Call, Context, Flow, Path

_ONE_SHOT_BYTES = int(Context.ONE_SHOT_BYTES)
_COPY_PLAIN, _COPY_POSTED = int(Context.COPY_PLAIN), int(Context.COPY_POSTED)
_PREFETCH_BYTES = int(Context.PREFETCH_BYTES)
_SYMMETRIC_MIN_BYTES = int(Context.SYMMETRIC_MIN_BYTES)
_ONE_SHOT, _LOCAL = int(Path.ONE_SHOT), int(Path.LOCAL)
_STAGED, _SYMMETRIC = int(Path.STAGED), int(Path.SYMMETRIC)
_FLOW, _ALL = int(Call.FLOW), int(Flow.ALL)
_FROM_ROOT, _TO_ROOT = int(Flow.FROM_ROOT), int(Flow.TO_ROOT)


@inline
def _sends(context, call):
    """Return whether others need this rank's input."""
    flow = get(call, _FLOW)
    return flow == _ALL or (get(context, RANK) == get(call, ROOT)) == (flow == _FROM_ROOT)


@inline
def _receives(context, call):
    """Return whether this rank needs the others' input."""
    flow = get(call, _FLOW)
    return flow == _ALL or (get(context, RANK) == get(call, ROOT)) == (flow == _TO_ROOT)


@inline
def _take_own(context, call):
    """Copy the piece that this rank sends to itself, unless it is in place already."""
    me = get(context, RANK)
    source = get(call, SOURCE) + piece_offset(context, call, me, me)
    destination = get(call, DESTINATION) + landing(call, me)
    if source != destination:
        size_bytes = piece_bytes(context, call, me, me)
        call_copy(get(context, _COPY_PLAIN), destination, source, size_bytes, 0)


@inline
def _input_of(context, call, rank, in_arenas):
    """Return where the piece of `rank` for this rank can be read: in its arena or in its slot."""
    offset = piece_offset(context, call, rank, get(context, RANK))
    if in_arenas:
        return arena_of(context, rank) + posted_source(context, rank) + offset
    slot = slot_of(context, get(context, SEQUENCE), rank)
    return payload_of(slot, get(call, LARGEST_BYTES)) + offset


@inline
def _reduce_pieces(context, call, in_arenas):
    me, world_size = get(context, RANK), get(context, WORLD_SIZE)
    sources = get(context, SOURCES)
    for rank in range(world_size):
        store64(sources + 8 * rank, _input_of(context, call, rank, in_arenas))
    store64(sources + 8 * me, get(call, SOURCE) + piece_offset(context, call, me, me))
    store64(get(context, DESTINATIONS), get(call, DESTINATION))
    size_bytes = piece_bytes(context, call, me, me)
    reduce_inputs(context, call, get(context, DESTINATIONS), world_size, size_bytes, 0)


@inline
def _take(context, call, in_arenas):
    """Take this rank's pieces out of everybody's arenas or slots."""
    if get(call, KERNEL) != 0:
        _reduce_pieces(context, call, in_arenas)
        return
    me, world_size = get(context, RANK), get(context, WORLD_SIZE)
    for step in range(1, world_size):
        rank = (me + step) % world_size
        if get(call, _FLOW) == _FROM_ROOT and rank != get(call, ROOT):
            continue
        call_copy(
            get(context, _COPY_PLAIN),
            get(call, DESTINATION) + landing(call, rank),
            _input_of(context, call, rank, in_arenas),
            piece_bytes(context, call, rank, me),
            0,
        )


@inline
def _post_input(context, call):
    """Post this rank's header, with its small input in the slot or its arena offset."""
    sends, size_bytes = _sends(context, call), get(call, SIZE_BYTES)
    is_small = get(call, LARGEST_BYTES) <= get(context, _ONE_SHOT_BYTES)
    source = destination = NOT_SHARED
    # Small rooted ones go through slots, so that senders need not wait.
    may_share = get(call, _FLOW) == _ALL or not is_small
    if sends and may_share and get(call, LARGEST_BYTES) >= get(context, _SYMMETRIC_MIN_BYTES):
        source = arena_offset(context, get(call, SOURCE), size_bytes)
        if get(call, DESTINATION) == get(call, SOURCE):
            destination = source
    slot = slot_of(context, get(context, SEQUENCE), get(context, RANK))
    if get(call, PIECES) != 0:
        table_bytes = 16 * get(context, WORLD_SIZE)
        table = posted_pieces(context, get(context, RANK))
        call_copy(get(context, _COPY_PLAIN), table, get(call, PIECES), table_bytes, 0)
    elif sends and is_small and source == NOT_SHARED:
        call_copy(
            get(context, _COPY_POSTED),
            payload_of(slot, get(call, LARGEST_BYTES)),
            get(call, SOURCE),
            size_bytes,
            get(context, _PREFETCH_BYTES),
        )
    post(context, call, source, destination)


@inline
def _n_shared(context, call):
    """Return how many ranks' inputs can be read where they lie; one that sends nothing counts.

    In an all_to_all in place, inputs are overwritten while others may still read: not shared.
    """
    count, in_place_harms = 0, get(call, IS_SPREAD) and get(call, KERNEL) == 0
    for rank in range(get(context, WORLD_SIZE)):
        flow, is_root = get(call, _FLOW), rank == get(call, ROOT)
        if flow != _ALL and is_root != (flow == _FROM_ROOT):
            count += 1
        elif posted_source(context, rank) != NOT_SHARED:
            in_place = posted_destination(context, rank) != NOT_SHARED
            if not (flow == _ALL and in_place and in_place_harms):
                count += 1
    return count


@inline
def _take_from_arenas(context, call):
    """Take pieces where they lie; return when nobody reads this rank's input any more."""
    if _receives(context, call):
        _take(context, call, True)
    signal_done(context)
    status, sequence = OK, get(context, SEQUENCE)
    if get(call, _FLOW) == _TO_ROOT and get(context, RANK) != get(call, ROOT):
        root = get(call, ROOT)
        status = wait(
            context, get(context, STATUS_LINES) + root * LINE + STATUS_DONE, sequence, root
        )
    elif _sends(context, call):
        status = wait_all_done(context, sequence)
    # A peer that gave up may have used its memory anew while this rank still read it.
    return EVENT if status == OK and event_pending(context) else status


@inline
def _move_small(context, call):
    """Move what is small and rooted, without waiting for more than is needed."""
    put(context, PATH, _ONE_SHOT)
    if not _receives(context, call):
        if get(call, _FLOW) == _FROM_ROOT:
            _take_own(context, call)
        leave_unverified(context)
        return OK
    if get(call, _FLOW) == _FROM_ROOT:
        slot = slot_of(context, get(context, SEQUENCE), get(call, ROOT))
        word = header_word(call, get(context, SEQUENCE))
        status = wait_header(context, slot, word, get(call, ROOT))
        if status == MISMATCH:
            status = wait_all_arrived(context, call)  # the error names every odd rank
        if status != OK:
            return status
        _take(context, call, False)
        leave_unverified(context)
        return OK
    status = wait_all_arrived(context, call)
    if status == OK:
        _take(context, call, False)
        _take_own(context, call)
    return status


@inline
def _move(context, call):
    """Post, wait for the others and move on the way that all have chosen; return a status."""
    _post_input(context, call)
    is_small = get(call, LARGEST_BYTES) <= get(context, _ONE_SHOT_BYTES)
    if is_small and get(call, _FLOW) != _ALL:
        return _move_small(context, call)
    status = wait_all_arrived(context, call)
    if status != OK:
        return status
    if get(call, PIECES) != 0 and not pieces_agree(context):
        put(context, MISMATCHED, get(context, SEQUENCE))
        return MISMATCH
    if get(call, KERNEL) == 0 and (
        get(call, _FLOW) == _ALL or get(context, RANK) == get(call, ROOT)
    ):
        _take_own(context, call)
    n_shared = _n_shared(context, call)
    if n_shared == get(context, WORLD_SIZE):
        put(context, PATH, _SYMMETRIC)
        return _take_from_arenas(context, call)
    if is_small and n_shared == 0 and get(call, PIECES) == 0:
        put(context, PATH, _ONE_SHOT)
        _take(context, call, False)
        return OK
    put(context, PATH, _STAGED)
    return move_staged(context, call, _sends(context, call), _receives(context, call))


@inline
def _alone(context, call):
    """Move from this rank to itself."""
    put(context, PATH, _LOCAL)
    if get(call, KERNEL) == 0:
        _take_own(context, call)
        return
    store64(get(context, SOURCES), get(call, SOURCE))
    store64(get(context, DESTINATIONS), get(call, DESTINATION))
    reduce_inputs(context, call, get(context, DESTINATIONS), 1, get(call, SIZE_BYTES), 0)


@compiled(types.int64(types.int64, types.int64))
def movement_loop(context, call):
    """Run one movement as the call block says; return a status."""
    status = begin(context, call)
    if status != OK:
        return status
    if get(context, WORLD_SIZE) == 1:
        _alone(context, call)
    else:
        status = _move(context, call)
        if status != OK:
            return status
    signal_done(context)
    close_record(context)
    return OK
