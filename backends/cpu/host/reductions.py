"""all_reduce, reduce, scan and exclusive_scan within a host: one-shot, staged or symmetric.

They differ in which inputs make up which rank's result (`tables.n_inputs`). In a small call other
than all_reduce a rank waits only for the ranks whose input it needs. All ranks choose the same path
for a call: facts that a rank cannot know of others (is their buffer in shared memory?) come with
their headers, so no further round is needed after all have arrived.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.chunks import (
    FILLED,
    READ,
    count_chunks,
    keep_up,
    signal_chunk,
    wait_chunk,
)
from gpucoll.backends.cpu.host.segments import (
    copy_in,
    input_at,
    is_one_piece,
    output_at,
    run_bytes,
)
from gpucoll.backends.cpu.host.single_copy import can_copy_once, read_from
from gpucoll.backends.cpu.host.staged import reduce_staged, stage_first_chunk
from gpucoll.backends.cpu.host.symmetric import reduce_symmetric
from gpucoll.backends.cpu.host.tables import DESTINATIONS, SOURCES, n_inputs, reduce_inputs
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import call_copy, get, put, store64
from gpucoll.transport.shared.room import have_stages
from gpucoll.transport.shared.steps import (
    ARENA_BYTES,
    COLLECTIVE,
    DESTINATION,
    HEADER_ADDRESS,
    IDENTITY,
    ITEM_BYTES,
    NOT_RUN,
    NOT_SHARED,
    OK,
    PATH,
    RANK,
    ROOT,
    SEQUENCE,
    SIZE_BYTES,
    SOURCE,
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
from gpucoll.transport.shared.words import Call, Context, Path
from gpucoll.types import Collective

_ONE_SHOT_BYTES, _COPY_POSTED = int(Context.ONE_SHOT_BYTES), int(Context.COPY_POSTED)
_COPY_PLAIN, _PREFETCH_BYTES = int(Context.COPY_PLAIN), int(Context.PREFETCH_BYTES)
_SYMMETRIC_MIN_BYTES = int(Context.SYMMETRIC_MIN_BYTES)
_LOCAL, _ONE_SHOT = int(Path.LOCAL), int(Path.ONE_SHOT)
_STAGED, _SYMMETRIC = int(Path.STAGED), int(Path.SYMMETRIC)
_SINGLE_COPY, PREPARES = int(Path.SINGLE_COPY), int(Call.PREPARES)
_REDUCE, _SCAN = int(Collective.REDUCE), int(Collective.SCAN)
_EXCLUSIVE_SCAN = int(Collective.EXCLUSIVE_SCAN)
_PATTERN_BYTES = 16 << 10
_SHIFT_BYTES = 128 << 10
"""Size of the parts in which rank 1 reads an exclusive_scan and rank 0 overwrites what was read."""


@inline
def _fill_with_identity(context, call, start, stop):
    """Fill a part of the destination with the op's identity; everything before it is filled."""
    destination, copy = get(call, DESTINATION), get(context, _COPY_PLAIN)
    if start == 0:
        start = min(get(call, ITEM_BYTES), stop)
        call_copy(copy, destination, get(call, IDENTITY), start, 0)
    while start < stop:
        step = min(start, _PATTERN_BYTES, stop - start)  # from memory that is still in the caches
        call_copy(copy, destination + start, destination, step, 0)
        start += step


@inline
def _fill_all_with_identity(context, call):
    """Fill the destination with the op's identity: the result of no inputs."""
    _fill_with_identity(context, call, 0, get(call, SIZE_BYTES))


@inline
def _reduce_slots(context, call, count):
    """Reduce the first `count` ranks' payloads of this call, in order, into the destination."""
    size_bytes, sequence = get(call, SIZE_BYTES), get(context, SEQUENCE)
    sources, me = get(context, SOURCES), get(context, RANK)
    segment = done = 0
    while True:
        step = run_bytes(call, segment, done, size_bytes - done)
        for rank in range(count):
            payload = payload_of(context, sequence, rank, size_bytes)
            store64(sources + 8 * rank, payload + done)
        if me < count:
            store64(sources + 8 * me, input_at(call, segment, done))
        store64(get(context, DESTINATIONS), output_at(call, segment, done))
        reduce_inputs(context, call, get(context, DESTINATIONS), count, step, 0)
        done += step
        segment += 1
        if done >= size_bytes:
            return


@inline
def _n_symmetric(context, call):
    """Return how many ranks posted shared memory for their input and, if any, their output."""
    count, kind = 0, get(call, COLLECTIVE)
    for rank in range(get(context, WORLD_SIZE)):
        has_none = kind == _REDUCE and rank != get(call, ROOT)
        fills_itself = kind == _EXCLUSIVE_SCAN and rank == 0
        needs_destination = not (has_none or fills_itself)
        has_destination = posted_destination(context, rank) != NOT_SHARED
        if posted_source(context, rank) != NOT_SHARED and (
            has_destination or not needs_destination
        ):
            count += 1
    return count


@inline
def _alone(context, call):
    """Reduce over one rank: the op's preparation and finish, without any traffic."""
    put(context, PATH, _LOCAL)
    if get(call, COLLECTIVE) == _EXCLUSIVE_SCAN:
        _fill_all_with_identity(context, call)
        return
    _reduce_slots(context, call, 1)


@inline
def _is_plain_shift(context, call):
    """Return whether the call only gives rank 0's input to rank 1; the same on all ranks."""
    if get(call, COLLECTIVE) != _EXCLUSIVE_SCAN or get(context, WORLD_SIZE) != 2:
        return False
    return get(call, SIZE_BYTES) > get(context, _ONE_SHOT_BYTES) and get(call, PREPARES) == 0


@inline
def _give_shifted(context, call):
    """Read rank 0's input from its process, part by part, and report progress; on rank 1."""
    size_bytes, source = get(call, SIZE_BYTES), posted_address(context, 0)
    done = place = 0
    while done < size_bytes:
        step = min(_SHIFT_BYTES, size_bytes - done)
        status = read_from(context, 0, get(call, DESTINATION) + done, source + done, step)
        if status != OK:
            return status
        signal_chunk(context, READ, place)
        done += step
        place += 1
    return OK


@inline
def _fill_shifted(context, call):
    """Fill rank 0's result: in place right behind the reader, otherwise meanwhile."""
    size_bytes, is_in_place = get(call, SIZE_BYTES), get(call, SOURCE) == get(call, DESTINATION)
    done = place = 0
    while done < size_bytes:
        if is_in_place:
            status = wait_chunk(context, READ, place, 1)
            if status != OK:
                return status
        step = min(_SHIFT_BYTES, size_bytes - done)
        _fill_with_identity(context, call, done, done + step)
        done += step
        place += 1
    return OK


@inline
def _shift(context, call):
    """Give rank 0's input to rank 1, and rank 0 the identity; return a status."""
    if get(context, RANK) == 1:
        status = _give_shifted(context, call)
    else:
        status = _fill_shifted(context, call)
    if status != OK:
        return status
    count_chunks(context, (get(call, SIZE_BYTES) + _SHIFT_BYTES - 1) // _SHIFT_BYTES)
    keep_up(context, FILLED)
    keep_up(context, READ)
    signal_done(context)
    return wait_all_done(context, get(context, SEQUENCE))


@inline
def _waits_for_few(context, call, count):
    """Return whether this rank only needs the first `count` ranks, which need not wait for it."""
    kind = get(call, COLLECTIVE)
    is_small = get(call, SIZE_BYTES) <= get(context, _ONE_SHOT_BYTES)
    is_one_sided = kind == _SCAN or kind == _EXCLUSIVE_SCAN or (kind == _REDUCE and count == 0)
    return is_small and is_one_sided


@inline
def _reduce_few(context, call, count):
    """Reduce the payloads of the first `count` ranks, waiting for no others; return a status."""
    put(context, PATH, _ONE_SHOT)
    for rank in range(count):
        status = wait_arrived(context, call, rank)
        if status != OK:
            return status
    if count > 0:
        _reduce_slots(context, call, count)
    return OK


@inline
def _post_input(context, call, source, destination, shared):
    """Post this rank's header, with the input in its slot if it is small and not shared."""
    size_bytes = get(call, SIZE_BYTES)
    is_small = size_bytes <= get(context, _ONE_SHOT_BYTES)
    if _waits_for_few(context, call, n_inputs(context, call)):
        goes_ahead(context)
    if is_small and not shared:
        copy_in(
            call,
            get(context, _COPY_POSTED),
            payload_of(context, get(context, SEQUENCE), get(context, RANK), size_bytes),
            0,
            size_bytes,
            get(context, _PREFETCH_BYTES),
        )
    slot = slot_of(context, get(context, SEQUENCE), get(context, RANK))
    if not is_small:
        store64(slot + HEADER_ADDRESS, get(call, SOURCE))
    post(context, call, source, destination)


@inline
def _move(context, call, source, destination, posts):
    """Post, wait for the others and reduce by the path that all have chosen; return a status.

    `posts` is False if the call was posted ahead.
    """
    size_bytes, count = get(call, SIZE_BYTES), n_inputs(context, call)
    shared = source != NOT_SHARED and (destination != NOT_SHARED or count == 0)
    is_small = size_bytes <= get(context, _ONE_SHOT_BYTES)
    is_shift = _is_plain_shift(context, call)
    if posts:
        _post_input(context, call, source, destination, shared)
    staged_ahead = not is_small and not shared and not is_shift
    if staged_ahead:
        stage_first_chunk(context, call)  # while the others arrive
    elif _waits_for_few(context, call, count):
        return _reduce_few(context, call, count)
    status = wait_all_arrived(context, call)
    if status != OK:
        return status
    n_shared = _n_symmetric(context, call)
    if n_shared == get(context, WORLD_SIZE):
        put(context, PATH, _SYMMETRIC)
        return reduce_symmetric(context, call)
    if is_small and n_shared == 0:
        put(context, PATH, _ONE_SHOT)
        _reduce_slots(context, call, count)
        return OK
    if is_shift and can_copy_once(context):
        put(context, PATH, _SINGLE_COPY)
        return _shift(context, call)
    if not staged_ahead:
        status = have_stages(context)
        if status != OK:
            return status
        stage_first_chunk(context, call)
    put(context, PATH, _STAGED)
    return reduce_staged(context, call)


@inline
def _shared_offset(context, call, address):
    """Return an array's offset in this rank's arena if it is worth using, or NOT_SHARED."""
    size_bytes, kind = get(call, SIZE_BYTES), get(call, COLLECTIVE)
    least_bytes = get(context, _SYMMETRIC_MIN_BYTES)
    # Small inputs go through slots, so that ranks wait only for the ranks whose input they need.
    if kind == _REDUCE or kind == _SCAN or kind == _EXCLUSIVE_SCAN:
        least_bytes = max(least_bytes, get(context, _ONE_SHOT_BYTES) + 1)
    if size_bytes < least_bytes or get(context, ARENA_BYTES) == 0 or not is_one_piece(call):
        return NOT_SHARED
    return arena_offset(context, address, size_bytes)


@inline
def _together(context, call, posts):
    kind = get(call, COLLECTIVE)
    source = _shared_offset(context, call, get(call, SOURCE))
    destination = _shared_offset(context, call, get(call, DESTINATION))
    status = _move(context, call, source, destination, posts)
    is_empty = kind == _EXCLUSIVE_SCAN and get(context, RANK) == 0
    if status == OK and is_empty and get(context, PATH) != _SINGLE_COPY:
        _fill_all_with_identity(context, call)
    return status


@compiled
def reduction_loop(context, call):
    """Run the reduction in the call block; return a status."""
    status = make_ready(context, get(call, SIZE_BYTES), get(context, _ONE_SHOT_BYTES))
    if status == OK:
        status = begin(context, call)
    if status != OK:
        return status
    if get(context, WORLD_SIZE) == 1:
        _alone(context, call)
    else:
        status = _together(context, call, True)
        if status != OK:
            return status
    close_record(context)
    return OK


@compiled
def reduction_post(context, call):
    """Post a reduction ahead, without waiting; NOT_RUN if that is not possible."""
    size_bytes = get(call, SIZE_BYTES)
    if size_bytes > get(context, _ONE_SHOT_BYTES) or get(context, WORLD_SIZE) == 1:
        return NOT_RUN
    # The others may write shared memory as soon as all have posted.
    source = _shared_offset(context, call, get(call, SOURCE))
    if source != NOT_SHARED or _shared_offset(context, call, get(call, DESTINATION)) != NOT_SHARED:
        return NOT_RUN
    if make_ready(context, size_bytes, get(context, _ONE_SHOT_BYTES)) != OK:
        return NOT_RUN  # Python handles it when the call is run
    status = begin_ahead(context, call)
    if status == OK:
        _post_input(context, call, NOT_SHARED, NOT_SHARED, False)
    return status


@compiled
def reduction_finish(context, call):
    """Complete the call that `reduction_post` began; return a status."""
    status = _together(context, call, False)
    if status == OK:
        close_record(context)
    return status
