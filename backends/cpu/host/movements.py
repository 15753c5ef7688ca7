"""broadcast, gather, scatter, all_gather, all_to_all and reduce_scatter within a host.

One loop serves all of them. Each rank takes its pieces (`pieces`) from the other ranks' slots,
arenas or, chunk by chunk, stages. If pieces come from all ranks, reduce_scatter reduces them and
the others put them side by side.

A small rooted call does not synchronise: a rank that only sends is finished as soon as it has
posted, and may be ahead of the others by the ring's length. Every other call begins when all ranks
have arrived, so that a mismatch is found before anything is written.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.pieces import (
    INPUTS,
    IS_SPREAD,
    PIECES,
    block_bytes,
    block_offset,
    input_piece,
    landing,
    largest_piece_bytes,
    piece_bytes,
    piece_offset,
    pieces_agree,
    posted_inputs,
    posted_pieces,
    table_bytes,
)
from gpucoll.backends.cpu.host.single_copy import can_copy_once, read_from
from gpucoll.backends.cpu.host.staged_movement import move_staged
from gpucoll.backends.cpu.host.tables import DESTINATIONS, SOURCES, reduce_inputs
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import call_copy, get, load64, put, store64
from gpucoll.transport.shared.flags import event_pending_since, wait
from gpucoll.transport.shared.layout import NEVER
from gpucoll.transport.shared.peer_arena import arena_of, reach
from gpucoll.transport.shared.room import have_stages
from gpucoll.transport.shared.steps import (
    DESTINATION,
    EVENT,
    HEADER_ADDRESS,
    KERNEL,
    LARGEST_BYTES,
    LINE,
    MISMATCH,
    MISMATCHED,
    NOT_RUN,
    NOT_SHARED,
    OK,
    PATH,
    RANK,
    READY_BYTES,
    ROOT,
    SEQUENCE,
    SIZE_BYTES,
    SOURCE,
    STATUS_DONE,
    STATUS_LINES,
    WORLD_SIZE,
    arena_offset,
    begin,
    begin_ahead,
    close_record,
    goes_ahead,
    make_ready,
    payload_of,
    post,
    posted_address,
    posted_destination,
    posted_source,
    signal_done,
    slot_of,
    wait_all_arrived,
    wait_all_done,
    wait_arrived,
)
from gpucoll.transport.shared.words import Call, Context, Flow, Path

_ONE_SHOT_BYTES, _ROOTED_BYTES = int(Context.ONE_SHOT_BYTES), int(Context.ROOTED_BYTES)
_COPY_PLAIN, _COPY_POSTED = int(Context.COPY_PLAIN), int(Context.COPY_POSTED)
_PREFETCH_BYTES = int(Context.PREFETCH_BYTES)
_SYMMETRIC_MIN_BYTES = int(Context.SYMMETRIC_MIN_BYTES)
_ONE_SHOT, _LOCAL = int(Path.ONE_SHOT), int(Path.LOCAL)
_STAGED, _SYMMETRIC = int(Path.STAGED), int(Path.SYMMETRIC)
_SINGLE_COPY = int(Path.SINGLE_COPY)
_SINGLE_COPY_MIN_BYTES = int(Context.SINGLE_COPY_MIN_BYTES)
_SINGLE_COPY_MAX_BYTES = int(Context.SINGLE_COPY_MAX_BYTES)
_ROOT_COPY_MIN_BYTES = int(Context.ROOT_COPY_MIN_BYTES)
_GATHER_COPY_MAX_BYTES = int(Context.GATHER_COPY_MAX_BYTES)
_COPY_TAKE, _LARGE_BYTES = int(Context.COPY_TAKE), 64 << 10
_LISTED = -1
"""In place of an input's address: it is one array per rank, with addresses in `posted_inputs`."""
_IN_PLACE = 0
"""In place of a destination's offset: the piece that this rank sends to itself is there already."""
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
def _is_small(context, call):
    """Return whether inputs go through slots; the same on all ranks."""
    size_bytes = get(call, LARGEST_BYTES)
    if get(call, _FLOW) != _ALL:
        return size_bytes <= get(context, _ROOTED_BYTES)
    is_read = get(call, KERNEL) == 0 and size_bytes >= get(context, _SINGLE_COPY_MIN_BYTES)
    return size_bytes <= get(context, _ONE_SHOT_BYTES) and not is_read


@inline
def _copy(context, destination, source, size_bytes):
    """Copy; for large sizes, fetch cache lines ahead, a fifth faster for data beyond the caches."""
    kernel = get(context, _COPY_PLAIN if size_bytes < _LARGE_BYTES else _COPY_TAKE)
    call_copy(kernel, destination, source, size_bytes, get(context, _PREFETCH_BYTES))


@inline
def _is_in_place(context, call):
    """Return whether the piece that this rank sends to itself is in place already."""
    me = get(context, RANK)
    return input_piece(context, call, me) == get(call, DESTINATION) + landing(call, me)


@inline
def _take_own(context, call):
    """Copy the piece that this rank sends to itself, unless it is in place already."""
    if not _is_in_place(context, call):
        me = get(context, RANK)
        destination = get(call, DESTINATION) + landing(call, me)
        source, size_bytes = input_piece(context, call, me), piece_bytes(context, call, me, me)
        _copy(context, destination, source, size_bytes)


@inline
def _payload_of(context, call, rank):
    """Return the address of the small input of `rank`."""
    return payload_of(context, get(context, SEQUENCE), rank, get(call, LARGEST_BYTES))


@inline
def _input_of(context, call, rank, way):
    """Return the address of the piece from `rank` for this rank: in slot, arena or process."""
    offset = piece_offset(context, call, rank, get(context, RANK))
    if way == _SINGLE_COPY:
        address = posted_address(context, rank)
        if address == _LISTED:
            return load64(posted_inputs(context, rank) + 8 * get(context, RANK))
        return address + offset
    if way == _SYMMETRIC:
        return arena_of(context, rank) + posted_source(context, rank) + offset
    return _payload_of(context, call, rank) + offset


@inline
def _reduce_pieces(context, call, way):
    me, world_size = get(context, RANK), get(context, WORLD_SIZE)
    sources = get(context, SOURCES)
    for rank in range(world_size):
        store64(sources + 8 * rank, _input_of(context, call, rank, way))
    store64(sources + 8 * me, input_piece(context, call, me))
    store64(get(context, DESTINATIONS), get(call, DESTINATION))
    size_bytes = piece_bytes(context, call, me, me)
    reduce_inputs(context, call, get(context, DESTINATIONS), world_size, size_bytes, 0)


@inline
def _take(context, call, way):
    """Take this rank's pieces from all slots, arenas or processes; return a status."""
    if get(call, KERNEL) != 0:
        _reduce_pieces(context, call, way)
        return OK
    me, world_size = get(context, RANK), get(context, WORLD_SIZE)
    for step in range(1, world_size):
        rank = (me + step) % world_size
        if get(call, _FLOW) == _FROM_ROOT and rank != get(call, ROOT):
            continue
        destination = get(call, DESTINATION) + landing(call, rank)
        source = _input_of(context, call, rank, way)
        size_bytes = piece_bytes(context, call, rank, me)
        if way == _SINGLE_COPY:
            status = read_from(context, rank, destination, source, size_bytes)
            if status != OK:
                return status
        else:
            _copy(context, destination, source, size_bytes)
    return OK


@inline
def _write_pieces(context, call):
    """Put the table of this rank's pieces into its slot."""
    table = posted_pieces(context, get(context, RANK))
    size_bytes = 16 * get(context, WORLD_SIZE)
    call_copy(get(context, _COPY_PLAIN), table, get(call, PIECES), size_bytes, 0)


@inline
def _check_pieces(context, call):
    """Compare what ranks send and expect, if they give both; return a status."""
    if get(call, PIECES) == 0 or pieces_agree(context):
        return OK
    put(context, MISMATCHED, get(context, SEQUENCE))
    return MISMATCH


@inline
def _pack_inputs(context, call):
    """Put a small input of one array per rank into the slot, side by side."""
    payload = _payload_of(context, call, get(context, RANK))
    for rank in range(get(context, WORLD_SIZE)):
        size_bytes = block_bytes(call, rank)
        place = payload + block_offset(call, rank)
        call_copy(get(context, _COPY_PLAIN), place, input_piece(context, call, rank), size_bytes, 0)


@inline
def _post_input(context, call):
    """Post this rank's header, with the small input in its slot or the input's arena offset."""
    sends, size_bytes = _sends(context, call), get(call, SIZE_BYTES)
    is_small, is_listed = _is_small(context, call), get(call, INPUTS) != 0
    source = destination = NOT_SHARED
    if is_small and get(call, _FLOW) != _ALL:
        goes_ahead(context)
    # Small rooted inputs go through slots, so that senders need not wait.
    may_share = get(call, _FLOW) == _ALL or not is_small
    if is_listed:
        may_share = False
    if sends and may_share and get(call, LARGEST_BYTES) >= get(context, _SYMMETRIC_MIN_BYTES):
        source = arena_offset(context, get(call, SOURCE), size_bytes)
    slot = slot_of(context, get(context, SEQUENCE), get(context, RANK))
    if get(call, PIECES) != 0:
        _write_pieces(context, call)
    elif is_listed and is_small:
        _pack_inputs(context, call)
    elif sends and is_small and source == NOT_SHARED:
        call_copy(
            get(context, _COPY_POSTED),
            _payload_of(context, call, get(context, RANK)),
            get(call, SOURCE),
            size_bytes,
            get(context, _PREFETCH_BYTES),
        )
    if _is_in_place(context, call):
        destination = _IN_PLACE
    if is_listed and not is_small:
        table = posted_inputs(context, get(context, RANK))
        addresses_bytes = 8 * get(context, WORLD_SIZE)
        call_copy(get(context, _COPY_PLAIN), table, get(call, INPUTS), addresses_bytes, 0)
    if not is_small:
        store64(slot + HEADER_ADDRESS, _LISTED if is_listed else get(call, SOURCE))
    post(context, call, source, destination)


@inline
def _total_bytes(context, call):
    """Return the size of the largest input, or an estimate if no rank knows it; same on all."""
    if get(call, PIECES) == 0:
        return get(call, LARGEST_BYTES)
    return largest_piece_bytes(context, call) * get(context, WORLD_SIZE)


@inline
def _copies_once(context, call):
    """Return whether reading directly from processes is faster; the same on all ranks.

    It is, with two exceptions. Several readers of the root's only input slow each other down,
    unless the root copies its own result meanwhile. If each rank has a CPU, two processes copy
    large data to the root faster than one. For some processors a separate threshold applies to data
    from a root, because they stage quickly.
    """
    if get(call, KERNEL) != 0:
        return False
    size_bytes, flow = _total_bytes(context, call), get(call, _FLOW)
    copies_own = flow != _ALL and posted_destination(context, get(call, ROOT)) != _IN_PLACE
    root_copy_min_bytes = get(context, _ROOT_COPY_MIN_BYTES)
    if flow == _FROM_ROOT and root_copy_min_bytes != 0:
        return copies_own and size_bytes >= root_copy_min_bytes
    if size_bytes < get(context, _SINGLE_COPY_MIN_BYTES):
        return False
    if flow == _ALL or get(call, IS_SPREAD) != 0:
        return True
    if flow == _FROM_ROOT:
        return copies_own or size_bytes <= get(context, _SINGLE_COPY_MAX_BYTES)
    most_bytes = get(context, _GATHER_COPY_MAX_BYTES)
    return size_bytes <= (most_bytes // 2 if copies_own else most_bytes)


@inline
def _overwrites(context, call):
    """Return whether a rank's input is overwritten while others may still need it.

    That happens in an all_to_all in place, whose data must therefore go through the stages. The
    result is the same on all ranks.
    """
    if get(call, KERNEL) != 0 or not get(call, IS_SPREAD) or get(call, _FLOW) != _ALL:
        return False
    for rank in range(get(context, WORLD_SIZE)):
        if posted_destination(context, rank) == _IN_PLACE:
            return True
    return False


@inline
def _n_shared(context, call):
    """Return how many ranks' inputs lie in shared memory; ranks that send nothing count as such."""
    count, flow = 0, get(call, _FLOW)
    for rank in range(get(context, WORLD_SIZE)):
        sends = flow == _ALL or (rank == get(call, ROOT)) == (flow == _FROM_ROOT)
        if not sends or posted_source(context, rank) != NOT_SHARED:
            count += 1
    return count


@inline
def _reach_inputs(context, call):
    """Map the parts of the others' arenas that this rank reads; return a status."""
    me = get(context, RANK)
    for rank in range(get(context, WORLD_SIZE)):
        source = posted_source(context, rank)
        if source != NOT_SHARED:
            stop = source + piece_offset(context, call, rank, me)
            if reach(context, rank, stop + piece_bytes(context, call, rank, me)) == 0:
                return EVENT
    return OK


@inline
def _take_where_it_lies(context, call, way):
    """Take pieces directly from their memory; return when no rank reads this rank's input."""
    put(context, PATH, way)
    if _receives(context, call):
        status = _reach_inputs(context, call) if way == _SYMMETRIC else OK
        if status == OK:
            status = _take(context, call, way)
        if status != OK:
            return status
    signal_done(context)
    status, sequence = OK, get(context, SEQUENCE)
    if get(call, _FLOW) == _TO_ROOT and get(context, RANK) != get(call, ROOT):
        root = get(call, ROOT)
        status = wait(
            context, get(context, STATUS_LINES) + root * LINE + STATUS_DONE, sequence, root
        )
    elif _sends(context, call):
        status = wait_all_done(context, sequence)
    # A peer that gave up may have reused its memory while this rank still read it.
    return EVENT if status == OK and event_pending_since(context) else status


@inline
def _move_small(context, call):
    """Move small data of a rooted call, waiting for no more than needed."""
    put(context, PATH, _ONE_SHOT)
    if not _receives(context, call):
        if get(call, _FLOW) == _FROM_ROOT:
            _take_own(context, call)
        return OK
    if get(call, _FLOW) == _FROM_ROOT:
        status = wait_arrived(context, call, get(call, ROOT))
        if status != OK:
            return status
        return _take(context, call, _ONE_SHOT)
    status = wait_all_arrived(context, call)
    if status == OK:
        _take(context, call, _ONE_SHOT)
        _take_own(context, call)
    return status


@inline
def _move(context, call):
    """Wait for the others and move by the path that all have chosen; return a status."""
    is_small = _is_small(context, call)
    if is_small and get(call, _FLOW) != _ALL:
        return _move_small(context, call)
    status = wait_all_arrived(context, call)
    if status == OK:
        status = _check_pieces(context, call)
    if status != OK:
        return status
    if get(call, KERNEL) == 0 and (
        get(call, _FLOW) == _ALL or get(context, RANK) == get(call, ROOT)
    ):
        _take_own(context, call)
    n_shared = _n_shared(context, call)
    if is_small and n_shared == 0 and get(call, PIECES) == 0:
        put(context, PATH, _ONE_SHOT)
        return _take(context, call, _ONE_SHOT)
    if not _overwrites(context, call):
        if n_shared == get(context, WORLD_SIZE):
            return _take_where_it_lies(context, call, _SYMMETRIC)
        if not is_small and _copies_once(context, call) and can_copy_once(context):
            return _take_where_it_lies(context, call, _SINGLE_COPY)
    put(context, PATH, _STAGED)
    status = have_stages(context)
    if status != OK:
        return status
    return move_staged(context, call, _sends(context, call), _receives(context, call))


@inline
def _alone(context, call):
    """Move from this rank to itself; return a status."""
    put(context, PATH, _LOCAL)
    if get(call, KERNEL) == 0:
        if get(call, PIECES) != 0:
            _write_pieces(context, call)
        status = _check_pieces(context, call)
        if status == OK:
            _take_own(context, call)
        return status
    store64(get(context, SOURCES), input_piece(context, call, 0))
    store64(get(context, DESTINATIONS), get(call, DESTINATION))
    reduce_inputs(context, call, get(context, DESTINATIONS), 1, get(call, SIZE_BYTES), 0)
    return OK


@inline
def _make_ready(context, call):
    """Make sure that there is memory for this call; return a status."""
    has_table = get(call, PIECES) | get(call, INPUTS)
    if has_table == 0 and get(call, LARGEST_BYTES) <= get(context, READY_BYTES):
        return OK
    most_bytes = get(context, _ONE_SHOT_BYTES if get(call, _FLOW) == _ALL else _ROOTED_BYTES)
    status = OK
    if get(context, WORLD_SIZE) == 1:
        return OK
    if has_table != 0:
        status = make_ready(context, table_bytes(context), table_bytes(context))
    if status != OK:
        return status
    if get(call, PIECES) != 0:
        status = make_ready(context, NEVER, 0)  # small pieces go through stages, too
    elif _sends(context, call):
        status = make_ready(context, get(call, LARGEST_BYTES), most_bytes)
    return status


@compiled
def movement_loop(context, call):
    """Run the movement in the call block; return a status."""
    status = _make_ready(context, call)
    if status == OK:
        status = begin(context, call)
    if status != OK:
        return status
    if get(context, WORLD_SIZE) == 1:
        status = _alone(context, call)
    else:
        _post_input(context, call)
        status = _move(context, call)
    if status != OK:
        return status
    close_record(context)
    return OK


@compiled
def movement_post(context, call):
    """Post a movement ahead, without waiting; NOT_RUN if that is not possible.

    Shared memory is no obstacle: the others only read it.
    """
    if get(context, WORLD_SIZE) == 1 or not _is_small(context, call):
        return NOT_RUN
    if _make_ready(context, call) != OK:
        return NOT_RUN  # Python handles it when the call is run
    status = begin_ahead(context, call)
    if status == OK:
        _post_input(context, call)
    return status


@compiled
def movement_finish(context, call):
    """Complete the call that `movement_post` began; return a status."""
    status = _move(context, call)
    if status == OK:
        close_record(context)
    return status
