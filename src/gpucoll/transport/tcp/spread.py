"""What a leader has received, inside its host: to each rank's own output, or parts to all ranks."""

from __future__ import annotations

from gpucoll.blocks import Words
from gpucoll.collectives import Flow
from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import call_copy
from gpucoll.transport.shared.steps import (
    NOT_SHARED,
    begin,
    close_record,
    payload_of,
    post,
    wait_arrived,
)
from gpucoll.transport.shared.words import Call, Context, Status
from gpucoll.transport.tcp.call_routes import block_start
from gpucoll.transport.tcp.exchange_words import Exchange, Outcome, Route

OUTCOME_BYTES = 8
"""Every piece begins with the outcome of the call: ranks write only if that is good."""
_LEADER = 0


@inline
def take_result(
    words: Exchange, context: Context, call: Call, source: int, start: int, stop: int
) -> None:
    """Copy what this rank gets of a piece, from `start` to `stop` of the result, to its output.

    If the result is the parts of an exchange, every rank makes its own result of them later.
    """
    copy, landing, rank = context.copy_plain, call.destination, words.rank
    if words.route != Route.PAIRWISE:
        call_copy(copy, words.held + start, source, stop - start, 0)
        return
    if landing == 0 or (call.flow == Flow.TO_ROOT and rank != call.root):
        return
    if call.spreads == 0:
        if landing + start != source:
            call_copy(copy, landing + start, source, stop - start, 0)
        return
    host, own = words.peers[words.here], block_start(call, rank)
    size_bytes = block_start(call, rank + 1) - own
    at = own - host.share_start
    for _ in range(words.world_size if call.gathers != 0 else 1):
        first, last = max(at, start), min(at + size_bytes, stop)
        if first < last:
            place, origin = landing + first - at, source + first - start
            if place != origin:
                call_copy(copy, place, origin, last - first, 0)
        landing += size_bytes
        at += host.share


@inline
def _spread_piece(words: Exchange, context: Context, call: Call, start: int, stop: int) -> int:
    """Bring a piece of the result, and the outcome, to all ranks of the host; return a status."""
    status = begin(context, call)
    if status != Status.OK:
        return status
    size_bytes = OUTCOME_BYTES + stop - start
    payload = payload_of(context, context.sequence, _LEADER, size_bytes)
    data = payload + OUTCOME_BYTES
    if context.rank == _LEADER:
        Words(payload)[0] = words.outcome
        if stop > start and words.outcome == Outcome.AGREED:
            call_copy(context.copy_plain, data, words.result + start, stop - start, 0)
        post(context, call, NOT_SHARED, NOT_SHARED)
    else:
        post(context, call, NOT_SHARED, NOT_SHARED)
        status = wait_arrived(context, call, _LEADER)
        if status != Status.OK:
            return status
        words.outcome = Words(payload)[0]
        if words.outcome == Outcome.AGREED and stop > start:
            take_result(words, context, call, data, start, stop)
    close_record(context)
    return Status.OK


@inline
def spread_result(words: Exchange, context: Context, call: Call) -> int:
    """Bring the outcome, and if it is good the result, to all ranks of the host."""
    whole_bytes, done = words.result_bytes, 0
    most_bytes = context.one_shot_bytes - OUTCOME_BYTES
    while True:
        stop = min(done + most_bytes, whole_bytes)
        status = _spread_piece(words, context, call, done, stop)
        done = stop
        if status != Status.OK or done == whole_bytes or words.outcome != Outcome.AGREED:
            return status
