"""Movement of large private arrays in one copy: each rank reads its pieces from other processes.

Used if the kernel lets processes read each other's memory (`transport.peer_memory`). Ranks only
read: a peer that was given up could still write into memory that its owner has reused.
"""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import get, load64_acquire, put
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import copy_from_process, event_pending_since, give_up
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.steps import LINE, OK, STATUS_LINES, WORLD_SIZE
from gpucoll.transport.shared.words import Context, Status

SLICE_BYTES = 16 << 20
"""After copying this much, check whether the call has been given up."""

_SINGLE_COPY, _PIDS = int(Context.SINGLE_COPY), int(Context.PIDS)
_STATUS_COPIES = layout.STATUS_COPIES
_EVENT, _LOST = int(Status.EVENT), int(Status.LOST)
_ABORT_UNREADABLE = int(Abort.UNREADABLE)
_YES, _NO = 1, 2


@inline
def can_read(context, rank):
    """Return whether a rank can read the memory of all others."""
    return load64_acquire(get(context, STATUS_LINES) + rank * LINE + _STATUS_COPIES) == 1


@inline
def can_copy_once(context):
    """Return whether all ranks can read each other's memory, once all have arrived; same on all."""
    if get(context, _SINGLE_COPY) == 0:
        answer = _YES
        for rank in range(get(context, WORLD_SIZE)):
            if not can_read(context, rank):
                answer = _NO
        put(context, _SINGLE_COPY, answer)
    return get(context, _SINGLE_COPY) == _YES


@inline
def read_from(context, rank, destination, source, size_bytes):
    """Copy from an address in the process of `rank`; return a status."""
    done = 0
    while done < size_bytes:
        step = min(SLICE_BYTES, size_bytes - done)
        pid = get(get(context, _PIDS), rank)
        if copy_from_process(context, pid, destination + done, source + done, step) != step:
            give_up(context, _ABORT_UNREADABLE, rank)
            return _LOST
        if event_pending_since(context):
            return _EVENT  # the data read may be invalid by now
        done += step
    return OK
