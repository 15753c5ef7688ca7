"""Reduction and movement of large private arrays, chunk by chunk, through stages in shared memory.

Each rank has stages that it uses in turn, at most three of them ahead of the others. Every rank
counts the chunks of all staged calls in the same way. A rank's *filled* word is the number of the
last chunk that its stages are ready to give; its *read* word is the number of the last chunk that
it has read from the others. The words of all ranks are in the lines `Context.filled` and
`Context.read`.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.pieces import input_piece, landing, largest_piece_bytes, piece_bytes
from gpucoll.backends.cpu.host.tuning import LANE_BYTES
from gpucoll.collectives import Flow, Operands
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_copy, call_refill, store64
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.filling import empty, fill
from gpucoll.transport.shared.flags import signal, wait
from gpucoll.transport.shared.operands import n_inputs, reduce_for_all, reduce_inputs
from gpucoll.transport.shared.steps import LINE
from gpucoll.transport.shared.words import Call, Context, Status

SLICE_ALIGNMENT = 256
"""Slices are whole blocks of the reduce kernel: only the last one has a remainder."""


@inline
def stage_of(context: Context, place: int, rank: int, n_stages: int) -> int:
    """Return the address of the stage of `rank` for chunk `place` of this call."""
    turn = (context.chunk + place) % n_stages
    return context.stages + (turn * context.world_size + rank) * context.chunk_bytes


@inline
def signal_chunk(context: Context, lines: int, place: int) -> None:
    """Announce that this rank has filled, or read, chunk `place` of this call."""
    signal(lines + context.rank * LINE, context.chunk + place + 1)


@inline
def wait_chunk(context: Context, lines: int, place: int, rank: int) -> int:
    """Wait until `rank` has filled, or read, chunk `place` of this call; return a status."""
    address = lines + rank * LINE
    return wait(context, address, context.chunk + place + 1)


@inline
def wait_chunk_of_all(context: Context, lines: int, place: int) -> int:
    """Wait until every other rank has filled, or read, chunk `place`; return a status."""
    me, world_size = context.rank, context.world_size
    for step in range(1, world_size):
        status = wait_chunk(context, lines, place, (me + step) % world_size)
        if status != Status.OK:
            return status
    return Status.OK


@inline
def count_chunks(context: Context, chunks: int) -> None:
    """Add a call's chunks to the count: it has ended."""
    context.chunk += chunks


@inline
def keep_up(context: Context, lines: int) -> None:
    """Advance this rank's word over the chunks in which it had no part.

    A word left behind by 2**31 chunks (hours of broadcasts from one root) would seem to be ahead.
    """
    signal(lines + context.rank * LINE, context.chunk)


@inline
def slice_bytes(size_bytes: int, world_size: int) -> int:
    """Return the size of one rank's slice of `size_bytes`."""
    share = (size_bytes + world_size - 1) // world_size
    return (share + SLICE_ALIGNMENT - 1) & ~(SLICE_ALIGNMENT - 1)


# --- inputs and outputs of several pieces ---------------------------------------------------------

# An input may be a list of arrays, reduced as if it were one array. The call's table has a row for
# each array: its end in the whole, and the addresses of its input and output minus its beginning in
# the whole. Adding an offset in the whole gives an address. A call without a table has one piece.


@inline
def segment_at(call: Call, offset: int) -> int:
    """Return the number of the piece that contains this offset in the whole."""
    low, high = 0, call.n_segments
    while low < high:
        middle = (low + high) // 2
        if call.segments[middle].end > offset:
            high = middle
        else:
            low = middle + 1
    return low


@inline
def run_bytes(call: Call, segment: int, offset: int, most_bytes: int) -> int:
    """Return how much of the whole is contiguous from this offset on, at most `most_bytes`."""
    if not call.segments:
        return most_bytes
    return min(call.segments[segment].end - offset, most_bytes)


@inline
def input_at(call: Call, segment: int, offset: int) -> int:
    """Return the address of an offset of the whole input."""
    if not call.segments:
        return call.source + offset
    return call.segments[segment].input + offset


@inline
def output_at(call: Call, segment: int, offset: int) -> int:
    """Return the address of an offset of the whole output."""
    if not call.segments:
        return call.destination + offset
    return call.segments[segment].output + offset


@inline
def copy_in(
    call: Call, kernel: int, destination: int, offset: int, size_bytes: int, ahead: int
) -> None:
    """Copy a part of the whole input to contiguous memory."""
    segment, done = segment_at(call, offset), 0
    while done < size_bytes:
        step = run_bytes(call, segment, offset + done, size_bytes - done)
        call_copy(kernel, destination + done, input_at(call, segment, offset + done), step, ahead)
        done += step
        segment += 1


@inline
def copy_out(
    call: Call, kernel: int, source: int, offset: int, size_bytes: int, ahead: int
) -> None:
    """Copy contiguous memory to a part of the whole output."""
    segment, done = segment_at(call, offset), 0
    while done < size_bytes:
        step = run_bytes(call, segment, offset + done, size_bytes - done)
        call_copy(kernel, output_at(call, segment, offset + done), source + done, step, ahead)
        done += step
        segment += 1


@inline
def is_one_piece(call: Call) -> bool:
    """Return whether input and output are one array each."""
    return not call.segments


# --- reduction ------------------------------------------------------------------------------------

# For chunk k every rank
#
# - *fills*: copies the slices that other ranks own into its own stage, and signals;
# - *reduces*: when all have filled, reduces its own slice, from its own array and the others'
#   stages, into its destination *and back into the others' stages*, and signals;
# - *drains*: when all have reduced, copies the other slices out of its own stage.
#
# The cost lies in cache lines that change hands, not in passes over memory. Results that come back
# in the lines that carried the input move each line twice; a separate result buffer would move it
# four times. A stage is drained and refilled in one pass. The order is reduce(k), then drain(k-1)
# with fill(k+2); source and destination may be the same array. Measurements:
# docs/decisions/0003-staged-ping-pong.md.


@inline
def _fill(context: Context, call: Call, place: int) -> None:
    """Copy the others' slices of chunk `place` of my source into my stage."""
    me, world_size = context.rank, context.world_size
    chunk_bytes = context.chunk_bytes
    offset = place * chunk_bytes
    size_bytes = min(chunk_bytes, call.size_bytes - offset)
    share = slice_bytes(size_bytes, world_size)
    stage = stage_of(context, place, me, layout.STAGES)
    for step in range(1, world_size):
        start = ((me + step) % world_size) * share
        stop = min(start + share, size_bytes)
        if stop > start:
            copy_in(
                call,
                context.copy_in,
                stage + start,
                offset + start,
                stop - start,
                context.prefetch_bytes,
            )


@inline
def _set_tables(
    context: Context, call: Call, place: int, segment: int, offset: int, start: int
) -> None:
    """Set the addresses of each rank's input and result, from `start` in a chunk on."""
    sources, results = context.sources, context.destinations
    for rank in range(context.world_size):
        stage = stage_of(context, place, rank, layout.STAGES) + start
        store64(sources + 8 * rank, stage)
        store64(results + 8 * rank, stage)
    mine = 8 * context.rank
    store64(sources + mine, input_at(call, segment, offset + start))
    store64(results + mine, output_at(call, segment, offset + start))


@inline
def _reduce(context: Context, call: Call, place: int) -> None:
    """Reduce my slice of chunk `place` into my destination and into other ranks' stages."""
    me, world_size = context.rank, context.world_size
    chunk_bytes = context.chunk_bytes
    offset = place * chunk_bytes
    size_bytes = min(chunk_bytes, call.size_bytes - offset)
    share = slice_bytes(size_bytes, world_size)
    start = me * share
    stop = min(start + share, size_bytes)
    if stop <= start:
        return
    segment, done = segment_at(call, offset + start), start
    while done < stop:
        step = run_bytes(call, segment, offset + done, stop - done)
        _set_tables(context, call, place, segment, offset, done)
        reduce_for_all(context, call, step, context.prefetch_bytes)
        done += step
        segment += 1


@inline
def _drain(context: Context, call: Call, place: int, refills: int) -> int:
    """Copy each other rank's slice of chunk `place` out of my stage as soon as it is reduced.

    With `refills`, chunk ``place + STAGES`` goes into the stage in the same pass.
    """
    me, world_size = context.rank, context.world_size
    chunk_bytes, ahead = context.chunk_bytes, context.prefetch_bytes
    offset = place * chunk_bytes
    size_bytes = min(chunk_bytes, call.size_bytes - offset)
    share = slice_bytes(size_bytes, world_size)
    has_result = n_inputs(context, call) > 0
    stage = stage_of(context, place, me, layout.STAGES)
    destination = call.destination + offset
    refill = call.source + offset + layout.STAGES * chunk_bytes
    for step in range(1, world_size):
        rank = (me + step) % world_size
        status = wait_chunk(context, context.read, place, rank)
        if status != Status.OK:
            return status
        start = rank * share
        size = min(start + share, size_bytes) - start
        if size <= 0:
            continue
        if not has_result:
            if refills:
                call_copy(context.copy_posted, stage + start, refill + start, size, ahead)
        elif refills:
            call_refill(
                context.refill, destination + start, stage + start, refill + start, size, ahead
            )
        else:
            kernel = context.copy_out
            copy_out(call, kernel, stage + start, offset + start, size, ahead)
    return Status.OK


@inline
def stage_first_chunk(context: Context, call: Call) -> None:
    """Fill the first chunk without signalling it: perhaps no rank needs it."""
    _fill(context, call, 0)


@inline
def _fill_and_signal(context: Context, call: Call, place: int) -> None:
    _fill(context, call, place)
    signal_chunk(context, context.filled, place)


@inline
def reduce_staged(context: Context, call: Call) -> int:
    """Reduce chunk by chunk, with the first chunk already filled; return a status."""
    size_bytes, chunk_bytes = call.size_bytes, context.chunk_bytes
    chunks = (size_bytes + chunk_bytes - 1) // chunk_bytes
    signal_chunk(context, context.filled, 0)
    for place in range(1, min(chunks, layout.STAGES)):
        _fill_and_signal(context, call, place)
    for place in range(chunks + 1):
        if place < chunks:
            status = wait_chunk_of_all(context, context.filled, place)
            if status != Status.OK:
                return status
            _reduce(context, call, place)
            signal_chunk(context, context.read, place)
        if place > 0:
            following = place - 1 + layout.STAGES
            # In whole chunks the slices match; in a single array the pieces do.
            refills = (following + 1) * chunk_bytes <= size_bytes and is_one_piece(call)
            status = _drain(context, call, place - 1, refills)
            if status != Status.OK:
                return status
            if refills:
                signal_chunk(context, context.filled, following)
            elif following < chunks:
                _fill_and_signal(context, call, following)
    count_chunks(context, chunks)
    return Status.OK


# --- one way, between two ranks -------------------------------------------------------------------

# Of two ranks, one needs nothing from the other in a reduce or an exclusive_scan. It gives its
# whole input, at most three chunks ahead, and the other one reduces alone: no line is written by
# both.


@inline
def _chunk_size(context: Context, call: Call, place: int) -> int:
    return min(context.chunk_bytes, call.size_bytes - place * context.chunk_bytes)


@inline
def give_staged(context: Context, call: Call, receiver: int) -> int:
    """Give my whole input to the other rank, which has read it at the end; return a status."""
    chunk_bytes = context.chunk_bytes
    chunks = (call.size_bytes + chunk_bytes - 1) // chunk_bytes
    for place in range(chunks + layout.STAGES):
        if place >= layout.STAGES:
            status = wait_chunk(context, context.read, place - layout.STAGES, receiver)
            if status != Status.OK:
                return status
        if place < chunks:
            offset, size_bytes = place * chunk_bytes, _chunk_size(context, call, place)
            stage = stage_of(context, place, context.rank, context.n_stages)
            segment, done = segment_at(call, offset), 0
            while done < size_bytes:
                step = run_bytes(call, segment, offset + done, size_bytes - done)
                fill(context, stage + done, input_at(call, segment, offset + done), step)
                done += step
                segment += 1
            signal_chunk(context, context.filled, place)
    count_chunks(context, chunks)
    keep_up(context, context.read)
    return Status.OK


@inline
def _fold(context: Context, call: Call, stage: int, sender: int, place: int) -> None:
    """Reduce a chunk of the other rank's input and of mine into my destination."""
    offset, size_bytes = place * context.chunk_bytes, _chunk_size(context, call, place)
    sources, results = context.sources, context.destinations
    segment, done = segment_at(call, offset), 0
    while done < size_bytes:
        step = run_bytes(call, segment, offset + done, size_bytes - done)
        store64(sources + 8 * sender, stage + done)
        store64(sources + 8 * context.rank, input_at(call, segment, offset + done))
        store64(results, output_at(call, segment, offset + done))
        reduce_inputs(context, call, results, 2, step, context.prefetch_bytes)
        done += step
        segment += 1


@inline
def take_staged(context: Context, call: Call, sender: int) -> int:
    """Make my result from the other rank's input, and mine if it is an operand."""
    chunk_bytes, ahead = context.chunk_bytes, context.prefetch_bytes
    chunks = (call.size_bytes + chunk_bytes - 1) // chunk_bytes
    for place in range(chunks):
        status = wait_chunk(context, context.filled, place, sender)
        if status != Status.OK:
            return status
        stage = stage_of(context, place, sender, context.n_stages)
        if call.operands == Operands.BEFORE_OWN:
            size_bytes = _chunk_size(context, call, place)
            copy_out(call, context.copy_take, stage, place * chunk_bytes, size_bytes, ahead)
        else:
            _fold(context, call, stage, sender, place)
        signal_chunk(context, context.read, place)
    count_chunks(context, chunks)
    keep_up(context, context.filled)
    return Status.OK


# --- movement -------------------------------------------------------------------------------------

# For chunk k a sender *fills* its stage with the next part of each of its pieces, and a receiver
# *reads* its parts from the others' stages. Chunk k is filled while chunk k-1 is read and the stage
# of k-2 is given back.


@inline
def _lane_bytes(context: Context, call: Call) -> int:
    """Return how much of each piece a chunk carries: a spread stage has a lane for each rank."""
    if not call.spreads:
        return context.chunk_bytes
    share = context.chunk_bytes // context.world_size
    return share & ~(LANE_BYTES - 1)


@inline
def _part_bytes(
    context: Context, call: Call, sender: int, receiver: int, place: int, lane_bytes: int
) -> int:
    """Return how much of a piece chunk `place` carries; zero or less after the piece's end."""
    return min(lane_bytes, piece_bytes(context, call, sender, receiver) - place * lane_bytes)


@inline
def _fill_parts(context: Context, call: Call, place: int, lane_bytes: int) -> None:
    """Copy the next part of each piece that this rank sends into its stage, and signal."""
    me, world_size = context.rank, context.world_size
    stage, start = stage_of(context, place, me, context.n_stages), place * lane_bytes
    if not call.spreads:
        size_bytes = _part_bytes(context, call, me, me, place, lane_bytes)
        if size_bytes > 0:
            fill(context, stage, call.source + start, size_bytes)
    else:
        for step in range(1, world_size):
            rank = (me + step) % world_size
            size_bytes = _part_bytes(context, call, me, rank, place, lane_bytes)
            if size_bytes > 0:
                source = input_piece(context, call, rank) + start
                fill(context, stage + rank * lane_bytes, source, size_bytes)
    signal_chunk(context, context.filled, place)


@inline
def _part_in_stage(context: Context, call: Call, rank: int, place: int, lane_bytes: int) -> int:
    """Return the address of this rank's part in the stage of `rank`."""
    lane = context.rank * lane_bytes if call.spreads else 0
    return stage_of(context, place, rank, context.n_stages) + lane


@inline
def _copy_parts(context: Context, call: Call, place: int, lane_bytes: int) -> int:
    me, world_size = context.rank, context.world_size
    copy = context.copy_exchanged if call.flow == Flow.ALL else context.copy_take
    for step in range(1, world_size):
        rank = (me + step) % world_size
        if call.flow == Flow.FROM_ROOT and rank != call.root:
            continue
        status = wait_chunk(context, context.filled, place, rank)
        if status != Status.OK:
            return status
        size_bytes = _part_bytes(context, call, rank, me, place, lane_bytes)
        if size_bytes > 0:
            empty(
                context,
                copy,
                call.destination + landing(call, rank) + place * lane_bytes,
                _part_in_stage(context, call, rank, place, lane_bytes),
                size_bytes,
                piece_bytes(context, call, rank, me),
            )
    return Status.OK


@inline
def _reduce_parts(context: Context, call: Call, place: int, lane_bytes: int) -> int:
    me, world_size = context.rank, context.world_size
    status = wait_chunk_of_all(context, context.filled, place)
    size_bytes = _part_bytes(context, call, me, me, place, lane_bytes)
    if status != Status.OK or size_bytes <= 0:
        return status
    sources, start = context.sources, place * lane_bytes
    for rank in range(world_size):
        store64(sources + 8 * rank, _part_in_stage(context, call, rank, place, lane_bytes))
    store64(sources + 8 * me, input_piece(context, call, me) + start)
    store64(context.destinations, call.destination + start)
    reduce_inputs(
        context, call, context.destinations, world_size, size_bytes, context.prefetch_bytes
    )
    return Status.OK


@inline
def _read_parts(context: Context, call: Call, place: int, lane_bytes: int) -> int:
    """Take this rank's parts of chunk `place` out of the others' stages, and signal."""
    if call.kernel != 0:
        status = _reduce_parts(context, call, place, lane_bytes)
    else:
        status = _copy_parts(context, call, place, lane_bytes)
    if status == Status.OK:
        signal_chunk(context, context.read, place)
    return status


@inline
def _wait_read(context: Context, call: Call, place: int) -> int:
    """Wait until all ranks that need chunk `place` of this rank's stage have read it."""
    if call.flow == Flow.TO_ROOT:
        return wait_chunk(context, context.read, place, call.root)
    return wait_chunk_of_all(context, context.read, place)


@inline
def move_staged(context: Context, call: Call, sends: int, receives: int) -> int:
    """Move chunk by chunk; return a status. After that no rank reads this rank's stages."""
    lane_bytes = _lane_bytes(context, call)
    chunks = (largest_piece_bytes(context, call) + lane_bytes - 1) // lane_bytes
    if sends:
        for place in range(min(chunks, layout.STAGES)):
            _fill_parts(context, call, place, lane_bytes)
    for place in range(chunks + 1):
        if receives and place < chunks:
            status = _read_parts(context, call, place, lane_bytes)
            if status != Status.OK:
                return status
        if sends and place > 0:
            status = _wait_read(context, call, place - 1)
            if status != Status.OK:
                return status
            following = place - 1 + layout.STAGES
            if following < chunks:
                _fill_parts(context, call, following, lane_bytes)
    count_chunks(context, chunks)
    if not sends:
        keep_up(context, context.filled)
    if not receives:
        keep_up(context, context.read)
    return Status.OK
