"""all_reduce, reduce, scan and exclusive_scan within a host: one-shot, staged or symmetric.

They differ in which inputs make up which rank's result (`operands.n_inputs`). In a small call other
than all_reduce a rank waits only for the ranks whose input it needs. All ranks choose the same path
for a call: facts that a rank cannot know of others (is their buffer in shared memory?) come with
their headers, so no further round is needed after all have arrived.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.staged import (
    copy_in,
    count_chunks,
    give_staged,
    input_at,
    is_one_piece,
    keep_up,
    output_at,
    reduce_staged,
    run_bytes,
    signal_chunk,
    slice_bytes,
    stage_first_chunk,
    take_staged,
    wait_chunk,
)
from gpucoll.collectives import Flow, Operands
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import store64
from gpucoll.transport.shared.flags import event_pending_since
from gpucoll.transport.shared.operands import (
    fill_with_identity,
    n_inputs,
    reduce_for_all,
    reduce_inputs,
)
from gpucoll.transport.shared.peer_memory import can_copy_once, reach, read_from
from gpucoll.transport.shared.room import have_stages
from gpucoll.transport.shared.steps import (
    HEADER_ADDRESS,
    NOT_SHARED,
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

PREFETCH_MIN_BYTES = 64 << 10
"""Smaller slices are not prefetched: the data ahead would be the next rank's slice."""


@inline
def reduce_symmetric(context: Context, call: Call) -> int:
    """Reduce my slice of all ranks' arrays for all ranks; return when all ranks have finished.

    The arrays lie in shared arenas, at offsets that may differ between ranks. They are not copied,
    so this runs at the memory's own speed.
    """
    world_size, size_bytes = context.world_size, call.size_bytes
    share = slice_bytes(size_bytes, world_size)
    start = context.rank * share
    stop = min(start + share, size_bytes)
    sources, destinations = context.sources, context.destinations
    if stop > start:
        for rank in range(world_size):
            source, destination = posted_source(context, rank), posted_destination(context, rank)
            arena = reach(context, rank, max(source, destination) + size_bytes)
            if arena == 0:
                return Status.EVENT
            store64(sources + 8 * rank, arena + source + start)
            store64(destinations + 8 * rank, arena + destination + start)
        ahead = context.prefetch_bytes if stop - start >= PREFETCH_MIN_BYTES else 0
        reduce_for_all(context, call, stop - start, ahead)
    signal_done(context)
    status = wait_all_done(context, context.sequence)
    # A peer that gave up may have reused its memory while this rank still read it.
    return Status.EVENT if status == Status.OK and event_pending_since(context) else status


_SHIFT_BYTES = 128 << 10
"""Size of the parts in which rank 1 reads an exclusive_scan and rank 0 overwrites what was read."""


@inline
def _reduce_slots(context: Context, call: Call, count: int) -> None:
    """Reduce the first `count` ranks' payloads of this call, in order, into the destination."""
    size_bytes, sequence = call.size_bytes, context.sequence
    sources, me = context.sources, context.rank
    segment = done = 0
    while True:
        step = run_bytes(call, segment, done, size_bytes - done)
        for rank in range(count):
            payload = payload_of(context, sequence, rank, size_bytes)
            store64(sources + 8 * rank, payload + done)
        if me < count:
            store64(sources + 8 * me, input_at(call, segment, done))
        store64(context.destinations, output_at(call, segment, done))
        reduce_inputs(context, call, context.destinations, count, step, 0)
        done += step
        segment += 1
        if done >= size_bytes:
            return


@inline
def _n_symmetric(context: Context, call: Call) -> int:
    """Return how many ranks posted shared memory for their input and, if any, their output."""
    count = 0
    for rank in range(context.world_size):
        has_none = call.flow == Flow.TO_ROOT and rank != call.root
        fills_itself = call.operands == Operands.BEFORE_OWN and rank == 0
        needs_destination = not (has_none or fills_itself)
        has_destination = posted_destination(context, rank) != NOT_SHARED
        if posted_source(context, rank) != NOT_SHARED and (
            has_destination or not needs_destination
        ):
            count += 1
    return count


@inline
def _alone(context: Context, call: Call) -> None:
    """Reduce over one rank: the op's preparation and finish, without any traffic."""
    context.path = Path.LOCAL
    if call.operands == Operands.BEFORE_OWN:
        fill_with_identity(context, call, 0, call.size_bytes)
        return
    _reduce_slots(context, call, 1)


@inline
def _is_plain_shift(context: Context, call: Call) -> bool:
    """Return whether the call only gives rank 0's input to rank 1; the same on all ranks."""
    if call.operands != Operands.BEFORE_OWN or context.world_size != 2:
        return False
    return call.size_bytes > context.one_shot_bytes and call.prepares == 0


@inline
def _give_shifted(context: Context, call: Call) -> int:
    """Read rank 0's input from its process, part by part, and report progress; on rank 1."""
    size_bytes, source = call.size_bytes, posted_address(context, 0)
    done = place = 0
    while done < size_bytes:
        step = min(_SHIFT_BYTES, size_bytes - done)
        status = read_from(context, 0, call.destination + done, source + done, step)
        if status != Status.OK:
            return status
        signal_chunk(context, context.read, place)
        done += step
        place += 1
    return Status.OK


@inline
def _fill_shifted(context: Context, call: Call) -> int:
    """Fill rank 0's result: in place right behind the reader, otherwise meanwhile."""
    size_bytes, is_in_place = call.size_bytes, call.source == call.destination
    done = place = 0
    while done < size_bytes:
        if is_in_place:
            status = wait_chunk(context, context.read, place, 1)
            if status != Status.OK:
                return status
        step = min(_SHIFT_BYTES, size_bytes - done)
        fill_with_identity(context, call, done, done + step)
        done += step
        place += 1
    return Status.OK


@inline
def _shift(context: Context, call: Call) -> int:
    """Give rank 0's input to rank 1, and rank 0 the identity; return a status."""
    if context.rank == 1:
        status = _give_shifted(context, call)
    else:
        status = _fill_shifted(context, call)
    if status != Status.OK:
        return status
    count_chunks(context, (call.size_bytes + _SHIFT_BYTES - 1) // _SHIFT_BYTES)
    keep_up(context, context.filled)
    keep_up(context, context.read)
    signal_done(context)
    return wait_all_done(context, context.sequence)


@inline
def _is_one_way(context: Context, call: Call) -> bool:
    """Return whether one of two ranks gives the other its input through stages; the same on both.

    Only where fills are timed: elsewhere it was not measured.
    """
    if context.copy_nontemporal == 0 or context.world_size != 2:
        return False
    if _is_plain_shift(context, call):
        return call.size_bytes < context.single_copy_min_bytes
    return call.flow == Flow.TO_ROOT and call.size_bytes > context.one_shot_bytes


@inline
def _go_one_way(context: Context, call: Call) -> int:
    receiver = call.root if call.flow == Flow.TO_ROOT else 1
    context.path = Path.STAGED
    if context.rank == receiver:
        return take_staged(context, call, 1 - receiver)
    return give_staged(context, call, receiver)


@inline
def _waits_for_few(context: Context, call: Call, count: int) -> bool:
    """Return whether this rank only needs the first `count` ranks, which need not wait for it."""
    is_small = call.size_bytes <= context.one_shot_bytes
    is_one_sided = call.operands != Operands.ALL or (call.flow == Flow.TO_ROOT and count == 0)
    return is_small and is_one_sided


@inline
def _reduce_few(context: Context, call: Call, count: int) -> int:
    """Reduce the payloads of the first `count` ranks, waiting for no others; return a status."""
    context.path = Path.ONE_SHOT
    for rank in range(count):
        status = wait_arrived(context, call, rank)
        if status != Status.OK:
            return status
    if count > 0:
        _reduce_slots(context, call, count)
    return Status.OK


@inline
def _post_input(context: Context, call: Call, source: int, destination: int, shared: int) -> None:
    """Post this rank's header, with the input in its slot if it is small and not shared."""
    size_bytes = call.size_bytes
    is_small = size_bytes <= context.one_shot_bytes
    if _waits_for_few(context, call, n_inputs(context, call)):
        goes_ahead(context)
    if is_small and not shared:
        copy_in(
            call,
            context.copy_posted,
            payload_of(context, context.sequence, context.rank, size_bytes),
            0,
            size_bytes,
            context.prefetch_bytes,
        )
    slot = slot_of(context, context.sequence, context.rank)
    if not is_small:
        store64(slot + HEADER_ADDRESS, call.source)
    post(context, call, source, destination)


@inline
def _move(context: Context, call: Call, source: int, destination: int, posts: int) -> int:
    """Post, wait for the others and reduce by the path that all have chosen; return a status.

    `posts` is False if the call was posted ahead.
    """
    size_bytes, count = call.size_bytes, n_inputs(context, call)
    shared = source != NOT_SHARED and (destination != NOT_SHARED or count == 0)
    is_small = size_bytes <= context.one_shot_bytes
    is_one_way = _is_one_way(context, call)
    is_shift = not is_one_way and _is_plain_shift(context, call)
    if posts:
        _post_input(context, call, source, destination, shared)
    staged_ahead = not is_small and not shared and not is_shift and not is_one_way
    if staged_ahead:
        stage_first_chunk(context, call)  # while the others arrive
    elif _waits_for_few(context, call, count):
        return _reduce_few(context, call, count)
    status = wait_all_arrived(context, call)
    if status != Status.OK:
        return status
    n_shared = _n_symmetric(context, call)
    if n_shared == context.world_size:
        context.path = Path.SYMMETRIC
        return reduce_symmetric(context, call)
    if is_small and n_shared == 0:
        context.path = Path.ONE_SHOT
        _reduce_slots(context, call, count)
        return Status.OK
    if is_shift and can_copy_once(context):
        context.path = Path.SINGLE_COPY
        return _shift(context, call)
    if not staged_ahead:
        status = have_stages(context)
        if status != Status.OK:
            return status
    if is_one_way:
        return _go_one_way(context, call)
    if not staged_ahead:
        stage_first_chunk(context, call)
    context.path = Path.STAGED
    return reduce_staged(context, call)


@inline
def _shared_offset(context: Context, call: Call, address: int) -> int:
    """Return an array's offset in this rank's arena if it is worth using, or NOT_SHARED."""
    size_bytes = call.size_bytes
    least_bytes = context.symmetric_min_bytes
    # Small inputs go through slots, so that ranks wait only for the ranks whose input they need.
    if call.flow == Flow.TO_ROOT or call.operands != Operands.ALL:
        least_bytes = max(least_bytes, context.one_shot_bytes + 1)
    if size_bytes < least_bytes or context.arena_bytes == 0 or not is_one_piece(call):
        return NOT_SHARED
    return arena_offset(context, address, size_bytes)


@inline
def _together(context: Context, call: Call, posts: int) -> int:
    source = _shared_offset(context, call, call.source)
    destination = _shared_offset(context, call, call.destination)
    status = _move(context, call, source, destination, posts)
    is_empty = call.operands == Operands.BEFORE_OWN and context.rank == 0
    if status == Status.OK and is_empty and context.path != Path.SINGLE_COPY:
        fill_with_identity(context, call, 0, call.size_bytes)
    return status


@compiled
def reduction_loop(context: Context, call: Call) -> int:
    """Run the reduction in the call block; return a status."""
    status = make_ready(context, call.size_bytes, context.one_shot_bytes)
    if status == Status.OK:
        status = begin(context, call)
    if status != Status.OK:
        return status
    if context.world_size == 1:
        _alone(context, call)
    else:
        status = _together(context, call, True)
        if status != Status.OK:
            return status
    close_record(context)
    return Status.OK


@compiled
def reduction_post(context: Context, call: Call) -> int:
    """Post a reduction ahead, without waiting; NOT_RUN if that is not possible."""
    size_bytes = call.size_bytes
    if size_bytes > context.one_shot_bytes or context.world_size == 1:
        return Status.NOT_RUN
    # The others may write shared memory as soon as all have posted.
    source = _shared_offset(context, call, call.source)
    if source != NOT_SHARED or _shared_offset(context, call, call.destination) != NOT_SHARED:
        return Status.NOT_RUN
    if make_ready(context, size_bytes, context.one_shot_bytes) != Status.OK:
        return Status.NOT_RUN  # Python handles it when the call is run
    status = begin_ahead(context, call)
    if status == Status.OK:
        _post_input(context, call, NOT_SHARED, NOT_SHARED, False)
    return status


@compiled
def reduction_finish(context: Context, call: Call) -> int:
    """Complete the call that `reduction_post` began; return a status."""
    status = _together(context, call, False)
    if status == Status.OK:
        close_record(context)
    return status
