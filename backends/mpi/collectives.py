"""A collective through MPI, from beginning to end in compiled code.

The ranks of a host compare their signatures first, as in every call of the CPU backend. Then each
rank calls MPI. Movements use the MPI function of the same name; so do reductions if MPI has the
dtype and op with the same meaning. All other reductions exchange slices by MPI messages, apply our
kernel in rank order, and return the results, with as many bytes as a ring.
"""

from __future__ import annotations

from gpucoll.backends.cpu.host.pieces import block_bytes, block_offset
from gpucoll.backends.mpi.steps import (
    broadcast_by_messages,
    combine,
    copied,
    copy_plain,
    exchange,
    finish,
    issue,
    next_request,
    no_memory,
    scratch_of,
    set_move,
    set_number,
    vector_of,
)
from gpucoll.backends.mpi.words import GATHERED_BYTES, PIECE_BYTES, MpiWords
from gpucoll.collectives import Flow, Operands
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import call_reduce
from gpucoll.transport.shared.libc import free
from gpucoll.transport.shared.operands import fill_with_identity, n_operands
from gpucoll.transport.shared.steps import NOT_SHARED, begin, close_record, post, wait_all_arrived
from gpucoll.transport.shared.words import Call, Context, Path, Status
from gpucoll.transport.tcp import exchange_words

# --- movements ------------------------------------------------------------------------------------


@inline
def broadcast(context: Context, words: MpiWords, call: Call) -> int:
    """Broadcast, in pieces if the size exceeds MPI's counts; return a status."""
    is_root = call.root == words.rank
    size_bytes, done = call.block_bytes, 0
    status: int = Status.OK
    comm, byte, root = words.communicator, words.byte, call.root
    step = size_bytes if words.has_large_counts != 0 else words.most_bytes
    memory = call.source if is_root else call.destination
    if words.is_on_gpu != 0:
        landing = call.destination
        return broadcast_by_messages(context, words, root, memory, landing, size_bytes)
    while done < size_bytes and status == Status.OK:
        count, request = min(step, size_bytes - done), next_request(words)
        issue(words, words.broadcast, memory + done, count, byte, root, comm, request)
        status = finish(context, words)
        done += count
    if is_root and call.destination != 0:
        copy_plain(context, call.destination, call.source, size_bytes)
    return status


@inline
def _fits(words: MpiWords, call: Call) -> bool:
    """Return whether MPI's functions can span all blocks; the same on all ranks.

    For GPU memory only messages are used, because Open MPI has no nonblocking collectives for it.
    """
    if words.is_on_gpu != 0:
        return False
    if words.has_large_counts != 0:
        return True
    if call.pieces:
        return False  # a rank does not know the sizes of others
    return block_offset(call, words.world_size) <= words.most_bytes


@inline
def _set_counts(words: MpiWords, call: Call, which: int) -> None:
    """Set the counts and displacements of the blocks of all ranks."""
    for rank in range(words.world_size):
        set_number(words, which, rank, block_bytes(call, rank))
        set_number(words, which + 1, rank, block_offset(call, rank))


@inline
def _all_gather(context: Context, words: MpiWords, call: Call, source: int) -> int:
    comm, byte, me = words.communicator, words.byte, words.rank
    landing, mine, request = call.destination, block_bytes(call, me), next_request(words)
    if not call.offsets:
        issue(words, words.all_gather, source, mine, byte, landing, mine, byte, comm, request)
    else:
        _set_counts(words, call, 0)
        counts, starts = vector_of(words, 0), vector_of(words, 1)
        function = words.all_gather_counts
        issue(words, function, source, mine, byte, landing, counts, starts, byte, comm, request)
    return finish(context, words)


@inline
def _gather(context: Context, words: MpiWords, call: Call, source: int) -> int:
    comm, byte, me = words.communicator, words.byte, words.rank
    landing, mine, root = call.destination, block_bytes(call, me), call.root
    request = next_request(words)
    if not call.offsets:
        issue(words, words.gather, source, mine, byte, landing, mine, byte, root, comm, request)
    else:
        _set_counts(words, call, 0)
        counts, starts = vector_of(words, 0), vector_of(words, 1)
        function = words.gather_counts
        issue(
            words, function, source, mine, byte, landing, counts, starts, byte, root, comm, request
        )
    return finish(context, words)


@inline
def _scatter(context: Context, words: MpiWords, call: Call, landing: int) -> int:
    comm, byte, me = words.communicator, words.byte, words.rank
    source, mine, root = call.source, block_bytes(call, me), call.root
    request = next_request(words)
    if not call.offsets:
        issue(words, words.scatter, source, mine, byte, landing, mine, byte, root, comm, request)
    else:
        _set_counts(words, call, 0)
        counts, starts = vector_of(words, 0), vector_of(words, 1)
        function = words.scatter_counts
        issue(
            words, function, source, counts, starts, byte, landing, mine, byte, root, comm, request
        )
    return finish(context, words)


@inline
def _received_start(call: Call, rank: int) -> int:
    """Return the offset for an all_to_all's block from a rank."""
    if call.landings:
        return call.landings[rank]
    return call.block_bytes * rank


@inline
def _received_bytes(words: MpiWords, call: Call, rank: int) -> int:
    if call.pieces:
        return call.pieces[words.world_size + rank]
    return call.block_bytes


@inline
def _all_to_all(context: Context, words: MpiWords, call: Call, source: int) -> int:
    comm, byte, landing = words.communicator, words.byte, call.destination
    request = next_request(words)
    if not call.pieces:
        count = call.block_bytes
        issue(words, words.all_to_all, source, count, byte, landing, count, byte, comm, request)
    else:
        _set_counts(words, call, 0)
        for rank in range(words.world_size):
            set_number(words, 2, rank, _received_bytes(words, call, rank))
            set_number(words, 3, rank, _received_start(call, rank))
        counts, starts = vector_of(words, 0), vector_of(words, 1)
        received, landings = vector_of(words, 2), vector_of(words, 3)
        function = words.all_to_all_counts
        issue(
            words,
            function,
            source,
            counts,
            starts,
            byte,
            landing,
            received,
            landings,
            byte,
            comm,
            request,
        )
    return finish(context, words)


@inline
def _move_pairwise(context: Context, words: MpiWords, call: Call, source: int) -> int:
    """Do any movement of blocks by messages, if MPI's functions cannot span all blocks."""
    me, root, landing = words.rank, call.root, call.destination
    is_to_all = call.flow == Flow.ALL
    for rank in range(words.world_size):
        origin, sent, at, received = source, 0, landing, 0
        if call.spreads and call.gathers:
            origin, sent = source + block_offset(call, rank), block_bytes(call, rank)
            at, received = landing + _received_start(call, rank), _received_bytes(words, call, rank)
        elif call.spreads:
            if me == root:
                origin, sent = source + block_offset(call, rank), block_bytes(call, rank)
            if rank == root:
                received = block_bytes(call, me)
        else:
            if is_to_all or rank == root:
                sent = block_bytes(call, me)
            if is_to_all or me == root:
                at, received = landing + block_offset(call, rank), block_bytes(call, rank)
        set_move(words, rank, origin, sent, at, received)
    return exchange(context, words)


@inline
def _move_blocks(context: Context, words: MpiWords, call: Call, source: int) -> int:
    me = words.rank
    if not _fits(words, call):
        return _move_pairwise(context, words, call, source)
    if call.flow == Flow.ALL:
        if call.spreads:
            return _all_to_all(context, words, call, source)
        return _all_gather(context, words, call, source)
    is_root, mine = call.root == me, block_offset(call, me)
    if call.spreads:
        landing = call.destination
        if is_root and landing == source + mine:
            landing = words.in_place
        return _scatter(context, words, call, landing)
    if is_root and source == call.destination + mine:
        source = words.in_place
    return _gather(context, words, call, source)


@inline
def _reads_what_it_writes(words: MpiWords, call: Call) -> bool:
    """Return whether this rank's input is a part of its output, which MPI does not permit."""
    if call.flow != Flow.ALL:
        return False
    start = 0 if call.spreads else block_offset(call, words.rank)
    return call.source == call.destination + start


@inline
def move(context: Context, words: MpiWords, call: Call) -> int:
    """Do a movement; from a copy of the input if it is in place with one block per rank."""
    source = call.source
    if not _reads_what_it_writes(words, call):
        return _move_blocks(context, words, call, source)
    size_bytes = block_bytes(call, words.rank)
    if call.spreads:
        size_bytes = block_offset(call, words.world_size)
    copy = copied(context, source, size_bytes)
    if copy == 0:
        return no_memory(context)
    status = _move_blocks(context, words, call, copy)
    if status == Status.OK:  # else MPI may still read it
        free(copy)
    return status


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
        free(copy)
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
def _combine_slices(words: MpiWords, call: Call, scratch: int, width: int, mine_bytes: int) -> None:
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
    _combine_slices(words, call, scratch, width, mine_bytes)
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
        largest = max(largest, block_bytes(call, rank))
    width = min(largest, PIECE_BYTES // call.item_bytes * call.item_bytes)
    scratch = scratch_of(words, world_size * width)
    if scratch == 0 and width > 0:
        return no_memory(context)
    done = 0
    status: int = Status.OK
    # In place, the result replaces this rank's block of the input, which has been copied by then.
    while done < largest and status == Status.OK:
        mine_bytes = max(min(block_bytes(call, me) - done, width), 0)
        for rank in range(world_size):
            source = call.source + block_offset(call, rank) + done
            size_bytes = max(min(block_bytes(call, rank) - done, width), 0)
            set_move(words, rank, source, size_bytes, scratch + rank * width, mine_bytes)
        status = exchange(context, words)
        if status == Status.OK:
            landing = call.destination + done
            combine(words, call, landing, scratch, width, world_size, mine_bytes)
        done += width
    return status


# --- the loop -------------------------------------------------------------------------------------


@inline
def _run(context: Context, words: MpiWords, call: Call) -> int:
    if call.mpi_operation != 0:
        return reduce_by_mpi(context, words, call)
    if call.kernel == 0:
        if not call.spreads and not call.gathers:
            return broadcast(context, words, call)
        return move(context, words, call)
    if call.spreads:
        return reduce_blocks(context, words, call)
    return reduce_by_kernels(context, words, call)


@compiled_when_used(exchange_words.__name__)
def mpi_call(context: Context, call: Call) -> int:
    """Run the collective in the call block through MPI; return a status."""
    status = begin(context, call)
    if status != Status.OK:
        return status
    post(context, call, NOT_SHARED, NOT_SHARED)
    if context.world_size > 1:
        status = wait_all_arrived(context, call)
        if status != Status.OK:
            return status
    context.path = Path.MPI
    status = _run(context, MpiWords(call.mpi), call)
    if status == Status.OK:
        close_record(context)
    return status
