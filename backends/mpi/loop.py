"""A collective through MPI, as compiled code from its beginning to its end.

The ranks of a host compare their signatures first, as in every call of the CPU backend. Then each
calls MPI: the function of that name, for reductions where MPI has the dtype and op and means the
same by it. All others are an exchange of slices by MPI's messages, our kernel in rank order, and
the way back: as many bytes as a ring.
"""

from __future__ import annotations

import numpy as np

from gpucoll.backends.mpi.steps import (
    BYTE,
    COMMUNICATOR,
    COPY,
    HAS_LARGE_COUNTS,
    IN_PLACE,
    IS_ON_GPU,
    MOST_BYTES,
    RANK,
    WORLD_SIZE,
    allocate,
    broadcast_by_messages,
    combine,
    exchange,
    finish,
    issue,
    next_request,
    release,
    scratch_of,
    set_move,
    set_number,
    vector_of,
)
from gpucoll.backends.mpi.words import GATHERED_BYTES, PIECE_BYTES, Word
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import call_copy, call_reduce, get, load64, put
from gpucoll.transport.shared.flags import give_up
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.steps import (
    DESTINATION,
    IDENTITY,
    ITEM_BYTES,
    KERNEL,
    NOT_SHARED,
    OK,
    PARAMETER,
    PART_BYTES,
    PATH,
    ROOT,
    SIZE_BYTES,
    SOURCE,
    begin,
    close_record,
    post,
    wait_all_arrived,
)
from gpucoll.transport.shared.words import Call, Context, Path, Status
from gpucoll.transport.tcp import exchange_words
from gpucoll.types import Collective

_WORDS, _DTYPE, _OPERATION = int(Call.MPI), int(Call.MPI_DTYPE), int(Call.MPI_OPERATION)
_OFFSETS, _PIECES, _BLOCK_BYTES = int(Call.OFFSETS), int(Call.PIECES), int(Call.BLOCK_BYTES)
_COLLECTIVE, _LANDINGS = int(Call.MPI_COLLECTIVE), int(Call.LANDINGS)
_DIVIDES = int(Call.MPI_DIVIDES)
_INPUTS = int(Word.INPUTS)
_N_HERE, _CONTEXT_RANK = int(Context.WORLD_SIZE), int(Context.RANK)
_ALL_REDUCE, _REDUCE = int(Collective.ALL_REDUCE), int(Collective.REDUCE)
_SCAN, _EXCLUSIVE_SCAN = int(Collective.SCAN), int(Collective.EXCLUSIVE_SCAN)
_REDUCE_SCATTER, _BROADCAST = int(Collective.REDUCE_SCATTER), int(Collective.BROADCAST)
_ALL_GATHER, _GATHER = int(Collective.ALL_GATHER), int(Collective.GATHER)
_SCATTER, _ALL_TO_ALL = int(Collective.SCATTER), int(Collective.ALL_TO_ALL)
_F_ALL_REDUCE, _F_REDUCE = int(Word.ALL_REDUCE), int(Word.REDUCE)
_F_SCAN, _F_EXCLUSIVE_SCAN = int(Word.SCAN), int(Word.EXCLUSIVE_SCAN)
_F_BROADCAST, _F_ALL_GATHER = int(Word.BROADCAST), int(Word.ALL_GATHER)
_F_ALL_GATHER_COUNTS, _F_GATHER = int(Word.ALL_GATHER_COUNTS), int(Word.GATHER)
_F_GATHER_COUNTS, _F_SCATTER = int(Word.GATHER_COUNTS), int(Word.SCATTER)
_F_SCATTER_COUNTS, _F_ALL_TO_ALL = int(Word.SCATTER_COUNTS), int(Word.ALL_TO_ALL)
_F_ALL_TO_ALL_COUNTS = int(Word.ALL_TO_ALL_COUNTS)
_EVENT, _MPI, _NO_ROOM = int(Status.EVENT), int(Path.MPI), int(Abort.NO_ROOM)
_i64 = types.int64


# --- sizes ----------------------------------------------------------------------------------------


@inline
def _start_of(call, rank):
    """Return where a rank's block begins among those of all ranks."""
    if get(call, _OFFSETS) != 0:
        return load64(get(call, _OFFSETS) + 8 * rank)
    return get(call, _BLOCK_BYTES) * rank


@inline
def _bytes_of(call, rank):
    return _start_of(call, rank + 1) - _start_of(call, rank)


@inline
def _no_memory(context):
    """Give the communicator up: all ranks are in the call, and this one cannot take part."""
    give_up(context, _NO_ROOM, get(context, _CONTEXT_RANK))
    return _EVENT


@inline
def _copy(context, destination, source, size_bytes):
    if size_bytes > 0 and destination != source:
        call_copy(get(context, COPY), destination, source, size_bytes, 0)


@inline
def _fill_with_identity(context, call, size_bytes):
    """Give the first rank of an exclusive scan what stands for no input at all."""
    item_bytes, done = get(call, ITEM_BYTES), np.int64(0)
    while done < size_bytes:
        step = item_bytes if done == 0 else min(done, size_bytes - done)
        origin = get(call, IDENTITY) if done == 0 else get(call, DESTINATION)
        call_copy(get(context, COPY), get(call, DESTINATION) + done, origin, step, 0)
        done += step


# --- reductions that MPI does ---------------------------------------------------------------------


@inline
def _reduce_piece(words, call, source, destination, count):
    """Issue MPI's own reduction of so many elements."""
    kind, dtype = get(call, _COLLECTIVE), get(call, _DTYPE)
    operation, comm = get(call, _OPERATION), get(words, COMMUNICATOR)
    if kind == _REDUCE:
        if source == destination:
            source = get(words, IN_PLACE)  # on the root alone
        root, request = get(call, ROOT), next_request(words)
        issue(
            words,
            _F_REDUCE,
            source,
            destination,
            count,
            dtype,
            operation,
            root,
            comm,
            request,
            0,
            0,
        )
        return
    function = _F_ALL_REDUCE
    if kind == _SCAN:
        function = _F_SCAN
    elif kind == _EXCLUSIVE_SCAN:
        function = _F_EXCLUSIVE_SCAN
    request = next_request(words)
    issue(words, function, source, destination, count, dtype, operation, comm, request, 0, 0, 0)


@inline
def _reduce_from(context, words, call, source):
    size_bytes, done, status = get(call, SIZE_BYTES), np.int64(0), OK
    item_bytes, step = get(call, ITEM_BYTES), get(call, SIZE_BYTES)
    if get(words, HAS_LARGE_COUNTS) == 0:
        step = min(step, get(words, MOST_BYTES) // item_bytes * item_bytes)
    destination = get(call, DESTINATION)
    gets = get(call, _COLLECTIVE) != _REDUCE or get(call, ROOT) == get(words, RANK)
    while done < size_bytes and status == OK:
        piece_bytes = min(step, size_bytes - done)
        landing = destination + done if gets else 0
        _reduce_piece(words, call, source + done, landing, piece_bytes // item_bytes)
        status = finish(context, words)
        if status == OK and gets and get(call, _DIVIDES) != 0:
            inputs = get(words, _INPUTS)
            put(inputs, 0, landing)
            count = piece_bytes // get(call, PART_BYTES)
            call_reduce(get(call, KERNEL), inputs, 1, inputs, 1, count, get(call, PARAMETER), 0)
        done += piece_bytes
    if get(call, _COLLECTIVE) == _EXCLUSIVE_SCAN and get(words, RANK) == 0 and status == OK:
        _fill_with_identity(context, call, size_bytes)
    return status


@inline
def _copied(context, source, size_bytes):
    """Return a copy of this rank's input; 0: there is no memory for it.

    MPI has a word for inputs that lie where the output goes, but all ranks must say it or none
    (Open MPI then takes another algorithm), and here each may choose.
    """
    copied = allocate(max(size_bytes, 1))
    if copied != 0:
        _copy(context, copied, source, size_bytes)
    return copied


@inline
def _reduce_by_mpi(context, words, call):
    """Have MPI reduce, of private arrays."""
    source = get(call, SOURCE)
    if get(call, _COLLECTIVE) == _REDUCE or source != get(call, DESTINATION):
        return _reduce_from(context, words, call, source)
    copied = _copied(context, source, get(call, SIZE_BYTES))
    if copied == 0:
        return _no_memory(context)
    status = _reduce_from(context, words, call, copied)
    if status == OK:  # else MPI may still read it
        release(copied)
    return status


# --- reductions by our kernels --------------------------------------------------------------------


@inline
def _n_inputs(words, call):
    """Return how many ranks' inputs make this rank's result; -1: it gets none."""
    kind = get(call, _COLLECTIVE)
    if kind == _SCAN:
        return get(words, RANK) + 1
    if kind == _EXCLUSIVE_SCAN:
        return get(words, RANK)
    if kind == _REDUCE and get(call, ROOT) != get(words, RANK):
        return np.int64(-1)
    return get(words, WORLD_SIZE)


@inline
def _reduce_gathered(context, words, call):
    """Give every rank all inputs, and have it combine those that it needs: small arrays."""
    size_bytes, comm = get(call, SIZE_BYTES), get(words, COMMUNICATOR)
    scratch = scratch_of(words, size_bytes * get(words, WORLD_SIZE))
    if scratch == 0:
        return _no_memory(context)
    byte, request = get(words, BYTE), next_request(words)
    source = get(call, SOURCE)
    issue(
        words,
        _F_ALL_GATHER,
        source,
        size_bytes,
        byte,
        scratch,
        size_bytes,
        byte,
        comm,
        request,
        0,
        0,
    )
    status = finish(context, words)
    if status == OK:
        n_ranks = _n_inputs(words, call)
        if n_ranks > 0:
            combine(words, call, get(call, DESTINATION), scratch, size_bytes, n_ranks, size_bytes)
        elif n_ranks == 0:
            _fill_with_identity(context, call, size_bytes)
    return status


@inline
def _slice_start(words, call, rank, size_bytes):
    """Return where a rank's slice of a piece begins: whole elements, spread evenly."""
    item_bytes = get(call, ITEM_BYTES)
    return size_bytes // item_bytes * rank // get(words, WORLD_SIZE) * item_bytes


@inline
def _combine_slices(context, words, call, scratch, width, mine_bytes):
    """Combine what this rank has of all inputs, for whoever gets it, behind those."""
    world_size, kind = get(words, WORLD_SIZE), get(call, _COLLECTIVE)
    results = scratch + world_size * width
    if kind != _SCAN and kind != _EXCLUSIVE_SCAN:
        combine(words, call, results, scratch, width, world_size, mine_bytes)
        return
    for rank in range(world_size):
        n_ranks = rank + 1 if kind == _SCAN else rank
        if n_ranks > 0:
            combine(words, call, results + rank * width, scratch, width, n_ranks, mine_bytes)


@inline
def _reduce_slices(context, words, call, done, size_bytes):
    """Reduce a piece: each rank its slice of it, which it then gives to whoever gets it."""
    me, world_size, kind = get(words, RANK), get(words, WORLD_SIZE), get(call, _COLLECTIVE)
    is_scan = kind == _SCAN or kind == _EXCLUSIVE_SCAN
    mine_bytes = _slice_start(words, call, me + 1, size_bytes) - _slice_start(
        words, call, me, size_bytes
    )
    width = (mine_bytes + 63) // 64 * 64
    scratch = scratch_of(words, width * world_size * (2 if is_scan else 1) + width)
    if scratch == 0 and width > 0:
        return _no_memory(context)
    source, destination = get(call, SOURCE) + done, get(call, DESTINATION) + done
    for rank in range(world_size):
        start = _slice_start(words, call, rank, size_bytes)
        stop = _slice_start(words, call, rank + 1, size_bytes)
        landing = scratch + rank * width
        set_move(words, rank, source + start, stop - start, landing, mine_bytes)
    status = exchange(context, words)
    if status != OK:
        return status
    _combine_slices(context, words, call, scratch, width, mine_bytes)
    for rank in range(world_size):
        start = _slice_start(words, call, rank, size_bytes)
        stop = _slice_start(words, call, rank + 1, size_bytes)
        gets = kind != _REDUCE or rank == get(call, ROOT)
        gets_here = kind != _REDUCE or me == get(call, ROOT)
        result = scratch + (world_size + (rank if is_scan else 0)) * width
        if kind == _EXCLUSIVE_SCAN:
            gets, gets_here = rank > 0, me > 0
        set_move(
            words,
            rank,
            result,
            mine_bytes if gets else 0,
            destination + start,
            stop - start if gets_here else 0,
        )
    return exchange(context, words)


@inline
def _reduce_by_kernels(context, words, call):
    size_bytes, status, done = get(call, SIZE_BYTES), OK, np.int64(0)
    if size_bytes * get(words, WORLD_SIZE) <= GATHERED_BYTES:
        return _reduce_gathered(context, words, call) if size_bytes > 0 else OK
    step = PIECE_BYTES // get(call, ITEM_BYTES) * get(call, ITEM_BYTES)
    while done < size_bytes and status == OK:
        piece_bytes = min(step, size_bytes - done)
        status = _reduce_slices(context, words, call, done, piece_bytes)
        done += piece_bytes
    if get(call, _COLLECTIVE) == _EXCLUSIVE_SCAN and get(words, RANK) == 0 and status == OK:
        _fill_with_identity(context, call, size_bytes)
    return status


@inline
def _reduce_blocks(context, words, call):
    """Give each rank its block of all inputs, combined; a piece of each at a time."""
    me, world_size, largest = get(words, RANK), get(words, WORLD_SIZE), np.int64(0)
    for rank in range(world_size):
        largest = max(largest, _bytes_of(call, rank))
    width = min(largest, PIECE_BYTES // get(call, ITEM_BYTES) * get(call, ITEM_BYTES))
    scratch = scratch_of(words, world_size * width)
    if scratch == 0 and width > 0:
        return _no_memory(context)
    done, status = np.int64(0), OK
    # In place the result is where this rank's block of the input was: that has been copied by then.
    while done < largest and status == OK:
        mine_bytes = max(min(_bytes_of(call, me) - done, width), 0)
        for rank in range(world_size):
            source = get(call, SOURCE) + _start_of(call, rank) + done
            size_bytes = max(min(_bytes_of(call, rank) - done, width), 0)
            set_move(words, rank, source, size_bytes, scratch + rank * width, mine_bytes)
        status = exchange(context, words)
        if status == OK:
            landing = get(call, DESTINATION) + done
            combine(words, call, landing, scratch, width, world_size, mine_bytes)
        done += width
    return status


# --- movements ------------------------------------------------------------------------------------


@inline
def _broadcast(context, words, call):
    is_root = get(call, ROOT) == get(words, RANK)
    size_bytes, done, status = get(call, _BLOCK_BYTES), np.int64(0), OK
    comm, byte, root = get(words, COMMUNICATOR), get(words, BYTE), get(call, ROOT)
    step = size_bytes if get(words, HAS_LARGE_COUNTS) != 0 else get(words, MOST_BYTES)
    memory = get(call, SOURCE) if is_root else get(call, DESTINATION)
    if get(words, IS_ON_GPU) != 0:
        landing = get(call, DESTINATION)
        return broadcast_by_messages(context, words, root, memory, landing, size_bytes)
    while done < size_bytes and status == OK:
        count, request = min(step, size_bytes - done), next_request(words)
        issue(words, _F_BROADCAST, memory + done, count, byte, root, comm, request, 0, 0, 0, 0)
        status = finish(context, words)
        done += count
    if is_root and get(call, DESTINATION) != 0:
        _copy(context, get(call, DESTINATION), get(call, SOURCE), size_bytes)
    return status


@inline
def _fits(words, call):
    """Return whether MPI's functions can span all blocks; alike on all ranks.

    On GPUs' memory messages alone are used: there Open MPI serves no nonblocking collectives.
    """
    if get(words, IS_ON_GPU) != 0:
        return False
    if get(words, HAS_LARGE_COUNTS) != 0:
        return True
    if get(call, _PIECES) != 0:
        return False  # a rank does not know how much others have
    return _start_of(call, get(words, WORLD_SIZE)) <= get(words, MOST_BYTES)


@inline
def _set_counts(words, call, which):
    """Set the counts and displacements of the blocks of all ranks."""
    for rank in range(get(words, WORLD_SIZE)):
        set_number(words, which, rank, _bytes_of(call, rank))
        set_number(words, which + 1, rank, _start_of(call, rank))


@inline
def _all_gather(context, words, call, source):
    comm, byte, me = get(words, COMMUNICATOR), get(words, BYTE), get(words, RANK)
    landing, mine_bytes, request = get(call, DESTINATION), _bytes_of(call, me), next_request(words)
    if get(call, _OFFSETS) == 0:
        issue(
            words,
            _F_ALL_GATHER,
            source,
            mine_bytes,
            byte,
            landing,
            mine_bytes,
            byte,
            comm,
            request,
            0,
            0,
        )
    else:
        _set_counts(words, call, 0)
        counts, starts = vector_of(words, 0), vector_of(words, 1)
        issue(
            words,
            _F_ALL_GATHER_COUNTS,
            source,
            mine_bytes,
            byte,
            landing,
            counts,
            starts,
            byte,
            comm,
            request,
            0,
        )
    return finish(context, words)


@inline
def _gather(context, words, call, source):
    comm, byte, me = get(words, COMMUNICATOR), get(words, BYTE), get(words, RANK)
    landing, mine_bytes, root = get(call, DESTINATION), _bytes_of(call, me), get(call, ROOT)
    request = next_request(words)
    if get(call, _OFFSETS) == 0:
        issue(
            words,
            _F_GATHER,
            source,
            mine_bytes,
            byte,
            landing,
            mine_bytes,
            byte,
            root,
            comm,
            request,
            0,
        )
    else:
        _set_counts(words, call, 0)
        counts, starts = vector_of(words, 0), vector_of(words, 1)
        issue(
            words,
            _F_GATHER_COUNTS,
            source,
            mine_bytes,
            byte,
            landing,
            counts,
            starts,
            byte,
            root,
            comm,
            request,
        )
    return finish(context, words)


@inline
def _scatter(context, words, call, landing):
    comm, byte, me = get(words, COMMUNICATOR), get(words, BYTE), get(words, RANK)
    source, mine_bytes, root = get(call, SOURCE), _bytes_of(call, me), get(call, ROOT)
    request = next_request(words)
    if get(call, _OFFSETS) == 0:
        issue(
            words,
            _F_SCATTER,
            source,
            mine_bytes,
            byte,
            landing,
            mine_bytes,
            byte,
            root,
            comm,
            request,
            0,
        )
    else:
        _set_counts(words, call, 0)
        counts, starts = vector_of(words, 0), vector_of(words, 1)
        issue(
            words,
            _F_SCATTER_COUNTS,
            source,
            counts,
            starts,
            byte,
            landing,
            mine_bytes,
            byte,
            root,
            comm,
            request,
        )
    return finish(context, words)


@inline
def _received_start(call, rank):
    """Return where an all_to_all's block from a rank goes."""
    if get(call, _LANDINGS) != 0:
        return load64(get(call, _LANDINGS) + 8 * rank)
    return get(call, _BLOCK_BYTES) * rank


@inline
def _received_bytes(words, call, rank):
    if get(call, _PIECES) != 0:
        return load64(get(call, _PIECES) + 8 * (get(words, WORLD_SIZE) + rank))
    return get(call, _BLOCK_BYTES)


@inline
def _all_to_all(context, words, call, source):
    comm, byte, landing = get(words, COMMUNICATOR), get(words, BYTE), get(call, DESTINATION)
    request = next_request(words)
    if get(call, _PIECES) == 0:
        count = get(call, _BLOCK_BYTES)
        issue(words, _F_ALL_TO_ALL, source, count, byte, landing, count, byte, comm, request, 0, 0)
    else:
        _set_counts(words, call, 0)
        for rank in range(get(words, WORLD_SIZE)):
            set_number(words, 2, rank, _received_bytes(words, call, rank))
            set_number(words, 3, rank, _received_start(call, rank))
        counts, starts = vector_of(words, 0), vector_of(words, 1)
        received, landings = vector_of(words, 2), vector_of(words, 3)
        issue(
            words,
            _F_ALL_TO_ALL_COUNTS,
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
def _move_pairwise(context, words, call, source):
    """Do any movement of blocks by messages: where MPI's functions cannot span all of them."""
    kind, me, root = get(call, _COLLECTIVE), get(words, RANK), get(call, ROOT)
    landing = get(call, DESTINATION)
    for rank in range(get(words, WORLD_SIZE)):
        origin, sent, at, received = source, np.int64(0), landing, np.int64(0)
        if kind == _ALL_TO_ALL:
            origin, sent = source + _start_of(call, rank), _bytes_of(call, rank)
            at, received = landing + _received_start(call, rank), _received_bytes(words, call, rank)
        elif kind == _SCATTER:
            if me == root:
                origin, sent = source + _start_of(call, rank), _bytes_of(call, rank)
            if rank == root:
                received = _bytes_of(call, me)
        else:
            if kind == _ALL_GATHER or rank == root:
                sent = _bytes_of(call, me)
            if kind == _ALL_GATHER or me == root:
                at, received = landing + _start_of(call, rank), _bytes_of(call, rank)
        set_move(words, rank, origin, sent, at, received)
    return exchange(context, words)


@inline
def _move_blocks(context, words, call, source):
    kind, me = get(call, _COLLECTIVE), get(words, RANK)
    if not _fits(words, call):
        return _move_pairwise(context, words, call, source)
    if kind == _ALL_TO_ALL:
        return _all_to_all(context, words, call, source)
    if kind == _ALL_GATHER:
        return _all_gather(context, words, call, source)
    is_root, mine = get(call, ROOT) == me, _start_of(call, me)
    if kind == _SCATTER:
        landing = get(call, DESTINATION)
        if is_root and landing == source + mine:
            landing = get(words, IN_PLACE)
        return _scatter(context, words, call, landing)
    if is_root and source == get(call, DESTINATION) + mine:
        source = get(words, IN_PLACE)
    return _gather(context, words, call, source)


@inline
def _reads_what_it_writes(words, call):
    """Return whether this rank's input is a part of its output that MPI must not see as both."""
    kind, source = get(call, _COLLECTIVE), get(call, SOURCE)
    if kind == _ALL_TO_ALL:
        return source == get(call, DESTINATION)
    if kind == _ALL_GATHER:
        return source == get(call, DESTINATION) + _start_of(call, get(words, RANK))
    return False


@inline
def _move(context, words, call):
    """Do a movement; in place from a copy, where each rank has a block for or from each."""
    source, kind = get(call, SOURCE), get(call, _COLLECTIVE)
    if not _reads_what_it_writes(words, call):
        return _move_blocks(context, words, call, source)
    size_bytes = _start_of(call, get(words, WORLD_SIZE))
    if kind == _ALL_GATHER:
        size_bytes = _bytes_of(call, get(words, RANK))
    copied = _copied(context, source, size_bytes)
    if copied == 0:
        return _no_memory(context)
    status = _move_blocks(context, words, call, copied)
    if status == OK:  # else MPI may still read it
        release(copied)
    return status


# --- the whole ------------------------------------------------------------------------------------


@inline
def _run(context, words, call):
    kind = get(call, _COLLECTIVE)
    if get(call, _OPERATION) != 0:
        return _reduce_by_mpi(context, words, call)
    if get(call, KERNEL) == 0:
        if kind == _BROADCAST:
            return _broadcast(context, words, call)
        return _move(context, words, call)
    if kind == _REDUCE_SCATTER:
        return _reduce_blocks(context, words, call)
    return _reduce_by_kernels(context, words, call)


@compiled_when_used(_i64(_i64, _i64), exchange_words.__name__)
def mpi_call(context, call):
    """Run one collective through MPI as the call block says; return a status."""
    status = begin(context, call)
    if status != OK:
        return status
    post(context, call, NOT_SHARED, NOT_SHARED)
    if get(context, _N_HERE) > 1:
        status = wait_all_arrived(context, call)
        if status != OK:
            return status
    put(context, PATH, _MPI)
    status = _run(context, get(call, _WORDS), call)
    if status == OK:
        close_record(context)
    return status
