"""Take memory for a part of the segment when the part is first used, from compiled code.

The segment has its final size from the beginning, and is sparse. The kernel takes memory for an
unreserved page when a process touches it, even by a load; if there is none left, the process dies
of a SIGBUS. So the rank that uses a part first reserves it before. The others touch the part only
after they have seen a flag that announces it; the flag is in a part that is reserved from the
beginning.

The context has the amount that may be taken before the host's free memory is checked again, because
the kernel would rather kill a process than refuse (`group.host.segment_room` checks, and grants
more).
"""

from __future__ import annotations

import numpy as np

from gpucoll.kernels.cpu.jit import compiled, inline, types
from gpucoll.kernels.cpu.memory import load64_acquire, store64_release
from gpucoll.transport.shared.flags import give_up
from gpucoll.transport.shared.layout import EVENT_PAYLOADS, RING, Abort
from gpucoll.transport.shared.libc import EINTR, errno
from gpucoll.transport.shared.words import Context, Status

PIECE_BYTES = 1 << 20
"""The size reserved in one system call; if a signal interrupts it, the kernel undoes the call."""
PAGE_BYTES = 4096
EOPNOTSUPP = 95
_i64, _i32 = types.int64, types.int32
_fallocate = types.ExternalFunction("fallocate", _i32(_i32, _i32, _i64, _i64))


@inline
def _reserve_piece(fd: int, offset: int, size_bytes: int) -> int:
    """Reserve a piece of a file; return 0, or the number of the kernel's error."""
    while True:
        if _fallocate(np.int32(fd), np.int32(0), offset, size_bytes) == 0:
            return 0
        error = errno()
        if error == EOPNOTSUPP:  # no memfd, and a file system without it: pages come when touched
            return 0
        if error != EINTR:
            return error


@inline
def _may_take(context: Context, size_bytes: int) -> bool:
    """Take `size_bytes` of the granted memory; return whether that much was left."""
    context.refused_bytes = size_bytes
    context.refused_error = 0
    if size_bytes > context.room_bytes:
        return False
    context.room_bytes -= size_bytes
    return True


@inline
def _reserve_granted(context: Context, address: int, size_bytes: int) -> int:
    """Reserve a part of the segment, for which memory has been granted; return a status."""
    done, offset = 0, address - context.event_line
    while done < size_bytes:
        step = min(PIECE_BYTES, size_bytes - done)
        error = _reserve_piece(context.segment_fd, offset + done, step)
        if error != 0:
            context.refused_error = error
            return Status.NO_ROOM
        done += step
    return Status.OK


@inline
def reserve(context: Context, address: int, size_bytes: int) -> int:
    """Take memory for a part of the segment; return OK, or NO_ROOM if nothing has happened.

    It reserves whole pages. Pages that are reserved already are not touched, so two ranks may do it
    at once. The context has the reason for NO_ROOM: `group.host.segment_room.make_room` grants more
    memory, or raises.
    """
    if not _may_take(context, size_bytes):
        return Status.NO_ROOM
    return _reserve_granted(context, address, size_bytes)


@compiled
def reserve_part(context: Context, address: int, size_bytes: int) -> int:
    """Take memory for a part of the segment; return a status. For Python."""
    return reserve(context, address, size_bytes)


# --- for collectives ------------------------------------------------------------------------------


@inline
def _reserve_payloads(context: Context, size_bytes: int) -> int:
    """Take memory for the first bytes of every rank's payloads: each rank writes in all places."""
    stride, count = context.payload_stride, RING * context.world_size
    payloads = context.payloads
    if not _may_take(context, count * min(size_bytes + PAGE_BYTES, stride)):
        return Status.NO_ROOM
    if size_bytes == stride:
        return _reserve_granted(context, payloads, count * stride)
    for place in range(count):
        status = _reserve_granted(context, payloads + place * stride, size_bytes)
        if status != Status.OK:
            return status
    return Status.OK


@inline
def _take_payloads(context: Context, size_bytes: int) -> int:
    """Ensure memory for payloads of this size and somewhat larger ones; return a status."""
    if size_bytes > context.ready_payloads:
        word = context.event_line + EVENT_PAYLOADS
        ready_bytes = load64_acquire(word)
        if ready_bytes < size_bytes:  # no other rank has taken it yet
            ready_bytes = PAGE_BYTES
            while ready_bytes < size_bytes:
                ready_bytes *= 4
            ready_bytes = min(ready_bytes, context.payload_stride)
            status = _reserve_payloads(context, ready_bytes)
            if status != Status.OK:
                return status
            # If two ranks do this at once, the smaller size may remain. It is found too small
            # later, which does no harm.
            store64_release(word, ready_bytes)
        context.ready_payloads = ready_bytes
    context.ready_bytes = min(context.ready_payloads, context.one_shot_bytes)
    return Status.OK


@inline
def _take_stages(context: Context) -> int:
    """Take memory for this rank's stages: others touch them only after it has filled them."""
    chunk_bytes, world_size = context.chunk_bytes, context.world_size
    for turn in range(context.n_stages):
        place = turn * world_size + context.rank
        stage = context.stages + place * chunk_bytes
        status = _reserve_granted(context, stage, chunk_bytes)
        if status != Status.OK:
            return status
    context.ready_stages = 1
    return Status.OK


@compiled
def take_memory(context: Context, payload_bytes: int) -> int:
    """Ensure memory for payloads of this size or, for 0, for stages; return a status.

    It is called before a call begins; see `steps.make_ready`. It is a C function of its own, so
    that a communicator has it once.
    """
    if payload_bytes > 0:
        return _take_payloads(context, payload_bytes)
    if context.ready_stages != 0:
        return Status.OK
    if not _may_take(context, context.n_stages * context.chunk_bytes):
        return Status.NO_ROOM
    return _take_stages(context)


@inline
def have_stages(context: Context) -> int:
    """Ensure memory for stages in a call that has found out late that it needs them.

    This happens if some ranks' arrays lie in shared arenas and others' do not. All ranks are in the
    call by then, so a lack of memory breaks the communicator.
    """
    if context.ready_stages != 0 or _take_stages(context) == Status.OK:
        return Status.OK
    give_up(context, Abort.NO_ROOM, context.rank)
    return Status.EVENT
