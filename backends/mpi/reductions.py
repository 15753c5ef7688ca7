"""Reductions through MPI: by MPI itself, or in slices by our kernel in rank order."""

from __future__ import annotations

from gpucoll.backends.mpi.buffers import bytes_of, copied, no_memory, start_of
from gpucoll.backends.mpi.steps import (
    BYTE,
    COMMUNICATOR,
    COPY,
    HAS_LARGE_COUNTS,
    IN_PLACE,
    MOST_BYTES,
    RANK,
    WORLD_SIZE,
    combine,
    exchange,
    finish,
    issue,
    next_request,
    release,
    scratch_of,
    set_move,
)
from gpucoll.backends.mpi.words import GATHERED_BYTES, PIECE_BYTES, Word
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_copy, call_reduce, get, put
from gpucoll.transport.shared.steps import (
    DESTINATION,
    IDENTITY,
    ITEM_BYTES,
    KERNEL,
    OK,
    PARAMETER,
    PART_BYTES,
    ROOT,
    SIZE_BYTES,
    SOURCE,
)
from gpucoll.transport.shared.words import Call
from gpucoll.types import Collective

_DTYPE, _OPERATION = int(Call.MPI_DTYPE), int(Call.MPI_OPERATION)
_COLLECTIVE = int(Call.MPI_COLLECTIVE)
_DIVIDES = int(Call.MPI_DIVIDES)
_INPUTS = int(Word.INPUTS)
_REDUCE = int(Collective.REDUCE)
_SCAN, _EXCLUSIVE_SCAN = int(Collective.SCAN), int(Collective.EXCLUSIVE_SCAN)
_F_ALL_REDUCE, _F_REDUCE = int(Word.ALL_REDUCE), int(Word.REDUCE)
_F_SCAN, _F_EXCLUSIVE_SCAN = int(Word.SCAN), int(Word.EXCLUSIVE_SCAN)
_F_ALL_GATHER = int(Word.ALL_GATHER)


# --- reductions that MPI does ---------------------------------------------------------------------


@inline
def _fill_with_identity(context, call, size_bytes):
    """Give the first rank of an exclusive scan the result of no inputs: the identity."""
    item_bytes, done = get(call, ITEM_BYTES), 0
    while done < size_bytes:
        step = item_bytes if done == 0 else min(done, size_bytes - done)
        origin = get(call, IDENTITY) if done == 0 else get(call, DESTINATION)
        call_copy(get(context, COPY), get(call, DESTINATION) + done, origin, step, 0)
        done += step


@inline
def _reduce_piece(words, call, source, destination, count):
    """Issue MPI's own reduction of `count` elements."""
    kind, dtype = get(call, _COLLECTIVE), get(call, _DTYPE)
    operation, comm = get(call, _OPERATION), get(words, COMMUNICATOR)
    if kind == _REDUCE:
        if source == destination:
            source = get(words, IN_PLACE)  # on the root only
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
    size_bytes, done, status = get(call, SIZE_BYTES), 0, OK
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
def reduce_by_mpi(context, words, call):
    """Have MPI reduce private arrays."""
    source = get(call, SOURCE)
    if get(call, _COLLECTIVE) == _REDUCE or source != get(call, DESTINATION):
        return _reduce_from(context, words, call, source)
    copy = copied(context, source, get(call, SIZE_BYTES))
    if copy == 0:
        return no_memory(context)
    status = _reduce_from(context, words, call, copy)
    if status == OK:  # else MPI may still read it
        release(copy)
    return status


# --- reductions by our kernels --------------------------------------------------------------------


@inline
def _n_inputs(words, call):
    """Return how many ranks' inputs make up this rank's result; -1: it gets none."""
    kind = get(call, _COLLECTIVE)
    if kind == _SCAN:
        return get(words, RANK) + 1
    if kind == _EXCLUSIVE_SCAN:
        return get(words, RANK)
    if kind == _REDUCE and get(call, ROOT) != get(words, RANK):
        return -1
    return get(words, WORLD_SIZE)


@inline
def _reduce_gathered(context, words, call):
    """Give every rank all inputs, of which it combines those that it needs: for small arrays."""
    size_bytes, comm = get(call, SIZE_BYTES), get(words, COMMUNICATOR)
    scratch = scratch_of(words, size_bytes * get(words, WORLD_SIZE))
    if scratch == 0:
        return no_memory(context)
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
    """Return the start of a rank's slice of a piece: whole elements, spread evenly."""
    item_bytes = get(call, ITEM_BYTES)
    return size_bytes // item_bytes * rank // get(words, WORLD_SIZE) * item_bytes


@inline
def _combine_slices(context, words, call, scratch, width, mine_bytes):
    """Combine this rank's slices of all inputs, for the ranks that get them, after the inputs."""
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
    """Reduce a piece: each rank reduces its slice, and sends it to the ranks that get it."""
    me, world_size, kind = get(words, RANK), get(words, WORLD_SIZE), get(call, _COLLECTIVE)
    is_scan = kind == _SCAN or kind == _EXCLUSIVE_SCAN
    mine_bytes = _slice_start(words, call, me + 1, size_bytes) - _slice_start(
        words, call, me, size_bytes
    )
    width = (mine_bytes + 63) // 64 * 64
    scratch = scratch_of(words, width * world_size * (2 if is_scan else 1) + width)
    if scratch == 0 and width > 0:
        return no_memory(context)
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
def reduce_by_kernels(context, words, call):
    """Reduce, or scan, by kernels if MPI lacks the same operation; return a status."""
    size_bytes, status, done = get(call, SIZE_BYTES), OK, 0
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
def reduce_blocks(context, words, call):
    """Give each rank its block of the combined inputs, one piece of each block at a time."""
    me, world_size, largest = get(words, RANK), get(words, WORLD_SIZE), 0
    for rank in range(world_size):
        largest = max(largest, bytes_of(call, rank))
    width = min(largest, PIECE_BYTES // get(call, ITEM_BYTES) * get(call, ITEM_BYTES))
    scratch = scratch_of(words, world_size * width)
    if scratch == 0 and width > 0:
        return no_memory(context)
    done, status = 0, OK
    # In place, the result replaces this rank's block of the input, which has been copied by then.
    while done < largest and status == OK:
        mine_bytes = max(min(bytes_of(call, me) - done, width), 0)
        for rank in range(world_size):
            source = get(call, SOURCE) + start_of(call, rank) + done
            size_bytes = max(min(bytes_of(call, rank) - done, width), 0)
            set_move(words, rank, source, size_bytes, scratch + rank * width, mine_bytes)
        status = exchange(context, words)
        if status == OK:
            landing = get(call, DESTINATION) + done
            combine(words, call, landing, scratch, width, world_size, mine_bytes)
        done += width
    return status
