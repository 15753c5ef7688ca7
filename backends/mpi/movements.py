"""Collectives through MPI that move blocks: broadcast, gather, scatter and all-to-all."""

from __future__ import annotations

from gpucoll.backends.mpi.buffers import bytes_of, copied, copy_plain, no_memory, start_of
from gpucoll.backends.mpi.steps import (
    BYTE,
    COMMUNICATOR,
    HAS_LARGE_COUNTS,
    IN_PLACE,
    IS_ON_GPU,
    MOST_BYTES,
    RANK,
    WORLD_SIZE,
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
from gpucoll.backends.mpi.words import Word
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import get, load64
from gpucoll.transport.shared.steps import DESTINATION, OK, ROOT, SOURCE
from gpucoll.transport.shared.words import Call
from gpucoll.types import Collective

_OFFSETS, _PIECES, _BLOCK_BYTES = int(Call.OFFSETS), int(Call.PIECES), int(Call.BLOCK_BYTES)
_COLLECTIVE, _LANDINGS = int(Call.MPI_COLLECTIVE), int(Call.LANDINGS)
_ALL_GATHER = int(Collective.ALL_GATHER)
_SCATTER, _ALL_TO_ALL = int(Collective.SCATTER), int(Collective.ALL_TO_ALL)
_F_BROADCAST, _F_ALL_GATHER = int(Word.BROADCAST), int(Word.ALL_GATHER)
_F_ALL_GATHER_COUNTS, _F_GATHER = int(Word.ALL_GATHER_COUNTS), int(Word.GATHER)
_F_GATHER_COUNTS, _F_SCATTER = int(Word.GATHER_COUNTS), int(Word.SCATTER)
_F_SCATTER_COUNTS, _F_ALL_TO_ALL = int(Word.SCATTER_COUNTS), int(Word.ALL_TO_ALL)
_F_ALL_TO_ALL_COUNTS = int(Word.ALL_TO_ALL_COUNTS)


@inline
def broadcast(context, words, call):
    """Broadcast, in pieces if the size exceeds MPI's counts; return a status."""
    is_root = get(call, ROOT) == get(words, RANK)
    size_bytes, done, status = get(call, _BLOCK_BYTES), 0, OK
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
        copy_plain(context, get(call, DESTINATION), get(call, SOURCE), size_bytes)
    return status


@inline
def _fits(words, call):
    """Return whether MPI's functions can span all blocks; the same on all ranks.

    For GPU memory only messages are used, because Open MPI has no nonblocking collectives for it.
    """
    if get(words, IS_ON_GPU) != 0:
        return False
    if get(words, HAS_LARGE_COUNTS) != 0:
        return True
    if get(call, _PIECES) != 0:
        return False  # a rank does not know the sizes of others
    return start_of(call, get(words, WORLD_SIZE)) <= get(words, MOST_BYTES)


@inline
def _set_counts(words, call, which):
    """Set the counts and displacements of the blocks of all ranks."""
    for rank in range(get(words, WORLD_SIZE)):
        set_number(words, which, rank, bytes_of(call, rank))
        set_number(words, which + 1, rank, start_of(call, rank))


@inline
def _all_gather(context, words, call, source):
    comm, byte, me = get(words, COMMUNICATOR), get(words, BYTE), get(words, RANK)
    landing, mine_bytes, request = get(call, DESTINATION), bytes_of(call, me), next_request(words)
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
    landing, mine_bytes, root = get(call, DESTINATION), bytes_of(call, me), get(call, ROOT)
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
    source, mine_bytes, root = get(call, SOURCE), bytes_of(call, me), get(call, ROOT)
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
    """Return the offset for an all_to_all's block from a rank."""
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
    """Do any movement of blocks by messages, if MPI's functions cannot span all blocks."""
    kind, me, root = get(call, _COLLECTIVE), get(words, RANK), get(call, ROOT)
    landing = get(call, DESTINATION)
    for rank in range(get(words, WORLD_SIZE)):
        origin, sent, at, received = source, 0, landing, 0
        if kind == _ALL_TO_ALL:
            origin, sent = source + start_of(call, rank), bytes_of(call, rank)
            at, received = landing + _received_start(call, rank), _received_bytes(words, call, rank)
        elif kind == _SCATTER:
            if me == root:
                origin, sent = source + start_of(call, rank), bytes_of(call, rank)
            if rank == root:
                received = bytes_of(call, me)
        else:
            if kind == _ALL_GATHER or rank == root:
                sent = bytes_of(call, me)
            if kind == _ALL_GATHER or me == root:
                at, received = landing + start_of(call, rank), bytes_of(call, rank)
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
    is_root, mine = get(call, ROOT) == me, start_of(call, me)
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
    """Return whether this rank's input is a part of its output, which MPI does not permit."""
    kind, source = get(call, _COLLECTIVE), get(call, SOURCE)
    if kind == _ALL_TO_ALL:
        return source == get(call, DESTINATION)
    if kind == _ALL_GATHER:
        return source == get(call, DESTINATION) + start_of(call, get(words, RANK))
    return False


@inline
def move(context, words, call):
    """Do a movement; from a copy of the input if it is in place with one block per rank."""
    source, kind = get(call, SOURCE), get(call, _COLLECTIVE)
    if not _reads_what_it_writes(words, call):
        return _move_blocks(context, words, call, source)
    size_bytes = start_of(call, get(words, WORLD_SIZE))
    if kind == _ALL_GATHER:
        size_bytes = bytes_of(call, get(words, RANK))
    copy = copied(context, source, size_bytes)
    if copy == 0:
        return no_memory(context)
    status = _move_blocks(context, words, call, copy)
    if status == OK:  # else MPI may still read it
        release(copy)
    return status
