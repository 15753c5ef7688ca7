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
from gpucoll.kernels.cpu.memory import (
    get,
    load64_acquire,
    put,
    store64_release,
)
from gpucoll.transport.shared.flags import give_up
from gpucoll.transport.shared.layout import EVENT_PAYLOADS, RING, STAGES, Abort
from gpucoll.transport.shared.words import Context, Status

__all__ = ["PIECE_BYTES", "have_stages", "reserve", "reserve_part", "take_memory"]

PIECE_BYTES = 1 << 20
"""The size reserved in one system call; if a signal interrupts it, the kernel undoes the call."""
PAGE_BYTES = 4096
EINTR, EOPNOTSUPP = 4, 95

_SEGMENT_FD, _EVENT_LINE = int(Context.SEGMENT_FD), int(Context.EVENT_LINE)
_ROOM_BYTES = int(Context.ROOM_BYTES)
_REFUSED_BYTES, _REFUSED_ERROR = int(Context.REFUSED_BYTES), int(Context.REFUSED_ERROR)
_RANK, _WORLD_SIZE = int(Context.RANK), int(Context.WORLD_SIZE)
_PAYLOADS, _PAYLOAD_STRIDE = int(Context.PAYLOADS), int(Context.PAYLOAD_STRIDE)
_STAGES, _CHUNK_BYTES = int(Context.STAGES), int(Context.CHUNK_BYTES)
_ONE_SHOT_BYTES = int(Context.ONE_SHOT_BYTES)
_READY_BYTES, _READY_PAYLOADS = int(Context.READY_BYTES), int(Context.READY_PAYLOADS)
_READY_STAGES, _ABORT_NO_ROOM = int(Context.READY_STAGES), int(Abort.NO_ROOM)
_OK, _NO_ROOM, _EVENT = int(Status.OK), int(Status.NO_ROOM), int(Status.EVENT)

_i64, _i32 = types.int64, types.int32
_fallocate = types.ExternalFunction("fallocate", _i32(_i32, _i32, _i64, _i64))
_errno_location = types.ExternalFunction("__errno_location", _i64())


@inline
def _errno():
    """Return this thread's errno: 32 bits of a word of 64."""
    address = _errno_location()
    return (get(address & ~7, 0) >> ((address & 4) << 3)) & 0xFFFFFFFF


@inline
def _reserve_piece(fd, offset, size_bytes):
    """Reserve a piece of a file; return 0, or the number of the kernel's error."""
    while True:
        if _fallocate(np.int32(fd), np.int32(0), offset, size_bytes) == 0:
            return 0
        error = _errno()
        if error == EOPNOTSUPP:  # no memfd, and a file system without it: pages come when touched
            return 0
        if error != EINTR:
            return error


@inline
def _may_take(context, size_bytes):
    """Take `size_bytes` of the granted memory; return whether that much was left."""
    put(context, _REFUSED_BYTES, size_bytes)
    put(context, _REFUSED_ERROR, 0)
    if size_bytes > get(context, _ROOM_BYTES):
        return False
    put(context, _ROOM_BYTES, get(context, _ROOM_BYTES) - size_bytes)
    return True


@inline
def _reserve_granted(context, address, size_bytes):
    """Reserve a part of the segment, for which memory has been granted; return a status."""
    done, offset = 0, address - get(context, _EVENT_LINE)
    while done < size_bytes:
        step = min(PIECE_BYTES, size_bytes - done)
        error = _reserve_piece(get(context, _SEGMENT_FD), offset + done, step)
        if error != 0:
            put(context, _REFUSED_ERROR, error)
            return _NO_ROOM
        done += step
    return _OK


@inline
def reserve(context, address, size_bytes):
    """Take memory for a part of the segment; return OK, or NO_ROOM if nothing has happened.

    It reserves whole pages. Pages that are reserved already are not touched, so two ranks may do it
    at once. The context has the reason for NO_ROOM: `group.host.segment_room.make_room` grants more
    memory, or raises.
    """
    if not _may_take(context, size_bytes):
        return _NO_ROOM
    return _reserve_granted(context, address, size_bytes)


@compiled
def reserve_part(context, address, size_bytes):
    """Take memory for a part of the segment; return a status. For Python."""
    return reserve(context, address, size_bytes)


# --- for collectives ------------------------------------------------------------------------------


@inline
def _reserve_payloads(context, size_bytes):
    """Take memory for the first bytes of every rank's payloads: each rank writes in all places."""
    stride, count = get(context, _PAYLOAD_STRIDE), RING * get(context, _WORLD_SIZE)
    payloads = get(context, _PAYLOADS)
    if not _may_take(context, count * min(size_bytes + PAGE_BYTES, stride)):
        return _NO_ROOM
    if size_bytes == stride:
        return _reserve_granted(context, payloads, count * stride)
    for place in range(count):
        status = _reserve_granted(context, payloads + place * stride, size_bytes)
        if status != _OK:
            return status
    return _OK


@inline
def _take_payloads(context, size_bytes):
    """Ensure memory for payloads of this size and somewhat larger ones; return a status."""
    if size_bytes > get(context, _READY_PAYLOADS):
        word = get(context, _EVENT_LINE) + EVENT_PAYLOADS
        ready_bytes = load64_acquire(word)
        if ready_bytes < size_bytes:  # no other rank has taken it yet
            ready_bytes = PAGE_BYTES
            while ready_bytes < size_bytes:
                ready_bytes *= 4
            ready_bytes = min(ready_bytes, get(context, _PAYLOAD_STRIDE))
            status = _reserve_payloads(context, ready_bytes)
            if status != _OK:
                return status
            # If two ranks do this at once, the smaller size may remain. It is found too small
            # later, which does no harm.
            store64_release(word, ready_bytes)
        put(context, _READY_PAYLOADS, ready_bytes)
    put(context, _READY_BYTES, min(get(context, _READY_PAYLOADS), get(context, _ONE_SHOT_BYTES)))
    return _OK


@inline
def _take_stages(context):
    """Take memory for this rank's stages: others touch them only after it has filled them."""
    chunk_bytes, world_size = get(context, _CHUNK_BYTES), get(context, _WORLD_SIZE)
    for turn in range(STAGES):
        place = turn * world_size + get(context, _RANK)
        stage = get(context, _STAGES) + place * chunk_bytes
        status = _reserve_granted(context, stage, chunk_bytes)
        if status != _OK:
            return status
    put(context, _READY_STAGES, 1)
    return _OK


@compiled
def take_memory(context, payload_bytes):
    """Ensure memory for payloads of this size or, for 0, for stages; return a status.

    It is called before a call begins; see `steps.make_ready`. It is a C function of its own, so
    that a communicator has it once.
    """
    if payload_bytes > 0:
        return _take_payloads(context, payload_bytes)
    if get(context, _READY_STAGES) != 0:
        return _OK
    if not _may_take(context, STAGES * get(context, _CHUNK_BYTES)):
        return _NO_ROOM
    return _take_stages(context)


@inline
def have_stages(context):
    """Ensure memory for stages in a call that has found out late that it needs them.

    This happens if some ranks' arrays lie in shared arenas and others' do not. All ranks are in the
    call by then, so a lack of memory breaks the communicator.
    """
    if get(context, _READY_STAGES) != 0 or _take_stages(context) == _OK:
        return _OK
    give_up(context, _ABORT_NO_ROOM, get(context, _RANK))
    return _EVENT
