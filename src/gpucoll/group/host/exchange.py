"""The control channel's own collective: every rank's bytes to every rank; and the barrier.

Payloads have one size on all ranks and fit into a slot; longer ones are sent in pieces by
`gpucoll.group.host.channel`. Without payload it is a barrier.
"""

from __future__ import annotations

from numba import types

from gpucoll.kernels.cpu.jit import compiled
from gpucoll.kernels.cpu.memory import call_copy, get, put
from gpucoll.transport.shared.steps import (
    DESTINATION,
    NOT_SHARED,
    OK,
    PATH,
    RANK,
    SEQUENCE,
    SIZE_BYTES,
    SOURCE,
    WORLD_SIZE,
    begin,
    close_record,
    payload_of,
    post,
    signal_done,
    wait_all_arrived,
)
from gpucoll.transport.shared.words import Context, Path

_COPY_PLAIN, _ONE_SHOT = int(Context.COPY_PLAIN), int(Path.ONE_SHOT)


@compiled(types.int64(types.int64, types.int64))
def exchange_loop(context, call):
    """Gather every rank's payload, in rank order, at the destination; return a status."""
    status = begin(context, call)
    if status != OK:
        return status
    size_bytes, sequence = get(call, SIZE_BYTES), get(context, SEQUENCE)
    copy = get(context, _COPY_PLAIN)
    if size_bytes > 0:
        mine = payload_of(context, sequence, get(context, RANK), size_bytes)
        call_copy(copy, mine, get(call, SOURCE), size_bytes, 0)
    post(context, call, NOT_SHARED, NOT_SHARED)
    status = wait_all_arrived(context, call)
    if status != OK:
        return status
    if size_bytes > 0:
        for rank in range(get(context, WORLD_SIZE)):
            payload = payload_of(context, sequence, rank, size_bytes)
            call_copy(copy, get(call, DESTINATION) + rank * size_bytes, payload, size_bytes, 0)
    put(context, PATH, _ONE_SHOT)
    signal_done(context)
    close_record(context)
    return OK
