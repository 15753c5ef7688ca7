"""A collective on small arrays over several hosts, in compiled code from beginning to end.

The inputs of a host's ranks go to their leader through their slots, between the leaders by an
exchange (`exchange`), and from each leader to its ranks through slots again. Then every rank has
all inputs, and computes its own result from them in rank order. So all ranks get the same bits,
wherever they are. Rare cases are left to Python: `Exchange.outcome` tells which one it is.

For a large call, only the check that all hosts make the same call goes this way: `Exchange.large`.
"""

from __future__ import annotations

import numpy as np

from gpucoll.kernels.cpu.blocks import Words
from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.kept_loops import compiled_when_used
from gpucoll.kernels.cpu.memory import (
    call_copy,
    call_loop,
    call_reduce,
    exchange64,
    get,
    load64,
    put,
)
from gpucoll.transport.shared.flags import give_up, python_raised, release_interpreter
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.steps import (
    DESTINATION,
    DIGEST,
    IDENTITY,
    ITEM_BYTES,
    KERNEL,
    LARGEST_BYTES,
    NOT_SHARED,
    OK,
    PARAMETER,
    PART_BYTES,
    ROOT,
    SEQUENCE,
    SIZE_BYTES,
    SOURCE,
    begin,
    close_record,
    make_ready,
    payload_of,
    post,
    wait_all_arrived,
    wait_arrived,
)
from gpucoll.transport.shared.words import Call, Context, Flow, Status
from gpucoll.transport.tcp import exchange
from gpucoll.transport.tcp.exchange import begin_exchange, find_parts, go_on_as_told, now_ns
from gpucoll.transport.tcp.exchange_words import Exchange, Outcome, PartKind

_CONTEXT_HOSTS, _PLACE, _N_HERE = int(Context.HOSTS), int(Context.RANK), int(Context.WORLD_SIZE)
_TIMEOUT_NS, _SLICE_NS = int(Context.TIMEOUT_NS), int(Context.SLICE_NS)
_COPY, _ONE_SHOT_BYTES = int(Context.COPY_PLAIN), int(Context.ONE_SHOT_BYTES)
_FLOW, _IS_SPREAD = int(Call.FLOW), int(Call.IS_SPREAD)
_BLOCK_BYTES, _OFFSETS, _PIECES = int(Call.BLOCK_BYTES), int(Call.OFFSETS), int(Call.PIECES)
_SCAN_KERNEL, _STRIDE = int(Call.SCAN_KERNEL), int(Call.PARAMETER_STRIDE)
_FROM_ROOT, _TO_ROOT = int(Flow.FROM_ROOT), int(Flow.TO_ROOT)
_SIGNAL, _NOT_YET = int(Status.SIGNAL), int(Status.NOT_YET)
_INTERRUPTED = int(Abort.INTERRUPTED)


LATER_NS = 1_000_000_000
"""How much longer other ranks wait for their leader, whose own error tells more."""
LEADER = 0

_i64, _i32 = types.int64, types.int32
_write = types.ExternalFunction("write", _i64(_i32, _i64, _i64))


# --- sizes ----------------------------------------------------------------------------------------


@inline
def _input_bytes(words: Exchange, call: int, rank: int) -> int:
    """Return the size of a rank's input; the same on all ranks that make the same call."""
    if words.is_large != 0:
        return 0
    if get(call, _FLOW) == _FROM_ROOT:
        return get(call, LARGEST_BYTES) if rank == get(call, ROOT) else 0
    if get(call, _IS_SPREAD) != 0:
        return get(call, LARGEST_BYTES)
    if get(call, KERNEL) != 0:
        return get(call, SIZE_BYTES)
    offsets = get(call, _OFFSETS)
    if offsets != 0:
        return load64(offsets + 8 * (rank + 1)) - load64(offsets + 8 * rank)
    return get(call, _BLOCK_BYTES)


@inline
def _bytes_of_host(words: Exchange, call: int, host: int) -> int:
    """Return the total size of the inputs of a host's ranks."""
    total, edges, order = 0, words.edges, words.order
    for place in range(edges[host], edges[host + 1]):
        total += _input_bytes(words, call, order[place])
    return total


@inline
def _note_sizes(words: Exchange, call: int) -> int:
    """Store how many bytes each host is to bring; return the total size of all parts."""
    n_hosts, whole = words.n_hosts, 0
    for host in range(n_hosts):
        size_bytes = _bytes_of_host(words, call, host)
        words.parts[n_hosts + host] = size_bytes
        whole += exchange.PART_BYTES + exchange.whole_words(size_bytes)
    return whole


@inline
def _data_bytes(words: Exchange, call: int) -> int:
    """Return the total size of all ranks' inputs."""
    total = 0
    for rank in range(words.world_size):
        total += _input_bytes(words, call, rank)
    return total


@inline
def _note_whether_large(words: Exchange, call: int) -> None:
    """Store whether this call is large; a call with counts that others may not know always is."""
    words.is_large = 0
    if get(call, _PIECES) != 0 or _data_bytes(words, call) > words.most_bytes:
        words.is_large = 1


@inline
def _kind(words: Exchange) -> int:
    """Return the kind of the hosts' parts in this call's exchange."""
    return PartKind.NOTHING if words.is_large != 0 else PartKind.DATA


@inline
def _is_for_python(words: Exchange, context: int, call: int) -> bool:
    """Return whether this call goes another way, or Python has to check something first."""
    if words.is_large != 0 and words.large == 0:
        return True
    if words.may_run == 0 and load64(words.n_closed) != 0:
        return True
    return get(context, _PLACE) == LEADER and words.is_open == 0


# --- inside a host --------------------------------------------------------------------------------


@inline
def _own_input(call: int) -> int:
    """Return the address of this rank's input; a root may have it in its output's place."""
    return get(call, SOURCE) if get(call, SOURCE) != 0 else get(call, DESTINATION)


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
    words: Exchange, context: int, call: int, done: int, most_bytes: int, largest_bytes: int
) -> None:
    """Copy a piece of each input of this host to its place in the leader's part."""
    landing, copy = words.held + exchange.PART_BYTES, get(context, _COPY)
    for place in range(get(context, _N_HERE)):
        size_bytes = _input_bytes(words, call, _rank_at(words, place))
        piece_bytes = _piece(size_bytes, done, most_bytes)
        if piece_bytes > 0:
            source = _own_input(call) + done
            if place != LEADER:
                source = payload_of(context, get(context, SEQUENCE), place, largest_bytes)
            call_copy(copy, landing + done, source, piece_bytes, 0)
        landing += size_bytes


@inline
def _gather_pieces(
    words: Exchange, context: int, call: int, done: int, most_bytes: int, rest_bytes: int
) -> int:
    """Bring a piece of each input to the leader; no input has more than `rest_bytes` left."""
    status = begin(context, call)
    if status != OK:
        return status
    place, largest_bytes = get(context, _PLACE), min(most_bytes, rest_bytes)
    mine_bytes = _piece(_input_bytes(words, call, words.rank), done, most_bytes)
    if place != LEADER and mine_bytes > 0:
        payload = payload_of(context, get(context, SEQUENCE), place, largest_bytes)
        call_copy(get(context, _COPY), payload, _own_input(call) + done, mine_bytes, 0)
    post(context, call, NOT_SHARED, NOT_SHARED)
    if place == LEADER:
        status = wait_all_arrived(context, call)
        if status != OK:
            return status
        _take_pieces(words, context, call, done, most_bytes, largest_bytes)
    close_record(context)
    return OK


@inline
def _gather(words: Exchange, context: int, call: int) -> int:
    """Bring the inputs of this host's ranks to its leader, after the header of its part."""
    largest_bytes = done = 0
    for place in range(get(context, _N_HERE)):
        size_bytes = _input_bytes(words, call, _rank_at(words, place))
        largest_bytes = max(largest_bytes, size_bytes)
    if get(context, _N_HERE) == 1:
        status = begin(context, call)
        if status == OK:
            _take_pieces(words, context, call, 0, largest_bytes, largest_bytes)
            close_record(context)
        return status
    most_bytes = get(context, _ONE_SHOT_BYTES)
    while True:
        rest_bytes = largest_bytes - done
        status = _gather_pieces(words, context, call, done, most_bytes, rest_bytes)
        done += most_bytes
        if status != OK or done >= largest_bytes:
            return status


@inline
def _spread_piece(words: Exchange, context: int, call: int, address: int, size_bytes: int) -> int:
    """Bring a piece of the leader's data to all ranks of its host; return a status."""
    status = begin(context, call)
    if status != OK:
        return status
    sequence, copy = get(context, SEQUENCE), get(context, _COPY)
    payload = payload_of(context, sequence, LEADER, size_bytes)
    if get(context, _PLACE) == LEADER:
        call_copy(copy, payload, address, size_bytes, 0)
        post(context, call, NOT_SHARED, NOT_SHARED)
    else:
        post(context, call, NOT_SHARED, NOT_SHARED)
        status = wait_arrived(context, call, LEADER)
        if status != OK:
            return status
        call_copy(copy, address, payload, size_bytes, 0)
    close_record(context)
    return OK


@inline
def _spread(words: Exchange, context: int, call: int, whole_bytes: int) -> int:
    """Bring the outcome and all parts from the leader to the ranks of its host."""
    start, done, status = words.held - 8, 0, OK
    whole_bytes += 8
    timeout_ns = get(context, _TIMEOUT_NS)
    if get(context, _PLACE) != LEADER:
        put(context, _TIMEOUT_NS, timeout_ns + LATER_NS)
    while done < whole_bytes and status == OK:
        size_bytes = min(get(context, _ONE_SHOT_BYTES), whole_bytes - done)
        status = _spread_piece(words, context, call, start + done, size_bytes)
        done += size_bytes
    put(context, _TIMEOUT_NS, timeout_ns)
    return status


# --- between hosts --------------------------------------------------------------------------------


@inline
def _ring_bell(words: Exchange) -> None:
    """Wake the leader's thread to look for news on this host."""
    words.one = 1
    _write(np.int32(words.bell_fd), words.at.one, 8)


@inline
def _exchange(words: Exchange, context: int, call: int) -> int:
    """Exchange the hosts' parts; return OK for any outcome, or SIGNAL."""
    release_interpreter(context)
    size_bytes = words.parts[words.n_hosts + words.here]
    begin_exchange(words, get(call, DIGEST), _kind(words), size_bytes)
    deadline_ns = words.start_ns + get(context, _TIMEOUT_NS)
    outcome: int = Outcome.AGAIN
    while outcome == Outcome.AGAIN:
        end_ns = min(now_ns(words) + get(context, _SLICE_NS), deadline_ns)
        outcome = go_on_as_told(words, end_ns)
        if outcome == Outcome.AGAIN:
            if python_raised(context):
                give_up(context, _INTERRUPTED, get(context, _PLACE))
                return _SIGNAL
            if now_ns(words) >= deadline_ns:
                outcome = Outcome.DEADLINE
    words.outcome = outcome
    return OK


# --- results --------------------------------------------------------------------------------------


@inline
def _note_inputs(words: Exchange, call: int) -> None:
    """Store where each rank's input lies."""
    edges, order, inputs = words.edges, words.order, words.inputs
    for host in range(words.n_hosts):
        at = words.parts[host]
        for place in range(edges[host], edges[host + 1]):
            rank = order[place]
            inputs[rank] = at
            at += _input_bytes(words, call, rank)


@inline
def _combine(words: Exchange, call: int, n_ranks: int, size_bytes: int) -> None:
    """Combine the inputs of the first `n_ranks` ranks, in order."""
    if size_bytes <= 0:
        return
    inputs = words.inputs
    landing = inputs.address + 8 * words.world_size
    Words(landing)[0] = get(call, DESTINATION)
    parameter = get(call, PARAMETER) + get(call, _STRIDE) * (n_ranks - 1)
    count = size_bytes // get(call, PART_BYTES)
    call_reduce(get(call, KERNEL), landing, 1, inputs.address, n_ranks, count, parameter, 0)


@inline
def _fill_with_identity(context: int, call: int) -> None:
    """Fill the result of the first rank of an exclusive scan with the identity."""
    item_bytes, done = get(call, ITEM_BYTES), 0
    while done < get(call, SIZE_BYTES):
        landing = get(call, DESTINATION) + done
        call_copy(get(context, _COPY), landing, get(call, IDENTITY), item_bytes, 0)
        done += item_bytes


@inline
def _reduce(words: Exchange, context: int, call: int) -> None:
    """Give this rank its result of a reduction."""
    rank, world_size = words.rank, words.world_size
    if get(call, _SCAN_KERNEL) == 0:
        if get(call, ROOT) < 0 or get(call, ROOT) == rank:
            _combine(words, call, world_size, get(call, SIZE_BYTES))
        return
    n_ranks = rank if get(call, IDENTITY) != 0 else rank + 1
    if n_ranks > 0:
        _combine(words, call, n_ranks, get(call, SIZE_BYTES))
    else:
        _fill_with_identity(context, call)


@inline
def _block_start(call: int, rank: int) -> int:
    """Return the offset of a rank's block in an input with one block for each rank."""
    if get(call, _OFFSETS) != 0:
        return load64(get(call, _OFFSETS) + 8 * rank)
    return get(call, _BLOCK_BYTES) * rank


@inline
def _reduce_blocks(words: Exchange, context: int, call: int) -> None:
    """Give this rank its block of all inputs, combined."""
    rank, inputs = words.rank, words.inputs
    start = _block_start(call, rank)
    for other in range(words.world_size):
        inputs[other] = inputs[other] + start
    size_bytes = _block_start(call, rank + 1) - start
    _combine(words, call, words.world_size, size_bytes)


@inline
def _take_blocks(words: Exchange, context: int, call: int) -> None:
    """Give this rank its block of every input, or the whole of every input, in rank order."""
    rank, inputs, copy = words.rank, words.inputs, get(context, _COPY)
    landing, is_spread = get(call, DESTINATION), get(call, _IS_SPREAD) != 0
    if get(call, _FLOW) == _TO_ROOT and rank != get(call, ROOT):
        return
    for other in range(words.world_size):
        start, size_bytes = 0, _input_bytes(words, call, other)
        if is_spread:
            start = _block_start(call, rank)
            size_bytes = _block_start(call, rank + 1) - start
        if size_bytes > 0:
            call_copy(copy, landing, inputs[other] + start, size_bytes, 0)
        landing += size_bytes


@inline
def _take_from_root(words: Exchange, context: int, call: int) -> None:
    """Give this rank the root's input, or its own block of it."""
    source, start = words.inputs[get(call, ROOT)], 0
    size_bytes = get(call, LARGEST_BYTES)
    if get(call, _IS_SPREAD) != 0:
        start = _block_start(call, words.rank)
        size_bytes = _block_start(call, words.rank + 1) - start
    landing = get(call, DESTINATION)
    if size_bytes > 0 and landing != 0:
        call_copy(get(context, _COPY), landing, source + start, size_bytes, 0)


@inline
def _finish(words: Exchange, context: int, call: int) -> None:
    """Make this rank's result from all ranks' inputs."""
    _note_inputs(words, call)
    if get(call, KERNEL) != 0:
        if get(call, _IS_SPREAD) != 0:
            _reduce_blocks(words, context, call)
        else:
            _reduce(words, context, call)
    elif get(call, _FLOW) == _FROM_ROOT:
        _take_from_root(words, context, call)
    else:
        _take_blocks(words, context, call)


# --- the whole ------------------------------------------------------------------------------------


@inline
def _run_large(words: Exchange, context: int, call: int) -> int:
    """Run a large call, which all ranks make; return its loop's status."""
    timeout_ns = get(context, _TIMEOUT_NS)
    if get(context, _PLACE) != LEADER:
        put(context, _TIMEOUT_NS, timeout_ns + LATER_NS)
    status = call_loop(words.large, context, call)
    put(context, _TIMEOUT_NS, timeout_ns)
    return status


@inline
def _run(words: Exchange, context: int, call: int) -> int:
    """Run a call that has begun; return a status."""
    status = _gather(words, context, call)
    if status != OK:
        return status
    leads, whole_bytes = get(context, _PLACE) == LEADER, 0
    for host in range(words.n_hosts):
        size_bytes = words.parts[words.n_hosts + host]
        whole_bytes += exchange.PART_BYTES + exchange.whole_words(size_bytes)
    if leads:
        status = _exchange(words, context, call)
        outcome = words.outcome
        Words(words.held - 8)[0] = outcome
        differs = outcome == Outcome.DIFFERS
        if status != OK or not (outcome == Outcome.AGREED or differs):
            return _NOT_YET if status == OK else status
    if get(context, _N_HERE) > 1:
        status = _spread(words, context, call, whole_bytes)
        if status != OK:
            return status
    if not leads:
        words.outcome = Words(words.held - 8)[0]
        words.digest = get(call, DIGEST)
        if words.outcome == Outcome.AGREED:
            words.kind = _kind(words)
            words.held_bytes = whole_bytes
            find_parts(words)
    if words.outcome != Outcome.AGREED:
        return _NOT_YET
    if words.is_large != 0:
        return _run_large(words, context, call)
    _finish(words, context, call)
    return OK


@compiled_when_used()
def small_call(context: int, call: int) -> int:
    """Run one collective over all hosts, as the call block describes it; return a status.

    NOT_YET: Python has to go on. If `Exchange.outcome` is `NONE`, nothing has happened yet.
    """
    words = Exchange(get(context, _CONTEXT_HOSTS))
    words.outcome = Outcome.NONE
    _note_whether_large(words, call)
    if _is_for_python(words, context, call):
        return _NOT_YET
    whole_bytes = _note_sizes(words, call) + 8
    if get(context, _N_HERE) > 1:
        size_bytes = min(whole_bytes, get(context, _ONE_SHOT_BYTES))
        status = make_ready(context, size_bytes, size_bytes)
        if status != OK:
            return status
    words.number += 1
    exchange64(words.entered, words.number)
    words.start_ns = now_ns(words)
    status = _run(words, context, call)
    if status == _SIGNAL:
        _ring_bell(words)
    elif status == OK:
        words.completed = words.number
    return status
