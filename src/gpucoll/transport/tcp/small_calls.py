"""A collective on small arrays over several hosts, in compiled code from beginning to end.

The inputs of a host's ranks go to their leader through their slots, between the leaders by an
exchange (`exchange`), and from each leader to its ranks through slots again. Then every rank has
all inputs, and computes its own result from them in rank order. So all ranks get the same bits,
wherever they are. Rare cases are left to Python: `Exchange.outcome` tells which one it is.

For a large call, only the check that all hosts make the same call goes this way: `Exchange.large`.
"""

from __future__ import annotations

import numpy as np

from gpucoll.blocks import Words
from gpucoll.collectives import Flow
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import call_copy, call_loop, call_reduce, exchange64, load64
from gpucoll.transport.shared.flags import give_up, python_raised, release_interpreter
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.libc import write
from gpucoll.transport.shared.operands import fill_with_identity, n_operands
from gpucoll.transport.shared.steps import (
    NOT_SHARED,
    begin,
    close_record,
    make_ready,
    payload_of,
    post,
    wait_all_arrived,
    wait_arrived,
)
from gpucoll.transport.shared.words import Call, Context, Status
from gpucoll.transport.tcp import exchange
from gpucoll.transport.tcp.exchange import begin_exchange, find_parts, go_on_as_told, now_ns
from gpucoll.transport.tcp.exchange_words import Exchange, Outcome, PartKind

LATER_NS = 1_000_000_000
"""How much longer other ranks wait for their leader, whose own error tells more."""
LEADER = 0
LEAST_BYTES = 16
"""Size of the largest element."""


# --- sizes ----------------------------------------------------------------------------------------


@inline
def _whole_input_bytes(call: Call, rank: int) -> int:
    """Return the size of a rank's input; the same on all ranks that make the same call."""
    if call.flow == Flow.FROM_ROOT:
        return call.largest_bytes if rank == call.root else 0
    if call.spreads != 0:
        return call.largest_bytes
    if call.kernel != 0:
        return call.size_bytes
    offsets = call.offsets
    if offsets:
        return offsets[rank + 1] - offsets[rank]
    return call.block_bytes


@inline
def _input_bytes(words: Exchange, call: Call, rank: int) -> int:
    """Return the size of what a rank brings to the exchange of a call: nothing if it is large."""
    return 0 if words.is_large != 0 else _whole_input_bytes(call, rank)


@inline
def _bytes_of_host(words: Exchange, call: Call, host: int) -> int:
    """Return the total size of the inputs of a host's ranks."""
    total, edges, order = 0, words.edges, words.order
    for place in range(edges[host], edges[host + 1]):
        total += _input_bytes(words, call, order[place])
    return total


@inline
def _note_sizes(words: Exchange, call: Call) -> int:
    """Store how many bytes each host is to bring; return the total size of all parts."""
    n_hosts, whole = words.n_hosts, 0
    for host in range(n_hosts):
        size_bytes = _bytes_of_host(words, call, host)
        words.parts[n_hosts + host] = size_bytes
        whole += exchange.PART_BYTES + exchange.whole_words(size_bytes)
    return whole


@inline
def _data_bytes(words: Exchange, call: Call) -> int:
    """Return the total size of all ranks' inputs."""
    total = 0
    for rank in range(words.world_size):
        total += _whole_input_bytes(call, rank)
    return total


@inline
def _is_large(words: Exchange, call: Call) -> bool:
    """Return whether this call is large; the same on all ranks.

    A call with counts that others may not know always is. A reduction of one element never is.
    """
    if call.pieces:
        return True
    if call.kernel != 0 and call.size_bytes <= LEAST_BYTES:
        return False
    return _data_bytes(words, call) > words.most_bytes


@inline
def _kind(words: Exchange) -> int:
    """Return the kind of the hosts' parts in this call's exchange."""
    return PartKind.NOTHING if words.is_large != 0 else PartKind.DATA


@inline
def _is_for_python(words: Exchange, context: Context, call: Call) -> bool:
    """Return whether this call goes another way, or Python has to check something first."""
    if words.is_large != 0 and words.large == 0:
        return True
    if words.may_run == 0 and load64(words.n_closed) != 0:
        return True
    return context.rank == LEADER and words.is_open == 0


# --- inside a host --------------------------------------------------------------------------------


@inline
def _own_input(call: Call) -> int:
    """Return the address of this rank's input; a root may have it in its output's place."""
    return call.source if call.source != 0 else call.destination


@inline
def _piece(size_bytes: int, done: int, most_bytes: int) -> int:
    """Return how many bytes of an input belong to the piece that begins at `done`."""
    return min(max(size_bytes - done, 0), most_bytes)


@inline
def _rank_at(words: Exchange, place: int) -> int:
    """Return the rank at a place of this host."""
    edges = words.edges
    return words.order[edges[words.here] + place]


@inline
def _take_pieces(
    words: Exchange, context: Context, call: Call, done: int, most_bytes: int, largest_bytes: int
) -> None:
    """Copy a piece of each input of this host to its place in the leader's part."""
    landing, copy = words.held + exchange.PART_BYTES, context.copy_plain
    for place in range(context.world_size):
        size_bytes = _input_bytes(words, call, _rank_at(words, place))
        piece_bytes = _piece(size_bytes, done, most_bytes)
        if piece_bytes > 0:
            source = _own_input(call) + done
            if place != LEADER:
                source = payload_of(context, context.sequence, place, largest_bytes)
            call_copy(copy, landing + done, source, piece_bytes, 0)
        landing += size_bytes


@inline
def _gather_pieces(
    words: Exchange, context: Context, call: Call, done: int, most_bytes: int, rest_bytes: int
) -> int:
    """Bring a piece of each input to the leader; no input has more than `rest_bytes` left."""
    status = begin(context, call)
    if status != Status.OK:
        return status
    place, largest_bytes = context.rank, min(most_bytes, rest_bytes)
    mine_bytes = _piece(_input_bytes(words, call, words.rank), done, most_bytes)
    if place != LEADER and mine_bytes > 0:
        payload = payload_of(context, context.sequence, place, largest_bytes)
        call_copy(context.copy_plain, payload, _own_input(call) + done, mine_bytes, 0)
    post(context, call, NOT_SHARED, NOT_SHARED)
    if place == LEADER:
        status = wait_all_arrived(context, call)
        if status != Status.OK:
            return status
        _take_pieces(words, context, call, done, most_bytes, largest_bytes)
    close_record(context)
    return Status.OK


@inline
def _gather(words: Exchange, context: Context, call: Call) -> int:
    """Bring the inputs of this host's ranks to its leader, after the header of its part."""
    largest_bytes = done = 0
    for place in range(context.world_size):
        size_bytes = _input_bytes(words, call, _rank_at(words, place))
        largest_bytes = max(largest_bytes, size_bytes)
    if context.world_size == 1:
        status = begin(context, call)
        if status == Status.OK:
            _take_pieces(words, context, call, 0, largest_bytes, largest_bytes)
            close_record(context)
        return status
    most_bytes = context.one_shot_bytes
    while True:
        rest_bytes = largest_bytes - done
        status = _gather_pieces(words, context, call, done, most_bytes, rest_bytes)
        done += most_bytes
        if status != Status.OK or done >= largest_bytes:
            return status


@inline
def _spread_piece(
    words: Exchange, context: Context, call: Call, address: int, size_bytes: int
) -> int:
    """Bring a piece of the leader's data to all ranks of its host; return a status."""
    status = begin(context, call)
    if status != Status.OK:
        return status
    sequence, copy = context.sequence, context.copy_plain
    payload = payload_of(context, sequence, LEADER, size_bytes)
    if context.rank == LEADER:
        call_copy(copy, payload, address, size_bytes, 0)
        post(context, call, NOT_SHARED, NOT_SHARED)
    else:
        post(context, call, NOT_SHARED, NOT_SHARED)
        status = wait_arrived(context, call, LEADER)
        if status != Status.OK:
            return status
        call_copy(copy, address, payload, size_bytes, 0)
    close_record(context)
    return Status.OK


@inline
def _spread(words: Exchange, context: Context, call: Call, whole_bytes: int) -> int:
    """Bring the outcome and all parts from the leader to the ranks of its host."""
    start, done = words.held - 8, 0
    status: int = Status.OK
    whole_bytes += 8
    timeout_ns = context.timeout_ns
    if context.rank != LEADER:
        context.timeout_ns = timeout_ns + LATER_NS
    while done < whole_bytes and status == Status.OK:
        size_bytes = min(context.one_shot_bytes, whole_bytes - done)
        status = _spread_piece(words, context, call, start + done, size_bytes)
        done += size_bytes
    context.timeout_ns = timeout_ns
    return status


# --- between hosts --------------------------------------------------------------------------------


@inline
def _ring_bell(words: Exchange) -> None:
    """Wake the leader's thread to look for news on this host."""
    words.one = 1
    write(np.int32(words.bell_fd), words.at.one, 8)


@inline
def _exchange(words: Exchange, context: Context, call: Call) -> int:
    """Exchange the hosts' parts; return OK for any outcome, or SIGNAL."""
    release_interpreter(context)
    size_bytes = words.parts[words.n_hosts + words.here]
    begin_exchange(words, call.digest, _kind(words), size_bytes)
    deadline_ns = words.start_ns + context.timeout_ns
    outcome: int = Outcome.AGAIN
    while outcome == Outcome.AGAIN:
        end_ns = min(now_ns(words) + context.slice_ns, deadline_ns)
        outcome = go_on_as_told(words, end_ns)
        if outcome == Outcome.AGAIN:
            if python_raised(context):
                give_up(context, Abort.INTERRUPTED, context.rank)
                return Status.SIGNAL
            if now_ns(words) >= deadline_ns:
                outcome = Outcome.DEADLINE
    words.outcome = outcome
    return Status.OK


# --- results --------------------------------------------------------------------------------------


@inline
def _note_inputs(words: Exchange, call: Call) -> None:
    """Store where each rank's input lies."""
    edges, order, inputs = words.edges, words.order, words.inputs
    for host in range(words.n_hosts):
        at = words.parts[host]
        for place in range(edges[host], edges[host + 1]):
            rank = order[place]
            inputs[rank] = at
            at += _input_bytes(words, call, rank)


@inline
def _combine(words: Exchange, call: Call, n_ranks: int, size_bytes: int) -> None:
    """Combine the inputs of the first `n_ranks` ranks, in order."""
    if size_bytes <= 0:
        return
    inputs = words.inputs
    landing = inputs.address + 8 * words.world_size
    Words(landing)[0] = call.destination
    parameter = call.parameter + call.parameter_stride * (n_ranks - 1)
    count = size_bytes // call.part_bytes
    call_reduce(call.kernel, landing, 1, inputs.address, n_ranks, count, parameter, 0)


@inline
def _reduce(words: Exchange, context: Context, call: Call) -> None:
    """Give this rank its result of a reduction."""
    n_ranks = n_operands(call, words.rank, words.world_size)
    if n_ranks > 0:
        _combine(words, call, n_ranks, call.size_bytes)
    elif n_ranks == 0:
        fill_with_identity(context, call, 0, call.size_bytes)


@inline
def _block_start(call: Call, rank: int) -> int:
    """Return the offset of a rank's block in an input with one block for each rank."""
    if call.offsets:
        return call.offsets[rank]
    return call.block_bytes * rank


@inline
def _reduce_blocks(words: Exchange, context: Context, call: Call) -> None:
    """Give this rank its block of all inputs, combined."""
    rank, inputs = words.rank, words.inputs
    start = _block_start(call, rank)
    for other in range(words.world_size):
        inputs[other] = inputs[other] + start
    size_bytes = _block_start(call, rank + 1) - start
    _combine(words, call, words.world_size, size_bytes)


@inline
def _take_blocks(words: Exchange, context: Context, call: Call) -> None:
    """Give this rank its block of every input, or the whole of every input, in rank order."""
    rank, inputs, copy = words.rank, words.inputs, context.copy_plain
    landing, spreads = call.destination, call.spreads != 0
    if call.flow == Flow.TO_ROOT and rank != call.root:
        return
    for other in range(words.world_size):
        start, size_bytes = 0, _input_bytes(words, call, other)
        if spreads:
            start = _block_start(call, rank)
            size_bytes = _block_start(call, rank + 1) - start
        if size_bytes > 0:
            call_copy(copy, landing, inputs[other] + start, size_bytes, 0)
        landing += size_bytes


@inline
def _take_from_root(words: Exchange, context: Context, call: Call) -> None:
    """Give this rank the root's input, or its own block of it."""
    source, start = words.inputs[call.root], 0
    size_bytes = call.largest_bytes
    if call.spreads != 0:
        start = _block_start(call, words.rank)
        size_bytes = _block_start(call, words.rank + 1) - start
    landing = call.destination
    if size_bytes > 0 and landing != 0:
        call_copy(context.copy_plain, landing, source + start, size_bytes, 0)


@inline
def _finish(words: Exchange, context: Context, call: Call) -> None:
    """Make this rank's result from all ranks' inputs."""
    _note_inputs(words, call)
    if call.kernel != 0:
        if call.spreads != 0:
            _reduce_blocks(words, context, call)
        else:
            _reduce(words, context, call)
    elif call.flow == Flow.FROM_ROOT:
        _take_from_root(words, context, call)
    else:
        _take_blocks(words, context, call)


# --- the whole ------------------------------------------------------------------------------------


@inline
def _run_large(words: Exchange, context: Context, call: Call) -> int:
    """Run a large call, which all ranks make; return its loop's status."""
    timeout_ns = context.timeout_ns
    if context.rank != LEADER:
        context.timeout_ns = timeout_ns + LATER_NS
    status = call_loop(words.large, context, call)
    context.timeout_ns = timeout_ns
    return status


@inline
def _run(words: Exchange, context: Context, call: Call) -> int:
    """Run a call that has begun; return a status."""
    status = _gather(words, context, call)
    if status != Status.OK:
        return status
    leads, whole_bytes = context.rank == LEADER, 0
    for host in range(words.n_hosts):
        size_bytes = words.parts[words.n_hosts + host]
        whole_bytes += exchange.PART_BYTES + exchange.whole_words(size_bytes)
    if leads:
        status = _exchange(words, context, call)
        outcome = words.outcome
        Words(words.held - 8)[0] = outcome
        differs = outcome == Outcome.DIFFERS
        if status != Status.OK or not (outcome == Outcome.AGREED or differs):
            return Status.NOT_YET if status == Status.OK else status
    if context.world_size > 1:
        status = _spread(words, context, call, whole_bytes)
        if status != Status.OK:
            return status
    if not leads:
        words.outcome = Words(words.held - 8)[0]
        words.digest = call.digest
        if words.outcome == Outcome.AGREED:
            words.kind = _kind(words)
            words.held_bytes = whole_bytes
            find_parts(words)
    if words.outcome != Outcome.AGREED:
        return Status.NOT_YET
    if words.is_large != 0:
        return _run_large(words, context, call)
    _finish(words, context, call)
    return Status.OK


@compiled_when_used()
def is_large(words: Exchange, call: Call) -> int:
    """Return whether a call is large: `small_call` leaves it to others, or only compares it."""
    return 1 if _is_large(words, call) else 0


@compiled_when_used()
def small_call(context: Context, call: Call) -> int:
    """Run one collective over all hosts, as the call block describes it; return a status.

    NOT_YET: Python has to go on. If `Exchange.outcome` is `NONE`, nothing has happened yet.
    """
    words = Exchange(context.hosts)
    words.outcome = Outcome.NONE
    words.is_large = 1 if _is_large(words, call) else 0
    if _is_for_python(words, context, call):
        return Status.NOT_YET
    whole_bytes = _note_sizes(words, call) + 8
    if context.world_size > 1:
        size_bytes = min(whole_bytes, context.one_shot_bytes)
        status = make_ready(context, size_bytes, size_bytes)
        if status != Status.OK:
            return status
    words.number += 1
    exchange64(words.entered, words.number)
    words.start_ns = now_ns(words)
    status = _run(words, context, call)
    if status == Status.SIGNAL:
        _ring_bell(words)
    elif status == Status.OK:
        words.completed = words.number
    return status
