"""A collective on small arrays over several hosts, in compiled code from beginning to end.

The inputs of a host's ranks go to their leader through their slots, between the leaders by an
exchange (`exchange`), and from each leader to its ranks through slots again. Then every rank has
all inputs, and computes its own result from them in rank order. So all ranks get the same bits,
wherever they are. Rare cases are left to Python: `Exchange.outcome` tells which one it is.

If hosts need only shares of larger inputs, the exchange has no data, and the leaders send the
shares after it (`pairwise_calls`). The bits are the same.

For a large call, only the check that all hosts make the same call goes this way: `Exchange.large`.
"""

from __future__ import annotations

import numpy as np

from gpucoll.collectives import Flow
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import call_copy, call_loop, exchange64, load64, store64
from gpucoll.transport.shared.flags import give_up, python_raised, release_interpreter
from gpucoll.transport.shared.layout import EVENT_WATCHED, LINE_BYTES, STATUS_ABROAD, Abort
from gpucoll.transport.shared.libc import write
from gpucoll.transport.shared.operands import fill_with_identity, n_operands
from gpucoll.transport.shared.spans import SpanKind, write_span
from gpucoll.transport.shared.steps import (
    NOT_SHARED,
    begin,
    close_record,
    make_ready,
    payload_of,
    post,
    record_of,
    wait_all_arrived,
)
from gpucoll.transport.shared.words import Call, Context, Status
from gpucoll.transport.tcp import exchange, pairwise_calls
from gpucoll.transport.tcp.call_routes import (
    block_start,
    has_whole_inputs,
    note_shares,
    own_input,
    rank_at,
    route_of,
    whole_input_bytes,
)
from gpucoll.transport.tcp.exchange import begin_exchange, find_parts, go_on_as_told, now_ns
from gpucoll.transport.tcp.exchange_words import Exchange, Outcome, PartKind, Route
from gpucoll.transport.tcp.pairwise_calls import combine_inputs
from gpucoll.transport.tcp.spread import OUTCOME_BYTES, spread_result, take_result

LATER_NS = 1_000_000_000
"""How much longer other ranks wait for their leader, whose own error tells more."""
LEADER = 0


# --- sizes ----------------------------------------------------------------------------------------


@inline
def _input_bytes(words: Exchange, call: Call, rank: int) -> int:
    """Return the size of what a rank brings to its leader: nothing if the call is large."""
    return 0 if words.route == Route.LARGE else whole_input_bytes(call, rank)


@inline
def _bytes_of_host(words: Exchange, call: Call, host: int) -> int:
    """Return the total size of the inputs of a host's ranks."""
    total, edges, order = 0, words.edges, words.order
    for place in range(edges[host], edges[host + 1]):
        total += _input_bytes(words, call, order[place])
    return total


@inline
def _note_sizes(words: Exchange, call: Call) -> None:
    """Store how many bytes each host is to bring to the exchange, whose parts all ranks get."""
    n_hosts, whole = words.n_hosts, 0
    for host in range(n_hosts):
        size_bytes = _bytes_of_host(words, call, host) if words.route == Route.SMALL else 0
        words.parts[n_hosts + host] = size_bytes
        whole += exchange.PART_BYTES + exchange.whole_words(size_bytes)
    words.result = words.held
    words.result_bytes = whole


@inline
def _kind(words: Exchange) -> int:
    """Return the kind of the hosts' parts in this call's exchange."""
    return PartKind.DATA if words.route == Route.SMALL else PartKind.NOTHING


@inline
def _is_for_python(words: Exchange, context: Context, call: Call) -> bool:
    """Return whether this call goes another way, or Python has to check something first."""
    if words.route == Route.LARGE and words.large == 0:
        return True
    if words.may_run == 0 and load64(words.n_closed) != 0:
        return True
    return context.rank == LEADER and words.is_open == 0


# --- inside a host --------------------------------------------------------------------------------


@inline
def _is_taken(words: Exchange, call: Call, place: int) -> bool:
    """Return whether the input of a rank here is copied; a leader may send its own as it lies."""
    return place != LEADER or words.route == Route.SMALL or has_whole_inputs(call)


@inline
def _piece(size_bytes: int, done: int, most_bytes: int) -> int:
    """Return how many bytes of an input belong to the piece that begins at `done`."""
    return min(max(size_bytes - done, 0), most_bytes)


@inline
def _take_pieces(
    words: Exchange, context: Context, call: Call, done: int, most_bytes: int, largest_bytes: int
) -> None:
    """Copy a piece of each input of this host to its place in the leader's part."""
    landing, copy = words.held + exchange.PART_BYTES, context.copy_plain
    if words.route == Route.PAIRWISE:
        landing = pairwise_calls.inputs_at(words, call)
    for place in range(context.world_size):
        size_bytes = _input_bytes(words, call, rank_at(words, words.here, place))
        piece_bytes = _piece(size_bytes, done, most_bytes)
        if piece_bytes > 0 and _is_taken(words, call, place):
            source = own_input(call) + done
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
        call_copy(context.copy_plain, payload, own_input(call) + done, mine_bytes, 0)
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
        if _is_taken(words, call, place):
            size_bytes = _input_bytes(words, call, rank_at(words, words.here, place))
            largest_bytes = max(largest_bytes, size_bytes)
    if context.world_size == 1:
        status = begin(context, call)
        if status == Status.OK:
            if words.route == Route.SMALL:
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


# --- between hosts --------------------------------------------------------------------------------


@inline
def _ring_bell(words: Exchange) -> None:
    """Wake the leader's thread to look for news on this host."""
    words.one = 1
    write(np.int32(words.bell_fd), words.at.one, 8)


@inline
def _go_on(words: Exchange, context: Context, call: Call, end_ns: int) -> int:
    """Go on with the parts, then in a pairwise call with the shares; return an `Outcome`."""
    if words.is_shared != 0:
        return pairwise_calls.go_on_until(words, call, end_ns)
    outcome = go_on_as_told(words, end_ns)
    if outcome == Outcome.AGREED and words.route == Route.PAIRWISE:
        pairwise_calls.begin(words, context, call)
        words.is_shared = 1
        return Outcome.AGAIN
    return outcome


@inline
def _abroad_of(context: Context) -> int:
    """Return where this rank notes since when it waits for other hosts."""
    return context.status_lines + context.rank * LINE_BYTES + STATUS_ABROAD


@inline
def _exchange(words: Exchange, context: Context, call: Call) -> int:
    """Exchange the hosts' parts, or their shares; return OK for any outcome, or SIGNAL."""
    release_interpreter(context)
    words.is_shared = 0
    size_bytes = words.parts[words.n_hosts + words.here]
    begin_exchange(words, call.digest, _kind(words), size_bytes)
    deadline_ns = words.start_ns + context.timeout_ns
    outcome: int = Outcome.AGAIN
    while outcome == Outcome.AGAIN:
        end_ns = min(now_ns(words) + context.slice_ns, deadline_ns)
        outcome = _go_on(words, context, call, end_ns)
        if outcome == Outcome.AGAIN:
            if python_raised(context):
                give_up(context, Abort.INTERRUPTED, context.rank)
                return Status.SIGNAL
            if now_ns(words) >= deadline_ns:
                outcome = Outcome.DEADLINE
            store64(_abroad_of(context), words.start_ns)
    if load64(_abroad_of(context)) != 0:
        store64(_abroad_of(context), 0)
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
def _reduce(words: Exchange, context: Context, call: Call) -> None:
    """Give this rank its result of a reduction."""
    n_ranks = n_operands(call, words.rank, words.world_size)
    if n_ranks > 0:
        combine_inputs(words, call, n_ranks, call.destination, call.size_bytes)
    elif n_ranks == 0:
        fill_with_identity(context, call, 0, call.size_bytes)


@inline
def _reduce_blocks(words: Exchange, context: Context, call: Call) -> None:
    """Give this rank its block of all inputs, combined."""
    rank, inputs = words.rank, words.inputs
    start = block_start(call, rank)
    for other in range(words.world_size):
        inputs[other] = inputs[other] + start
    size_bytes = block_start(call, rank + 1) - start
    combine_inputs(words, call, words.world_size, call.destination, size_bytes)


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
            start = block_start(call, rank)
            size_bytes = block_start(call, rank + 1) - start
        if size_bytes > 0:
            call_copy(copy, landing, inputs[other] + start, size_bytes, 0)
        landing += size_bytes


@inline
def _take_from_root(words: Exchange, context: Context, call: Call) -> None:
    """Give this rank the root's input, or its own block of it."""
    source, start = words.inputs[call.root], 0
    size_bytes = call.largest_bytes
    if call.spreads != 0:
        start = block_start(call, words.rank)
        size_bytes = block_start(call, words.rank + 1) - start
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
def _lead(words: Exchange, context: Context, call: Call) -> int:
    """Exchange data with the other leaders; return a status: OK if the ranks here are to know."""
    status = _exchange(words, context, call)
    outcome = words.outcome
    if status == Status.OK and outcome != Outcome.AGREED and outcome != Outcome.DIFFERS:
        return Status.NOT_YET
    return status


@inline
def _bring(words: Exchange, context: Context, call: Call) -> int:
    """Bring the outcome and the data from the leader to the ranks of its host."""
    status = spread_result(words, context, call)
    if status != Status.OK or context.rank == LEADER:
        return status
    words.digest = call.digest
    if words.route != Route.PAIRWISE and words.outcome == Outcome.AGREED:
        words.kind = _kind(words)
        words.held_bytes = words.result_bytes
        find_parts(words)
    return status


@inline
def _run(words: Exchange, context: Context, call: Call) -> int:
    """Run a call that has begun; return a status."""
    status = _gather(words, context, call)
    if status != Status.OK:
        return status
    if context.rank == LEADER:
        status = _lead(words, context, call)
        if status != Status.OK:
            return status
    if context.world_size > 1:
        status = _bring(words, context, call)
        if status != Status.OK:
            return status
    if words.outcome != Outcome.AGREED:
        return Status.NOT_YET
    if words.route == Route.LARGE:
        return call_loop(words.large, context, call)
    if words.route == Route.SMALL:
        _finish(words, context, call)
    elif context.rank == LEADER:
        take_result(words, context, call, words.result, 0, words.result_bytes)
    return Status.OK


@compiled_when_used()
def is_large(words: Exchange, call: Call) -> int:
    """Return whether a call is large: `small_call` leaves it to others, or only compares it."""
    return 1 if route_of(words, call) == Route.LARGE else 0


@inline
def _make_ready(words: Exchange, context: Context, call: Call) -> int:
    """Take the memory that the ranks of this host need for their data; return a status."""
    if context.world_size == 1:
        return Status.OK
    size_bytes = words.result_bytes + OUTCOME_BYTES
    if words.route == Route.PAIRWISE:
        for place in range(context.world_size):
            rank = rank_at(words, words.here, place)
            size_bytes = max(size_bytes, whole_input_bytes(call, rank))
    size_bytes = min(size_bytes, context.one_shot_bytes)
    return make_ready(context, size_bytes, size_bytes)


@compiled_when_used()
def small_call(context: Context, call: Call) -> int:
    """Run one collective over all hosts, as the call block describes it; return a status.

    NOT_YET: Python has to go on. If `Exchange.outcome` is `NONE`, nothing has happened yet.
    """
    words = Exchange(context.hosts)
    words.outcome = Outcome.NONE
    words.route = route_of(words, call)
    if _is_for_python(words, context, call):
        return Status.NOT_YET
    _note_sizes(words, call)
    if words.route == Route.PAIRWISE:
        note_shares(words, call)
    status = _make_ready(words, context, call)
    if status != Status.OK:
        return status
    words.number += 1
    exchange64(words.entered, words.number)
    words.start_ns = now_ns(words)
    timeout_ns = context.timeout_ns
    if context.rank != LEADER:
        context.timeout_ns = timeout_ns + LATER_NS
    status = _run(words, context, call)
    context.timeout_ns = timeout_ns
    if status == Status.SIGNAL:
        _ring_bell(words)
    elif status == Status.OK:
        words.completed = words.number
        if load64(context.event_line + EVENT_WATCHED) != 0:
            record = record_of(context, context.sequence)
            write_span(context, record, SpanKind.SEVERAL_HOSTS, words.number, words.start_ns)
    return status
