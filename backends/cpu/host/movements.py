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
from gpucoll.backends.cpu.host.staged import move_staged
from gpucoll.collectives import Flow
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import call_copy, load64, store64
from gpucoll.transport.shared.filling import fill
from gpucoll.transport.shared.flags import event_pending_since, wait
from gpucoll.transport.shared.layout import NEVER
from gpucoll.transport.shared.operands import reduce_inputs
from gpucoll.transport.shared.peer_memory import arena_of, can_copy_once, reach, read_from
from gpucoll.transport.shared.room import have_stages
from gpucoll.transport.shared.steps import (
    HEADER_ADDRESS,
    LINE,
    NOT_SHARED,
    STATUS_DONE,
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
from gpucoll.transport.shared.words import Call, Context, Path, Status

_LARGE_BYTES = 64 << 10
_LISTED = -1
"""In place of an input's address: it is one array per rank, with addresses in `posted_inputs`."""
_IN_PLACE = 0
"""In place of a destination's offset: the piece that this rank sends to itself is there already."""


@inline
def _sends(context: Context, call: Call) -> bool:
    """Return whether others need this rank's input."""
    flow = call.flow
    return flow == Flow.ALL or (context.rank == call.root) == (flow == Flow.FROM_ROOT)


@inline
def _receives(context: Context, call: Call) -> bool:
    """Return whether this rank needs the others' input."""
    flow = call.flow
    return flow == Flow.ALL or (context.rank == call.root) == (flow == Flow.TO_ROOT)


@inline
def _is_small(context: Context, call: Call) -> bool:
    """Return whether inputs go through slots; the same on all ranks."""
    size_bytes = call.largest_bytes
    if call.flow != Flow.ALL:
        return size_bytes <= context.rooted_bytes
    is_read = call.kernel == 0 and size_bytes >= context.single_copy_min_bytes
    return size_bytes <= context.one_shot_bytes and not is_read


@inline
def _copy(context: Context, destination: int, source: int, size_bytes: int) -> None:
    """Copy; for large sizes, fetch cache lines ahead, a fifth faster for data beyond the caches."""
    kernel = context.copy_plain if size_bytes < _LARGE_BYTES else context.copy_take
    call_copy(kernel, destination, source, size_bytes, context.prefetch_bytes)


@inline
def _is_in_place(context: Context, call: Call) -> bool:
    """Return whether the piece that this rank sends to itself is in place already."""
    me = context.rank
    return input_piece(context, call, me) == call.destination + landing(call, me)


@inline
def _take_own(context: Context, call: Call) -> None:
    """Copy the piece that this rank sends to itself, unless it is in place already."""
    if not _is_in_place(context, call):
        me = context.rank
        destination = call.destination + landing(call, me)
        source, size_bytes = input_piece(context, call, me), piece_bytes(context, call, me, me)
        _copy(context, destination, source, size_bytes)


@inline
def _payload_of(context: Context, call: Call, rank: int) -> int:
    """Return the address of the small input of `rank`."""
    return payload_of(context, context.sequence, rank, call.largest_bytes)


@inline
def _input_of(context: Context, call: Call, rank: int, way: int) -> int:
    """Return the address of the piece from `rank` for this rank: in slot, arena or process."""
    offset = piece_offset(context, call, rank, context.rank)
    if way == Path.SINGLE_COPY:
        address = posted_address(context, rank)
        if address == _LISTED:
            return load64(posted_inputs(context, rank) + 8 * context.rank)
        return address + offset
    if way == Path.SYMMETRIC:
        return arena_of(context, rank) + posted_source(context, rank) + offset
    return _payload_of(context, call, rank) + offset


@inline
def _reduce_pieces(context: Context, call: Call, way: int) -> None:
    me, world_size = context.rank, context.world_size
    sources = context.sources
    for rank in range(world_size):
        store64(sources + 8 * rank, _input_of(context, call, rank, way))
    store64(sources + 8 * me, input_piece(context, call, me))
    store64(context.destinations, call.destination)
    size_bytes = piece_bytes(context, call, me, me)
    reduce_inputs(context, call, context.destinations, world_size, size_bytes, 0)


@inline
def _take(context: Context, call: Call, way: int) -> int:
    """Take this rank's pieces from all slots, arenas or processes; return a status."""
    if call.kernel != 0:
        _reduce_pieces(context, call, way)
        return Status.OK
    me, world_size = context.rank, context.world_size
    for step in range(1, world_size):
        rank = (me + step) % world_size
        if call.flow == Flow.FROM_ROOT and rank != call.root:
            continue
        destination = call.destination + landing(call, rank)
        source = _input_of(context, call, rank, way)
        size_bytes = piece_bytes(context, call, rank, me)
        if way == Path.SINGLE_COPY:
            status = read_from(context, rank, destination, source, size_bytes)
            if status != Status.OK:
                return status
        else:
            _copy(context, destination, source, size_bytes)
    return Status.OK


@inline
def _write_pieces(context: Context, call: Call) -> None:
    """Put the table of this rank's pieces into its slot."""
    table = posted_pieces(context, context.rank)
    size_bytes = 16 * context.world_size
    call_copy(context.copy_plain, table, call.pieces, size_bytes, 0)


@inline
def _check_pieces(context: Context, call: Call) -> int:
    """Compare what ranks send and expect, if they give both; return a status."""
    if not call.pieces or pieces_agree(context):
        return Status.OK
    context.mismatched = context.sequence
    return Status.MISMATCH


@inline
def _pack_inputs(context: Context, call: Call) -> None:
    """Put a small input of one array per rank into the slot, side by side."""
    payload = _payload_of(context, call, context.rank)
    for rank in range(context.world_size):
        size_bytes = block_bytes(call, rank)
        place = payload + block_offset(call, rank)
        call_copy(context.copy_plain, place, input_piece(context, call, rank), size_bytes, 0)


@inline
def _post_input(context: Context, call: Call) -> None:
    """Post this rank's header, with the small input in its slot or the input's arena offset."""
    sends, size_bytes = _sends(context, call), call.size_bytes
    is_small, is_listed = _is_small(context, call), bool(call.inputs)
    source = destination = NOT_SHARED
    if is_small and call.flow != Flow.ALL:
        goes_ahead(context)
    # Small rooted inputs go through slots, so that senders need not wait.
    may_share = call.flow == Flow.ALL or not is_small
    if is_listed:
        may_share = False
    if sends and may_share and call.largest_bytes >= context.symmetric_min_bytes:
        source = arena_offset(context, call.source, size_bytes)
    slot = slot_of(context, context.sequence, context.rank)
    if call.pieces:
        _write_pieces(context, call)
    elif is_listed and is_small:
        _pack_inputs(context, call)
    elif sends and is_small and source == NOT_SHARED:
        fill(context, _payload_of(context, call, context.rank), call.source, size_bytes)
    if _is_in_place(context, call):
        destination = _IN_PLACE
    if is_listed and not is_small:
        table = posted_inputs(context, context.rank)
        addresses_bytes = 8 * context.world_size
        call_copy(context.copy_plain, table, call.inputs, addresses_bytes, 0)
    if not is_small:
        store64(slot + HEADER_ADDRESS, _LISTED if is_listed else call.source)
    post(context, call, source, destination)


@inline
def _total_bytes(context: Context, call: Call) -> int:
    """Return the size of the largest input, or an estimate if no rank knows it; same on all."""
    if not call.pieces:
        return call.largest_bytes
    return largest_piece_bytes(context, call) * context.world_size


@inline
def _copies_once(context: Context, call: Call) -> bool:
    """Return whether reading directly from processes is faster; the same on all ranks.

    It is, with two exceptions. Several readers of the root's only input slow each other down,
    unless the root copies its own result meanwhile. If each rank has a CPU, two processes copy
    large data to the root faster than one. For some processors a separate threshold applies to data
    from a root, because they stage quickly.
    """
    if call.kernel != 0:
        return False
    size_bytes, flow = _total_bytes(context, call), call.flow
    copies_own = flow != Flow.ALL and posted_destination(context, call.root) != _IN_PLACE
    root_copy_min_bytes = context.root_copy_min_bytes
    if flow == Flow.FROM_ROOT and root_copy_min_bytes != 0:
        return copies_own and size_bytes >= root_copy_min_bytes
    if size_bytes < context.single_copy_min_bytes:
        return False
    if flow == Flow.ALL or call.spreads != 0:
        return True
    if flow == Flow.FROM_ROOT:
        return copies_own or size_bytes <= context.single_copy_max_bytes
    most_bytes = context.gather_copy_max_bytes
    return size_bytes <= (most_bytes // 2 if copies_own else most_bytes)


@inline
def _overwrites(context: Context, call: Call) -> bool:
    """Return whether a rank's input is overwritten while others may still need it.

    That happens in an all_to_all in place, whose data must therefore go through the stages. The
    result is the same on all ranks.
    """
    if call.kernel != 0 or not call.spreads or call.flow != Flow.ALL:
        return False
    for rank in range(context.world_size):  # noqa: SIM110 (Numba compiles no `any`)
        if posted_destination(context, rank) == _IN_PLACE:
            return True
    return False


@inline
def _n_shared(context: Context, call: Call) -> int:
    """Return how many ranks' inputs lie in shared memory; ranks that send nothing count as such."""
    count, flow = 0, call.flow
    for rank in range(context.world_size):
        sends = flow == Flow.ALL or (rank == call.root) == (flow == Flow.FROM_ROOT)
        if not sends or posted_source(context, rank) != NOT_SHARED:
            count += 1
    return count


@inline
def _reach_inputs(context: Context, call: Call) -> int:
    """Map the parts of the others' arenas that this rank reads; return a status."""
    me = context.rank
    for rank in range(context.world_size):
        source = posted_source(context, rank)
        if source != NOT_SHARED:
            stop = source + piece_offset(context, call, rank, me)
            if reach(context, rank, stop + piece_bytes(context, call, rank, me)) == 0:
                return Status.EVENT
    return Status.OK


@inline
def _take_where_it_lies(context: Context, call: Call, way: int) -> int:
    """Take pieces directly from their memory; return when no rank reads this rank's input."""
    context.path = way
    if _receives(context, call):
        status: int = _reach_inputs(context, call) if way == Path.SYMMETRIC else Status.OK
        if status == Status.OK:
            status = _take(context, call, way)
        if status != Status.OK:
            return status
    signal_done(context)
    status = Status.OK
    sequence = context.sequence
    if call.flow == Flow.TO_ROOT and context.rank != call.root:
        root = call.root
        status = wait(context, context.status_lines + root * LINE + STATUS_DONE, sequence)
    elif _sends(context, call):
        status = wait_all_done(context, sequence)
    # A peer that gave up may have reused its memory while this rank still read it.
    return Status.EVENT if status == Status.OK and event_pending_since(context) else status


@inline
def _move_small(context: Context, call: Call) -> int:
    """Move small data of a rooted call, waiting for no more than needed."""
    context.path = Path.ONE_SHOT
    if not _receives(context, call):
        if call.flow == Flow.FROM_ROOT:
            _take_own(context, call)
        return Status.OK
    if call.flow == Flow.FROM_ROOT:
        status = wait_arrived(context, call, call.root)
        if status != Status.OK:
            return status
        return _take(context, call, Path.ONE_SHOT)
    status = wait_all_arrived(context, call)
    if status == Status.OK:
        _take(context, call, Path.ONE_SHOT)
        _take_own(context, call)
    return status


@inline
def _move(context: Context, call: Call) -> int:
    """Wait for the others and move by the path that all have chosen; return a status."""
    is_small = _is_small(context, call)
    if is_small and call.flow != Flow.ALL:
        return _move_small(context, call)
    status = wait_all_arrived(context, call)
    if status == Status.OK:
        status = _check_pieces(context, call)
    if status != Status.OK:
        return status
    if call.kernel == 0 and (call.flow == Flow.ALL or context.rank == call.root):
        _take_own(context, call)
    n_shared = _n_shared(context, call)
    if is_small and n_shared == 0 and not call.pieces:
        context.path = Path.ONE_SHOT
        return _take(context, call, Path.ONE_SHOT)
    if not _overwrites(context, call):
        if n_shared == context.world_size:
            return _take_where_it_lies(context, call, Path.SYMMETRIC)
        if not is_small and _copies_once(context, call) and can_copy_once(context):
            return _take_where_it_lies(context, call, Path.SINGLE_COPY)
    context.path = Path.STAGED
    status = have_stages(context)
    if status != Status.OK:
        return status
    return move_staged(context, call, _sends(context, call), _receives(context, call))


@inline
def _alone(context: Context, call: Call) -> int:
    """Move from this rank to itself; return a status."""
    context.path = Path.LOCAL
    if call.kernel == 0:
        if call.pieces:
            _write_pieces(context, call)
        status = _check_pieces(context, call)
        if status == Status.OK:
            _take_own(context, call)
        return status
    store64(context.sources, input_piece(context, call, 0))
    store64(context.destinations, call.destination)
    reduce_inputs(context, call, context.destinations, 1, call.size_bytes, 0)
    return Status.OK


@inline
def _make_ready(context: Context, call: Call) -> int:
    """Make sure that there is memory for this call; return a status."""
    has_table = call.pieces.address | call.inputs.address
    if has_table == 0 and call.largest_bytes <= context.ready_bytes:
        return Status.OK
    most_bytes = context.one_shot_bytes if call.flow == Flow.ALL else context.rooted_bytes
    status: int = Status.OK
    if context.world_size == 1:
        return Status.OK
    if has_table != 0:
        status = make_ready(context, table_bytes(context), table_bytes(context))
    if status != Status.OK:
        return status
    if call.pieces:
        status = make_ready(context, NEVER, 0)  # small pieces go through stages, too
    elif _sends(context, call):
        status = make_ready(context, call.largest_bytes, most_bytes)
    return status


@compiled
def movement_loop(context: Context, call: Call) -> int:
    """Run the movement in the call block; return a status."""
    status = _make_ready(context, call)
    if status == Status.OK:
        status = begin(context, call)
    if status != Status.OK:
        return status
    if context.world_size == 1:
        status = _alone(context, call)
    else:
        _post_input(context, call)
        status = _move(context, call)
    if status != Status.OK:
        return status
    close_record(context)
    return Status.OK


@compiled
def movement_post(context: Context, call: Call) -> int:
    """Post a movement ahead, without waiting; NOT_RUN if that is not possible.

    Shared memory is no obstacle: the others only read it.
    """
    if context.world_size == 1 or not _is_small(context, call):
        return Status.NOT_RUN
    if _make_ready(context, call) != Status.OK:
        return Status.NOT_RUN  # Python handles it when the call is run
    status = begin_ahead(context, call)
    if status == Status.OK:
        _post_input(context, call)
    return status


@compiled
def movement_finish(context: Context, call: Call) -> int:
    """Complete the call that `movement_post` began; return a status."""
    status = _move(context, call)
    if status == Status.OK:
        close_record(context)
    return status
