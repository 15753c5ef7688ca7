"""Collectives through MPI that move blocks: broadcast, gather, scatter and all-to-all."""

from __future__ import annotations

from gpucoll.backends.mpi.buffers import bytes_of, copied, copy_plain, no_memory, start_of
from gpucoll.backends.mpi.steps import (
    broadcast_by_messages,
    exchange,
    finish,
    issue,
    next_request,
    release,
    set_move,
    set_number,
    vector_of,
)
from gpucoll.backends.mpi.words import MpiWords
from gpucoll.collectives import Flow
from gpucoll.kernels.cpu.jit import inline
from gpucoll.transport.shared.words import Call, Context, Status


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
    return start_of(call, words.world_size) <= words.most_bytes


@inline
def _set_counts(words: MpiWords, call: Call, which: int) -> None:
    """Set the counts and displacements of the blocks of all ranks."""
    for rank in range(words.world_size):
        set_number(words, which, rank, bytes_of(call, rank))
        set_number(words, which + 1, rank, start_of(call, rank))


@inline
def _all_gather(context: Context, words: MpiWords, call: Call, source: int) -> int:
    comm, byte, me = words.communicator, words.byte, words.rank
    landing, mine, request = call.destination, bytes_of(call, me), next_request(words)
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
    landing, mine, root = call.destination, bytes_of(call, me), call.root
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
    source, mine, root = call.source, bytes_of(call, me), call.root
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
            origin, sent = source + start_of(call, rank), bytes_of(call, rank)
            at, received = landing + _received_start(call, rank), _received_bytes(words, call, rank)
        elif call.spreads:
            if me == root:
                origin, sent = source + start_of(call, rank), bytes_of(call, rank)
            if rank == root:
                received = bytes_of(call, me)
        else:
            if is_to_all or rank == root:
                sent = bytes_of(call, me)
            if is_to_all or me == root:
                at, received = landing + start_of(call, rank), bytes_of(call, rank)
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
    is_root, mine = call.root == me, start_of(call, me)
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
    start = 0 if call.spreads else start_of(call, words.rank)
    return call.source == call.destination + start


@inline
def move(context: Context, words: MpiWords, call: Call) -> int:
    """Do a movement; from a copy of the input if it is in place with one block per rank."""
    source = call.source
    if not _reads_what_it_writes(words, call):
        return _move_blocks(context, words, call, source)
    size_bytes = bytes_of(call, words.rank)
    if call.spreads:
        size_bytes = start_of(call, words.world_size)
    copy = copied(context, source, size_bytes)
    if copy == 0:
        return no_memory(context)
    status = _move_blocks(context, words, call, copy)
    if status == Status.OK:  # else MPI may still read it
        release(copy)
    return status
