"""Reductions through MPI: by MPI itself, or in slices by our kernel in rank order."""

from __future__ import annotations

from gpucoll.backends.mpi.buffers import bytes_of, copied, no_memory, start_of
from gpucoll.backends.mpi.steps import (
    combine,
    exchange,
    finish,
    issue,
    next_request,
    release,
    scratch_of,
    set_move,
)
from gpucoll.backends.mpi.words import GATHERED_BYTES, PIECE_BYTES, MpiWords
from gpucoll.collectives import Flow, Operands
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_reduce
from gpucoll.transport.shared.operands import fill_with_identity, n_operands
from gpucoll.transport.shared.words import Call, Context, Status

# --- reductions that MPI does ---------------------------------------------------------------------


@inline
def _reduce_piece(words: MpiWords, call: Call, source: int, destination: int, count: int) -> None:
    """Issue MPI's own reduction of `count` elements."""
    dtype, operation, comm = call.mpi_dtype, call.mpi_operation, words.communicator
    if call.flow == Flow.TO_ROOT:
        if source == destination:
            source = words.in_place  # on the root only
        root, request = call.root, next_request(words)
        issue(
            words, words.reduce, source, destination, count, dtype, operation, root, comm, request
        )
        return
    function = words.all_reduce
    if call.operands == Operands.UP_TO_OWN:
        function = words.scan
    elif call.operands == Operands.BEFORE_OWN:
        function = words.exclusive_scan
    request = next_request(words)
    issue(words, function, source, destination, count, dtype, operation, comm, request)


@inline
def _reduce_from(context: Context, words: MpiWords, call: Call, source: int) -> int:
    size_bytes, done = call.size_bytes, 0
    status: int = Status.OK
    item_bytes, step = call.item_bytes, call.size_bytes
    if words.has_large_counts == 0:
        step = min(step, words.most_bytes // item_bytes * item_bytes)
    destination = call.destination
    gets = n_operands(call, words.rank, words.world_size) >= 0
    while done < size_bytes and status == Status.OK:
        piece_bytes = min(step, size_bytes - done)
        landing = destination + done if gets else 0
        _reduce_piece(words, call, source + done, landing, piece_bytes // item_bytes)
        status = finish(context, words)
        if status == Status.OK and gets and call.mpi_divides != 0:
            inputs = words.inputs
            inputs[0] = landing
            count = piece_bytes // call.part_bytes
            call_reduce(call.kernel, inputs, 1, inputs, 1, count, call.parameter, 0)
        done += piece_bytes
    if call.operands == Operands.BEFORE_OWN and words.rank == 0 and status == Status.OK:
        fill_with_identity(context, call, 0, size_bytes)
    return status


@inline
def reduce_by_mpi(context: Context, words: MpiWords, call: Call) -> int:
    """Have MPI reduce private arrays."""
    source = call.source
    if call.flow == Flow.TO_ROOT or source != call.destination:
        return _reduce_from(context, words, call, source)
    copy = copied(context, source, call.size_bytes)
    if copy == 0:
        return no_memory(context)
    status = _reduce_from(context, words, call, copy)
    if status == Status.OK:  # else MPI may still read it
        release(copy)
    return status


# --- reductions by our kernels --------------------------------------------------------------------


@inline
def _reduce_gathered(context: Context, words: MpiWords, call: Call) -> int:
    """Give every rank all inputs, of which it combines those that it needs: for small arrays."""
    size_bytes, comm = call.size_bytes, words.communicator
    scratch = scratch_of(words, size_bytes * words.world_size)
    if scratch == 0:
        return no_memory(context)
    byte, request = words.byte, next_request(words)
    source = call.source
    issue(
        words, words.all_gather, source, size_bytes, byte, scratch, size_bytes, byte, comm, request
    )
    status = finish(context, words)
    if status == Status.OK:
        n_ranks = n_operands(call, words.rank, words.world_size)
        if n_ranks > 0:
            combine(words, call, call.destination, scratch, size_bytes, n_ranks, size_bytes)
        elif n_ranks == 0:
            fill_with_identity(context, call, 0, size_bytes)
    return status


@inline
def _slice_start(words: MpiWords, call: Call, rank: int, size_bytes: int) -> int:
    """Return the start of a rank's slice of a piece: whole elements, spread evenly."""
    item_bytes = call.item_bytes
    return size_bytes // item_bytes * rank // words.world_size * item_bytes


@inline
def _combine_slices(
    context: Context, words: MpiWords, call: Call, scratch: int, width: int, mine_bytes: int
) -> None:
    """Combine this rank's slices of all inputs, for the ranks that get them, after the inputs."""
    world_size = words.world_size
    results = scratch + world_size * width
    if call.operands == Operands.ALL:
        combine(words, call, results, scratch, width, world_size, mine_bytes)
        return
    for rank in range(world_size):
        n_ranks = n_operands(call, rank, world_size)
        if n_ranks > 0:
            combine(words, call, results + rank * width, scratch, width, n_ranks, mine_bytes)


@inline
def _reduce_slices(
    context: Context, words: MpiWords, call: Call, done: int, size_bytes: int
) -> int:
    """Reduce a piece: each rank reduces its slice, and sends it to the ranks that get it."""
    me, world_size, is_scan = words.rank, words.world_size, call.operands != Operands.ALL
    mine_bytes = _slice_start(words, call, me + 1, size_bytes) - _slice_start(
        words, call, me, size_bytes
    )
    width = (mine_bytes + 63) // 64 * 64
    scratch = scratch_of(words, width * world_size * (2 if is_scan else 1) + width)
    if scratch == 0 and width > 0:
        return no_memory(context)
    source, destination = call.source + done, call.destination + done
    for rank in range(world_size):
        start = _slice_start(words, call, rank, size_bytes)
        stop = _slice_start(words, call, rank + 1, size_bytes)
        landing = scratch + rank * width
        set_move(words, rank, source + start, stop - start, landing, mine_bytes)
    status = exchange(context, words)
    if status != Status.OK:
        return status
    _combine_slices(context, words, call, scratch, width, mine_bytes)
    for rank in range(world_size):
        start = _slice_start(words, call, rank, size_bytes)
        stop = _slice_start(words, call, rank + 1, size_bytes)
        gets = n_operands(call, rank, world_size) > 0
        result = scratch + (world_size + (rank if is_scan else 0)) * width
        set_move(
            words,
            rank,
            result,
            mine_bytes if gets else 0,
            destination + start,
            stop - start if n_operands(call, me, world_size) > 0 else 0,
        )
    return exchange(context, words)


@inline
def reduce_by_kernels(context: Context, words: MpiWords, call: Call) -> int:
    """Reduce, or scan, by kernels if MPI lacks the same operation; return a status."""
    size_bytes, done = call.size_bytes, 0
    status: int = Status.OK
    if size_bytes * words.world_size <= GATHERED_BYTES:
        return _reduce_gathered(context, words, call) if size_bytes > 0 else Status.OK
    step = PIECE_BYTES // call.item_bytes * call.item_bytes
    while done < size_bytes and status == Status.OK:
        piece_bytes = min(step, size_bytes - done)
        status = _reduce_slices(context, words, call, done, piece_bytes)
        done += piece_bytes
    if call.operands == Operands.BEFORE_OWN and words.rank == 0 and status == Status.OK:
        fill_with_identity(context, call, 0, size_bytes)
    return status


@inline
def reduce_blocks(context: Context, words: MpiWords, call: Call) -> int:
    """Give each rank its block of the combined inputs, one piece of each block at a time."""
    me, world_size, largest = words.rank, words.world_size, 0
    for rank in range(world_size):
        largest = max(largest, bytes_of(call, rank))
    width = min(largest, PIECE_BYTES // call.item_bytes * call.item_bytes)
    scratch = scratch_of(words, world_size * width)
    if scratch == 0 and width > 0:
        return no_memory(context)
    done = 0
    status: int = Status.OK
    # In place, the result replaces this rank's block of the input, which has been copied by then.
    while done < largest and status == Status.OK:
        mine_bytes = max(min(bytes_of(call, me) - done, width), 0)
        for rank in range(world_size):
            source = call.source + start_of(call, rank) + done
            size_bytes = max(min(bytes_of(call, rank) - done, width), 0)
            set_move(words, rank, source, size_bytes, scratch + rank * width, mine_bytes)
        status = exchange(context, words)
        if status == Status.OK:
            landing = call.destination + done
            combine(words, call, landing, scratch, width, world_size, mine_bytes)
        done += width
    return status
