"""Movement of large private arrays in one copy: each rank reads its pieces from other processes.

Used if the kernel lets processes read each other's memory (`transport.peer_memory`). Ranks only
read: a peer that was given up could still write into memory that its owner has reused.
"""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import load64_acquire
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import copy_from_process, event_pending_since, give_up
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.steps import LINE
from gpucoll.transport.shared.words import Context, Status

SLICE_BYTES = 16 << 20
"""After copying this much, check whether the call has been given up."""

_STATUS_COPIES = layout.STATUS_COPIES
_YES, _NO = 1, 2


@inline
def can_read(context: Context, rank: int) -> bool:
    """Return whether a rank can read the memory of all others."""
    return load64_acquire(context.status_lines + rank * LINE + _STATUS_COPIES) == 1


@inline
def can_copy_once(context: Context) -> bool:
    """Return whether all ranks can read each other's memory, once all have arrived; same on all."""
    if context.single_copy == 0:
        answer = _YES
        for rank in range(context.world_size):
            if not can_read(context, rank):
                answer = _NO
        context.single_copy = answer
    return context.single_copy == _YES


@inline
def read_from(context: Context, rank: int, destination: int, source: int, size_bytes: int) -> int:
    """Copy from an address in the process of `rank`; return a status."""
    done = 0
    while done < size_bytes:
        step = min(SLICE_BYTES, size_bytes - done)
        pid = context.pids[rank]
        if copy_from_process(context, pid, destination + done, source + done, step) != step:
            give_up(context, Abort.UNREADABLE, rank)
            return Status.LOST
        if event_pending_since(context):
            return Status.EVENT  # the data read may be invalid by now
        done += step
    return Status.OK
